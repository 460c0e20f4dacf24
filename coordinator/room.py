"""Whether the servers have room for what the active policies promise: asked before a policy is published, and
by the leader ever after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.proofs import Look
from coordinator.looks import Eyes, LookFailed
from coordinator.policy import Policy
from coordinator.spec import DatabaseSpec
from coordinator.view import View

AGAIN_SECONDS = 3600.0
AGAIN_AFTER_FAILURE_SECONDS = 30.0

_log = structlog.get_logger("coordinator.room")


@dataclass(frozen=True, slots=True)
class Demand:
    """What one ledger may open at any of its hosts: after a failover, all of it at one."""

    db: str
    hosts: tuple[str, ...]
    policy: Policy

    @property
    def sessions(self) -> int:
        policy = self.policy
        return (policy.server_session_permits + policy.reserve_permits + policy.admin_reserve
                + policy.other_clients)


def crowded(demands: Iterable[Demand], looks: Mapping[str, Look]) -> dict[str, str]:
    """By ledger, the server that has no room for it and for those it may meet there, with both numbers.

    `looks` by address; a server that was not seen, or does not tell its limits, is not judged. Pure.
    """
    met: dict[tuple[str, int], dict[str, tuple[Look, Demand]]] = {}
    for demand in demands:
        for look in (looks[host] for host in demand.hosts if host in looks):
            if look.max_connections:
                node = (look.backend.system_identifier, look.backend.postmaster_start_us)
                met.setdefault(node, {})[demand.db] = (look, demand)
    found: dict[str, str] = {}
    for there in met.values():
        look = next(iter(there.values()))[0]
        room = look.max_connections - look.reserved_connections
        sums = [demand for _, demand in there.values()]
        limits = [d for d in sums if (d.policy.hard_connection_limit or 0) > room]
        if sum(demand.sessions for demand in sums) > room:
            wanted = " + ".join(f"{demand.db} {demand.sessions}" for demand in sums)
            why = f"the policies want {wanted} sessions there (permits, reserves and other clients)"
        elif limits:
            why = f"hardConnectionLimit of {limits[0].db} is {limits[0].policy.hard_connection_limit}"
        else:
            continue
        text = (f"{look.backend.address} has room for {room} sessions (max_connections "
                f"{look.max_connections}, {look.reserved_connections} of them reserved), but {why}")
        found |= {demand.db: text for demand in sums if demand.db not in found}
    return found


async def look_at_hosts(eyes: Eyes, demands: Iterable[Demand]) -> tuple[dict[str, Look], bool]:
    """What can be seen of their hosts, and whether that was all."""
    looks: dict[str, Look] = {}
    hosts = dict.fromkeys(host for demand in demands for host in demand.hosts)
    for host in hosts:
        try:
            looks[host] = await eyes.look(host)
        except LookFailed:
            continue
    return looks, len(looks) == len(hosts)


def demand_of(
    db: str, policy: Policy, specs: Sequence[DatabaseSpec], view: View | None = None
) -> Demand | None:
    """What this ledger wants, at the hosts of the config and at the epoch's; None without a monitor login."""
    if not any(spec.monitor for spec in specs):
        return None
    hosts = [host for spec in specs for host in spec.hosts]
    if view is not None and view.epoch is not None:
        hosts.append(view.epoch.backend.address)
    return Demand(db, tuple(dict.fromkeys(hosts)), policy)


class Room:
    """The leader's watch: `crowded` says, by ledger, where there is no room. Checked at the start, whenever
    an epoch or an active policy changes, and each hour. A server out of reach is judged as last seen."""

    def __init__(
        self, eyes: Eyes, ledgers: Mapping[str, tuple[DatabaseSpec, ...]],
        views: Callable[[], Mapping[str, View]],
    ) -> None:
        self._eyes = eyes
        self._ledgers = ledgers
        self._views = views
        self._news = trio.Event()
        self._judged: tuple[object, ...] = ()
        self._looks: dict[str, Look] = {}
        self.crowded: dict[str, str] = {}
        self.on_change: list[Callable[[], None]] = []

    def heard(self, view: View) -> None:
        """A ledger changed: look again if it is an epoch or a policy that did."""
        if self._grounds() != self._judged:
            self._news.set()

    async def watch(self) -> None:
        """For ever, while this coordinator leads; then nothing is said of it any more."""
        try:
            while True:
                self._news = trio.Event()
                saw_all = await self.check()
                with trio.move_on_after(AGAIN_SECONDS if saw_all else AGAIN_AFTER_FAILURE_SECONDS):
                    await self._news.wait()
        finally:
            self._judged, self._looks = (), {}
            self._settle({})

    async def check(self) -> bool:
        """One look at every host; False if some could not be looked at."""
        self._judged = self._grounds()
        views = self._views()
        demands = [demand for db, specs in self._ledgers.items() if (policy := views[db].policy) is not None
                   and (demand := demand_of(db, policy, specs, views[db])) is not None]
        looks, saw_all = await look_at_hosts(self._eyes, demands)
        self._looks |= looks
        self._settle(crowded(demands, self._looks))
        return saw_all

    def _grounds(self) -> tuple[object, ...]:
        return tuple((db, view.policy, view.epoch and (view.epoch.number, view.epoch.backend))
                     for db, view in self._views().items())

    def _settle(self, found: dict[str, str]) -> None:
        before, self.crowded = self.crowded, found
        for db, why in found.items():
            if before.get(db) != why:
                _log.error(Event.POLICY_OVER_SERVER, database=db, why=why)
        if before != found:
            for listener in self.on_change:
                listener()
