"""A shadow generation decides beside the active one: what it would have done is counted, and nothing is done.

The numbers answer one question before anything is promoted: how many requests would the new generation have
refused that were granted, and the reverse? Both decide on the same ledger, that of the moment: what the
shadow would hold, had it granted all along, nobody knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.answers import Granted
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.limits import Limits, limits_of_policy
from coordinator.ledger.notes import ShadowCount
from coordinator.ledger.record import Alias, Kind
from coordinator.ledger.reservation import Reserve
from coordinator.ledger.rules import Code, Refused
from coordinator.store.api import Put, Store, StoreUnavailable, StoreUnknown, Txn
from coordinator.view import View

PENDING_MAX = 10_000  # decisions that wait to be counted; older ones are left out then
JUDGED = (Kind.MAIN, Kind.RESERVE)

_log = structlog.get_logger("coordinator.shadowing")


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer of the active generation, where the number of slots decided it."""

    kind: Kind
    granted: bool


def is_shadowed(alias: Alias | None) -> bool:
    """Whether a generation decides beside the one that grants."""
    return alias is not None and alias.shadow != 0 and not (alias.taking_over or alias.withdrawn)


def decision_of(ask: Reserve, outcome: Granted | Refused) -> Decision | None:
    """None where another reason than the number of slots decided: both would have it."""
    if ask.kind not in JUDGED or (
            isinstance(outcome, Refused) and outcome.code is not Code.FULL):
        return None
    return Decision(ask.kind, isinstance(outcome, Granted))


def count(
    before: ShadowCount, decisions: Sequence[Decision], held: Mapping[Kind, int], shadow: Limits, *,
    failover: bool,
) -> ShadowCount:
    """The counts with these decisions, in their order. `held`: slots held by kind, after the last of them.

    Nothing is known of what was given back in between: a slot counts as held from its grant on. Pure.
    """
    free_from = {kind: held.get(kind, 0) - sum(each.granted for each in decisions if each.kind is kind)
                 for kind in JUDGED}
    both, only_active, only_shadow = before.both, before.only_active, before.only_shadow
    for each in decisions:
        would = free_from[each.kind] < shadow.usable(each.kind, failover)
        free_from[each.kind] += each.granted
        both += each.granted and would
        only_active += each.granted and not would
        only_shadow += would and not each.granted
    return replace(before, both=both, only_active=only_active, only_shadow=only_shadow)


class Shadowing:
    """Counts on this host; `run` must run. Written to etcd at most once a lease cycle, when it changed."""

    def __init__(
        self, store: Store, keys: FleetKeys, views: Callable[[], Mapping[str, View]], *, host: str,
        ttl_seconds: float, now_us: Callable[[], int],
    ) -> None:
        self._store = store
        self._keys = keys
        self._views = views
        self._host = host
        self._ttl = ttl_seconds
        self._now_us = now_us
        self._pending: dict[str, deque[Decision]] = {}
        self._some = trio.Event()

    def decided(self, db: str, ask: Reserve, outcome: Granted | Refused) -> None:
        """A request of this host has its answer."""
        decision = decision_of(ask, outcome)
        if decision is not None and is_shadowed(self._views()[db].alias):
            self._pending.setdefault(db, deque(maxlen=PENDING_MAX)).append(decision)
            self._some.set()

    async def run(self) -> None:
        """Counts what was decided, once a lease cycle."""
        while True:
            await self._some.wait()
            await trio.sleep(self._ttl)  # noqa: TID251 - the pace of what is written
            self._some = trio.Event()
            for db in tuple(self._pending):
                try:
                    await self._count(db, self._pending.pop(db))
                except (StoreUnavailable, StoreUnknown):
                    continue  # so many decisions are not counted
                except ValueError as fault:
                    _log.error(Event.SOMETHING_FAILED, database=db, why=f"shadow: {fault}")

    async def _count(self, db: str, pending: Sequence[Decision]) -> None:
        view, keys = self._views()[db], self._keys.db(db)
        alias = view.alias
        if alias is None or not is_shadowed(alias):
            return
        key = keys.shadow(alias.shadow, self._host)
        stored = {entry.key: entry.value
                  for entry in (await self._store.read(keys.policy(alias.shadow), key)).entries}
        if keys.policy(alias.shadow) not in stored:
            return
        held = {kind: len((await self._store.range(keys.sessions(kind))).entries) for kind in JUDGED}
        before = ShadowCount.decode(stored[key]) if key in stored else ShadowCount(since_us=self._now_us())
        after = count(before, list(pending), held, limits_of_policy(stored[keys.policy(alias.shadow)]),
                      failover=view.epoch is not None and view.epoch.failover)
        if after != before:
            await self._store.txn(Txn(puts=(Put(key, after.encode()),)))
