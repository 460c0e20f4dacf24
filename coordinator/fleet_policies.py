"""What every ledger of a fleet's root promises, read from the store at one revision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import unquote

from coordinator.ledger.keys import FleetKeys, prefix_end
from coordinator.ledger.record import Alias, Epoch, UnknownSchema
from coordinator.ledger.snapshot import reading
from coordinator.placement import Demand, larger_of
from coordinator.policy import Policy, PolicyRefused, decode_policy
from coordinator.spec import DatabaseSpec
from coordinator.store.api import Entry, Store, StoreUnavailable, Won


async def fleet_demands(
    store: Store, keys: FleetKeys, ledgers: Mapping[str, Sequence[DatabaseSpec]]
) -> dict[str, Demand]:
    """By ledger, also of those that this config does not know. What another version wrote is left out.

    Raises StoreUnavailable, StoreUnknown.
    """
    prefixes = (keys.root + "policy/", keys.root + "epoch/")
    outcome = await store.txn(reading(*((prefix, prefix_end(prefix)) for prefix in prefixes)))
    if isinstance(outcome, Won):  # its compare cannot hold
        raise StoreUnavailable("the store believes the impossible")
    policies, epochs = outcome.reads
    backends = {}
    for entry in epochs:
        with suppress(UnknownSchema, ValueError):
            backends[unquote(entry.key.removeprefix(prefixes[1]))] = Epoch.decode(entry.value).backend
    found = {}
    for db, policy in policies_in_force(keys, policies).items():
        backend = backends.get(db)
        found[db] = Demand(
            db, hosts_of(policy, ledgers.get(db, ()), [backend.address] if backend else []), policy,
            backend.system_identifier if backend else "")
    return found


def policies_in_force(keys: FleetKeys, entries: Iterable[Entry]) -> dict[str, Policy]:
    """By ledger, out of everything under `policy/`; where two generations grant, the larger of both."""
    aliases: dict[str, Alias] = {}
    stored: dict[tuple[str, int], bytes] = {}
    for entry in entries:
        db, _, name = entry.key.removeprefix(keys.root + "policy/").partition("/")
        with suppress(UnknownSchema, ValueError):
            if name == "alias":
                aliases[unquote(db)] = Alias.decode(entry.value)
            else:
                stored[unquote(db), int(name.rpartition("/")[2])] = entry.value
    found = {}
    for db, alias in aliases.items():
        own = policy_of(stored.get((db, alias.granting)))
        if own is not None:
            found[db] = larger_of(own, policy_of(stored.get((db, alias.taking_over))))
    return found


def policy_of(raw: bytes | None) -> Policy | None:
    """A stored generation; None for none, and for what a newer version wrote."""
    with suppress(PolicyRefused, ValueError):
        return decode_policy(raw) if raw is not None else None
    return None


def hosts_of(policy: Policy, specs: Sequence[DatabaseSpec], more: Iterable[str] = ()) -> tuple[str, ...]:
    """Where sessions of a ledger may be: the hosts of this config, those it was published for, and `more`."""
    hosts = [host for spec in specs for host in spec.hosts]
    return tuple(dict.fromkeys((*hosts, *policy.resolved.hosts, *more)))


def can_fail_over(specs: Sequence[DatabaseSpec], *, patroni: bool = False) -> bool:
    """Whether there is another server to go to: several configured hosts, or a Patroni that names one."""
    return patroni or len({host for spec in specs for host in spec.hosts}) > 1
