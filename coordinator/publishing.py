"""A policy is published and its moves are carried out, on a store alone: no coordinator need be alive.

A thin shell: `policy_moves` says which transactions, `placement` whether the servers have room. An unknown
outcome is settled by what stands in etcd afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import trio

from coordinator.fleet_policies import fleet_demands, hosts_of
from coordinator.ledger.keys import DbKeys, FleetKeys, number_at, only, prefix_end
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.notes import ShadowCount
from coordinator.ledger.record import Alias
from coordinator.ledger.snapshot import Held, reading
from coordinator.looks import Eyes
from coordinator.placement import Demand, crowded, room_at
from coordinator.policy import Policy, encode_policy
from coordinator.policy_moves import (
    Drained,
    MoveRefused,
    Plan,
    Standing,
    is_published,
    left_of,
    publication,
    swap,
)
from coordinator.room import look_at_hosts
from coordinator.spec import DatabaseSpec
from coordinator.store.api import (
    TXN_OPERATIONS_MAX,
    Entry,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
)

ROUNDS_MAX = 8
POLL_SECONDS = 0.2


class NoRoom(Exception):
    """A server has no room for what the policy promises, or none of them could be looked at: says which."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the servers showed. `room`: sessions of ordinary roles that the smallest of them has."""

    room: int | None = None
    not_seen: Mapping[str, str] | None = None  # node → why; None: nobody may look


async def read_standing(store: Store, keys: DbKeys) -> Standing:
    """The alias and every generation, at one revision. Raises StoreUnavailable, StoreUnknown."""
    outcome = await store.txn(reading(only(keys.alias()), (keys.policies(), prefix_end(keys.policies()))))
    if isinstance(outcome, Won):  # its compare cannot hold
        raise StoreUnavailable("the store believes the impossible")
    alias, generations = outcome.reads
    numbered = {number_at(entry.key): entry.value for entry in generations}
    return Standing(alias[0] if alias else None,
                    {number: value for number, value in numbered.items() if number is not None})


async def read_shadow_counts(store: Store, keys: DbKeys, generation: int) -> ShadowCount:
    """How its decisions compared with the active one's, over all hosts."""
    total = ShadowCount()
    for entry in (await store.range(f"{keys.shadow(generation, '')}")).entries:
        one = ShadowCount.decode(entry.value)
        since = min(each for each in (total.since_us or one.since_us, one.since_us))
        total = ShadowCount(total.only_active + one.only_active, total.only_shadow + one.only_shadow,
                            total.both + one.both, since)
    return total


async def check_servers(
    store: Store, fleet: FleetKeys, policy: Policy, ledgers: Mapping[str, Sequence[DatabaseSpec]],
    eyes: Eyes | None,
) -> Checked:
    """Holds it beside the servers where its sessions may be, with every other ledger of the fleet that may
    meet it there. Without `eyes` nothing is checked.

    Raises NoRoom, StoreUnavailable, StoreUnknown, and what the first look through admin eyes may.
    """
    if eyes is None:
        return Checked()
    db = policy.database
    demands = await fleet_demands(store, fleet, ledgers)
    before = demands.get(db)
    hosts = hosts_of(policy, ledgers.get(db, ()), before.hosts if before else ())
    looks, failed = await look_at_hosts(eyes, hosts)
    if not looks:
        why = "; ".join(failed.values()) or "no host is known"
        raise NoRoom(f"no server could be looked at, so nothing says that there is room: {why}")
    system = before.system_identifier if before else ""
    system = system or next(look.backend.system_identifier for look in looks.values())
    demands[db] = own = Demand(db, hosts, policy, system)
    told = crowded(demands.values(), looks).get(db)
    if told:
        raise NoRoom(told)
    rooms = [room for host, look in looks.items()
             if own.is_at(look, (host,)) and (room := room_at(look)) is not None]
    return Checked(min(rooms, default=None), failed)


async def publish(
    store: Store, keys: DbKeys, policy: Policy, document: Mapping[str, Any], checked: Checked, *,
    can_fail_over: bool, hosts: Sequence[str], role: str,
) -> tuple[bool, Alias]:
    """Writes the generation, if it is not there; whether this did it, and the alias as it stands then.

    Raises MoveRefused, StoreUnavailable, StoreUnknown.
    """
    resolved = policy.resolve(can_fail_over=can_fail_over, hosts=hosts, role=role, room=checked.room)
    own = encode_policy(document, resolved)
    written, unknown = False, False
    for _ in range(ROUNDS_MAX):
        standing = await read_standing(store, keys)
        if is_published(standing, policy):
            return written or (unknown and standing.generations[policy.generation] == own), standing.alias
        try:
            outcome = await store.txn(publication(standing, policy, document, resolved, keys))
            written = isinstance(outcome, Won)
        except StoreUnknown:
            unknown = True  # what stands there now says it
    raise MoveRefused("others publish all the time: look, and try again")


class Mover:
    """Carries the plans of one ledger out. `tell` hears of what is waited for."""

    def __init__(
        self, store: Store, keys: DbKeys, ledger: Ledger, tell: Callable[[int, list[Held]], None]
    ) -> None:
        self._store = store
        self._keys = keys
        self._ledger = ledger
        self._tell = tell

    async def move(self, make_plan: Callable[[Standing], Plan]) -> Alias:
        """Plans from where the policies stand and does all of it; the alias then.

        Raises MoveRefused, StoreUnavailable, StoreUnknown; at whatever step, what stands is consistent.
        """
        standing = await read_standing(self._store, self._keys)
        for step in make_plan(standing):
            if isinstance(step, Drained):
                await self._until_none_left(step.generation)
            else:
                standing = await self._swap(standing, step.alias)
        return standing.alias

    async def forget_counts(self) -> None:
        """What shadows counted so far says nothing of the next one."""
        counts = [entry.key for entry in (await self._store.range(self._keys.shadows())).entries]
        for first in range(0, len(counts), TXN_OPERATIONS_MAX):
            await self._store.txn(Txn(deletes=tuple(counts[first:first + TXN_OPERATIONS_MAX])))

    async def _swap(self, standing: Standing, alias: Alias) -> Standing:
        txn = swap(standing, alias, self._keys)
        for _ in range(ROUNDS_MAX):
            try:
                outcome = await self._store.txn(txn)
            except StoreUnknown:
                outcome = None
            if isinstance(outcome, Won):
                return _with_alias(standing, alias, self._keys, outcome.revision)
            now = await read_standing(self._store, self._keys)
            if now.alias == alias:
                return now  # by the attempt whose answer was lost, or by somebody who wanted the same
            if outcome is not None or now.alias_entry != standing.alias_entry:
                raise MoveRefused("the policies of this ledger were moved meanwhile: look, and try again")
        raise StoreUnavailable("the alias could not be written")

    async def _until_none_left(self, generation: int) -> None:
        """Nothing more is granted under it: once none is left there will be none."""
        while True:
            try:
                left = left_of(await self._ledger.snapshot(), generation)
            except (StoreUnavailable, StoreUnknown):
                left = None
            if left is not None:
                self._tell(generation, left)
                if not left:
                    return
            await trio.sleep(POLL_SECONDS)  # noqa: TID251 - the pace of what is told


def _with_alias(standing: Standing, alias: Alias, keys: DbKeys, revision: int) -> Standing:
    before = standing.alias_entry
    created = before.create_revision if before else revision
    return replace(standing, alias_entry=Entry(keys.alias(), alias.encode(), created, revision))
