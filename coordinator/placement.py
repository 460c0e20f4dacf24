"""Whether the servers have room for what the policies promise, wherever sessions may have to go. Pure.

Ledgers meet at a server where both name it or one is at another address of it, and where both are of one
cluster: after a failover any of its nodes may have to serve them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.ledger.proofs import Look
from coordinator.policy import Policy


@dataclass(frozen=True, slots=True)
class Demand:
    """What one ledger may open at any of its hosts: after a failover, all of it at one."""

    db: str
    hosts: tuple[str, ...]
    policy: Policy
    system_identifier: str = ""  # of its epoch's backend; "": not known

    @property
    def sessions(self) -> int:
        policy = self.policy
        return (policy.server_session_permits + policy.reserve_permits + policy.admin_reserve
                + policy.other_clients)

    def is_at(self, look: Look, addresses: Iterable[str]) -> bool:
        """Whether its sessions may be at this server, which was seen at these addresses: one of another
        cluster is no place for it, whoever names its address."""
        if self.system_identifier and look.backend.system_identifier:
            return self.system_identifier == look.backend.system_identifier
        return any(address in self.hosts for address in addresses)


def larger_of(one: Policy, other: Policy | None) -> Policy:
    """What is to be reckoned with while both grant."""
    if other is None:
        return one
    limits = [each for each in (one.hard_connection_limit, other.hard_connection_limit) if each is not None]
    return replace(
        one,
        server_session_permits=max(one.server_session_permits, other.server_session_permits),
        reserve_permits=max(one.reserve_permits, other.reserve_permits),
        admin_reserve=max(one.admin_reserve, other.admin_reserve),
        replication_reserve=max(one.replication_reserve, other.replication_reserve),
        other_clients=max(one.other_clients, other.other_clients),
        hard_connection_limit=min(limits, default=None),
    )


def crowded(demands: Iterable[Demand], looks: Mapping[str, Look]) -> dict[str, str]:
    """By ledger, what a server has no room for of what it and those it may meet there want: each with both
    numbers. `looks` by address; a server that was not seen, or does not tell its limits, is not judged.
    """
    wanted = list(demands)
    servers: dict[tuple[str, int], tuple[Look, list[str]]] = {}
    for address, look in looks.items():
        if not look.max_connections:
            continue
        node = (look.backend.system_identifier, look.backend.postmaster_start_us)
        servers.setdefault(node, (look, []))[1].append(address)
    found: dict[str, list[str]] = {}
    for look, addresses in servers.values():
        there = [demand for demand in wanted if demand.is_at(look, addresses)]
        for text in _violations(look, there):
            for demand in there:
                found.setdefault(demand.db, []).append(text)
    return {db: "; ".join(texts) for db, texts in found.items()}


def foreign(demands: Iterable[Demand], looks: Mapping[str, Look]) -> dict[str, str]:
    """By ledger, which of its hosts are of another cluster than its epoch's server: some config is wrong."""
    found = {}
    for demand in demands:
        wrong = [f"{host} is another cluster (system identifier {looks[host].backend.system_identifier})"
                 for host in demand.hosts if host in looks and not demand.is_at(looks[host], (host,))]
        if wrong:
            found[demand.db] = f"{'; '.join(wrong)}, and the sessions are in {demand.system_identifier}"
    return found


def room_at(look: Look) -> int | None:
    """Sessions that a server has for ordinary roles; None: it does not tell."""
    return look.max_connections - look.reserved_connections if look.max_connections else None


def _violations(look: Look, there: list[Demand]) -> list[str]:
    """What does not fit at one server."""
    room, total = look.max_connections - look.reserved_connections, sum(each.sessions for each in there)
    sums = " + ".join(f"{demand.db} {demand.sessions}" for demand in there)
    want = f"the policies want {sums} sessions there (permits, reserves and other clients)"
    hard = min(((demand.policy.hard_connection_limit, demand.db) for demand in there
                if demand.policy.hard_connection_limit is not None), default=None)
    has = (f"{look.backend.address} has room for {room} sessions (max_connections "
           f"{look.max_connections}, {look.reserved_connections} of them reserved)")
    found = [f"{has}, but {want}"] if total > room else []
    found += [f"{has}, but hardConnectionLimit of {demand.db} is {demand.policy.hard_connection_limit}"
              for demand in there if (demand.policy.hard_connection_limit or 0) > room]
    if hard is not None and total > hard[0]:
        found.append(f"hardConnectionLimit of {hard[1]} is {hard[0]}, but at {look.backend.address} {want}")
    return found + _walsender_violations(look, there)


def _walsender_violations(look: Look, there: list[Demand]) -> list[str]:
    replication = [demand for demand in there if demand.policy.replication_reserve]
    total = sum(demand.policy.replication_reserve for demand in replication)
    if look.max_wal_senders < 0 or total <= look.max_wal_senders:
        return []
    sums = " + ".join(f"{demand.db} {demand.policy.replication_reserve}" for demand in replication)
    return [f"{look.backend.address} has max_wal_senders {look.max_wal_senders}, but replicationReserve "
            f"is {sums} there"]
