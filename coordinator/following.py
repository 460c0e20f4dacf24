"""The leader's watch over each ledger's backend: when a failover was none of ours, the next epoch follows it.

By level: a glance at the epoch's backend each second; at every configured host each few seconds, and as soon
as that does not look as it should or somebody gives a hint. No other address is dialled, whoever names it. A
server that was seen to take writes beside the backend is told of until it is seen otherwise. What is seen is
judged by topology.py; the epoch moves by one write that compares it and this leader's key.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog
import trio

from coordinator.epoch import EpochEntry, NoEpoch, advanced, read_epoch, swap_epoch
from coordinator.epoch_moves import MoveUnknown, move_epoch
from coordinator.events import Event
from coordinator.glancing import Glances
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Backend, Epoch, EpochState, Kind, LedgerState, UnknownSchema
from coordinator.patroni import PatroniFailed
from coordinator.spec import DatabaseSpec
from coordinator.store.api import Compare, Store, StoreUnavailable, StoreUnknown
from coordinator.topology import (
    Advance,
    Cluster,
    Glance,
    Nobody,
    Seen,
    Stay,
    Verdict,
    decide,
    needs_all,
    second_primary,
)
from coordinator.view import View, Views

LEVEL_SECONDS = 1.0
HINTED_SECONDS = 0.2  # from one glance to the next, at the least
ELSEWHERE_SECONDS = 5.0  # between looks at the other hosts of a primary that serves
MOVE_SECONDS_MAX = 3.0
CLEAR_SECONDS = 2.0  # between looks at the ledger for what an older epoch still holds

_log = structlog.get_logger("coordinator.following")

AskPatroni = Callable[[], Awaitable[Cluster]]
"""Who leads, as Patroni says; raises PatroniFailed."""

Left = Callable[[str, Epoch, Seen | None, Compare], Awaitable[None]]
"""(database, the epoch that was left, its backend as it was seen last, the leader's fence): run beside."""


@dataclass(slots=True)
class _Followed:
    """What is known of one ledger's backend."""

    hosts: tuple[str, ...]
    role: str
    lag_seconds_max: float | None
    hint: trio.Event = field(default_factory=trio.Event)
    hinted: bool = False
    said: Verdict = field(default_factory=Stay)
    open_elsewhere: bool = False  # sessions were opened at hosts that are none of ours now
    clear_at: float = 0.0
    timeline: tuple[int, int] = (0, 0)  # the epoch, and the latest that its backend was a primary on
    others: dict[str, Glance] = field(default_factory=dict)  # what each other host was when it last answered
    advanced_at: float = float("-inf")

    @classmethod
    def of(cls, specs: Sequence[DatabaseSpec]) -> _Followed:
        lags = [spec.max_replica_lag_seconds for spec in specs if spec.max_replica_lag_seconds is not None]
        hosts = dict.fromkeys(host for spec in specs for host in spec.hosts)
        return cls(tuple(hosts), specs[0].role, min(lags, default=None))

    def on_its_timeline(self, epoch: Epoch, seen: Seen) -> Epoch:
        """The epoch as it is to be judged: on the timeline that its backend was seen on as a primary since.
        It may have been promoted in its place, and only a later one than that is a successor's."""
        number, timeline = self.timeline
        if number != epoch.number:
            timeline = 0
        if isinstance(seen, Glance) and not seen.backend.in_recovery and (
                seen.backend.system_identifier == epoch.backend.system_identifier):
            timeline = max(timeline, seen.backend.timeline)
        self.timeline = epoch.number, timeline
        latest = max(timeline, epoch.backend.timeline)
        return replace(epoch, backend=replace(epoch.backend, timeline=latest))


class Following:
    """Follows the backends of all ledgers while this coordinator leads."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledgers: Mapping[str, Ledger], views: Views,
        databases: Mapping[str, tuple[DatabaseSpec, ...]], glances: Glances, *, now_us: Callable[[], int],
        drain_timeout_seconds: float, ask_patroni: AskPatroni | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._ledgers = ledgers
        self._views = views
        self._glances = glances
        self._now_us = now_us
        self._clock = clock
        self._drain_timeout_seconds = drain_timeout_seconds
        self._ask_patroni = ask_patroni
        self._cluster: Cluster | None = None
        self._patroni_said = ""
        # without a monitor login nothing can be seen, so nothing is followed
        self._followed = {db: _Followed.of(specs) for db, specs in databases.items()
                          if any(spec.monitor for spec in specs)}
        self.on_left: list[Left] = []

    def hint(self, db: str) -> None:
        """A worker met something at the backend of `db` that it should not be: look everywhere, now."""
        followed = self._followed.get(db)
        if followed is not None:
            followed.hinted = True
            followed.hint.set()

    def reasons(self) -> dict[str, str]:
        """By database: what is wrong with its backend, or to be known of it, as it was judged last."""
        return {db: followed.said.reason for db, followed in self._followed.items()
                if not isinstance(followed.said, Advance) and followed.said.reason}

    def unfit(self) -> frozenset[str]:
        """Databases whose backend cannot serve as it should, with nobody seen that could."""
        return frozenset(db for db, followed in self._followed.items() if isinstance(followed.said, Nobody))

    async def lead(self, fence: Compare) -> None:
        """Follows for as long as this coordinator leads."""
        try:
            async with trio.open_nursery() as nursery:
                if self._ask_patroni is not None:
                    nursery.start_soon(self._hear_patroni, self._ask_patroni)
                for db, followed in self._followed.items():
                    nursery.start_soon(self._follow_for_ever, db, fence, nursery)
                    if followed.role == "write":
                        nursery.start_soon(self._watch_others, db)
        finally:
            self._cluster = None
            for followed in self._followed.values():
                followed.said = Stay()
                followed.others.clear()
                followed.advanced_at = float("-inf")

    async def _hear_patroni(self, ask: AskPatroni) -> None:
        while True:
            said = ""
            try:
                self._cluster = await ask()
            except PatroniFailed as failed:
                said = str(failed)
            if said and not self._patroni_said:
                _log.error(Event.PATRONI_SILENT, why=said)
            self._patroni_said = said
            await trio.sleep(LEVEL_SECONDS)  # noqa: TID251 - Patroni tells nobody

    async def _follow_for_ever(self, db: str, fence: Compare, nursery: trio.Nursery) -> None:
        followed = self._followed[db]
        while True:
            followed.hint = trio.Event()
            try:
                left = await self.follow(db, fence)
            except (StoreUnavailable, StoreUnknown, NoEpoch, MoveUnknown):
                left = None  # the views say so; the next pass begins with what stands then
            except (UnknownSchema, ValueError) as fault:
                left = None
                _log.error(Event.SOMETHING_FAILED, database=db, why=str(fault))
            for listener in self.on_left if left is not None else ():
                assert left is not None
                nursery.start_soon(listener, db, *left, fence)
            await trio.sleep(HINTED_SECONDS)  # noqa: TID251 - however many workers hint
            with trio.move_on_after(LEVEL_SECONDS - HINTED_SECONDS):
                await followed.hint.wait()

    async def _watch_others(self, db: str) -> None:
        """Beside the glances at the backend, which a host that does not answer must not hold up."""
        followed = self._followed[db]
        while True:
            epoch = self._views.views[db].epoch
            if epoch is not None:
                await self._look_elsewhere(followed, epoch)
            await trio.sleep(ELSEWHERE_SECONDS)  # noqa: TID251 - servers tell nobody

    async def follow(self, db: str, fence: Compare) -> tuple[Epoch, Seen | None] | None:
        """One pass. → the epoch that was left, and its backend as it was seen last, if one was.

        Raises StoreUnavailable, StoreUnknown, NoEpoch, MoveUnknown, UnknownSchema, ValueError.
        """
        view, followed = self._views.views[db], self._followed[db]
        epoch = view.epoch
        if epoch is None or not _is_whole(view):
            return None
        looks, verdict = await self._judge(followed, epoch)
        self._say(db, followed, verdict)
        if isinstance(verdict, Advance):
            if await self._advance(db, epoch, verdict, fence):
                return epoch, looks.get(epoch.backend.address)
        elif epoch.failover:
            await self._clear(db, epoch, fence)
        return None

    async def _judge(self, followed: _Followed, epoch: Epoch) -> tuple[dict[str, Seen], Verdict]:
        """What is seen at the epoch's backend, and elsewhere if that calls for it or somebody asked."""
        everywhere, followed.hinted = followed.hinted, False
        here = epoch.backend.address
        looks = await self._look([here])
        epoch = followed.on_its_timeline(epoch, looks[here])
        verdict = self._decide(followed, epoch, looks)
        if everywhere or needs_all(verdict):
            looks |= await self._look_elsewhere(followed, epoch)
            verdict = self._decide(followed, epoch, looks)
            followed.open_elsewhere = followed.role != "write"
        elif followed.open_elsewhere:
            followed.open_elsewhere = False
            await self._glances.close(*[host for host in followed.hosts if host not in self._watched()])
        if verdict == Stay() and followed.role == "write" and epoch.state is EpochState.ACTIVE:
            verdict = Stay(second_primary(epoch, {**followed.others, here: looks[here]}))
        return looks, verdict

    async def _look_elsewhere(self, followed: _Followed, epoch: Epoch) -> dict[str, Seen]:
        """At every other host. One that does not answer is what it was: nobody knows that it changed."""
        found = await self._look([host for host in followed.hosts if host != epoch.backend.address])
        followed.others |= {host: seen for host, seen in found.items() if isinstance(seen, Glance)}
        return found

    def _watched(self) -> set[str]:
        """Hosts whose sessions are kept for the next look."""
        backends = {view.epoch.backend.address for view in self._views.views.values() if view.epoch}
        return backends.union(*(each.hosts for each in self._followed.values() if each.role == "write"))

    def _decide(self, followed: _Followed, epoch: Epoch, looks: Mapping[str, Seen]) -> Verdict:
        verdict = decide(followed.role, epoch, looks, self._cluster, self._clock(),
                         lag_seconds_max=followed.lag_seconds_max,
                         since_advance_seconds=self._clock() - followed.advanced_at)
        named = self._cluster.leader if self._cluster is not None and followed.role == "write" else None
        known = (None, epoch.backend.address, *followed.hosts)
        if named not in known and not isinstance(verdict, Advance) and verdict.reason:
            return replace(verdict, reason=f"{verdict.reason} ({named} is none of the hosts in the config)")
        return verdict

    async def _look(self, addresses: Iterable[str]) -> dict[str, Seen]:
        found: dict[str, Seen] = {}

        async def at(address: str) -> None:
            found[address] = await self._glances.at(address)

        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(at, address)
        return found

    def _say(self, db: str, followed: _Followed, verdict: Verdict) -> None:
        """Once for each thing that is wrong, and when it is over."""
        before, followed.said = followed.said, verdict
        if type(verdict) is type(before) and not isinstance(verdict, Advance) and (
                bool(verdict.reason) == bool(before.reason)):
            return
        match verdict:
            case Nobody(reason=why):
                _log.error(Event.BACKEND_UNFIT, database=db, why=why)
            case Stay(reason=why) if why:
                _log.warning(Event.BACKEND_DOUBTFUL, database=db, why=why)
            case Stay() if not isinstance(before, Advance) and before.reason:
                _log.info(Event.BACKEND_FIT, database=db)

    async def _advance(self, db: str, epoch: Epoch, verdict: Advance, fence: Compare) -> bool:
        """The next epoch, if the one that was judged still stands; whether it does now."""
        keys = self._keys.db(db)
        before = await read_epoch(self._store, keys)
        if before.epoch != epoch:
            return False
        after = replace(
            advanced(epoch, verdict.backend, now_us=self._now_us(), reason=verdict.reason,
                     drain_timeout_seconds=self._drain_timeout_seconds), failover=True)

        def is_mine(found: EpochEntry, command: int) -> bool:
            return found.epoch == after

        won = await move_epoch(
            self._store, keys, before, after, fence, is_mine=is_mine, seconds_max=MOVE_SECONDS_MAX)
        if won is None:
            return False
        _log.warning(Event.EPOCH_FAILED_OVER, database=db, epoch=after.number, why=verdict.reason,
                     backend=verdict.backend.address, before=epoch.backend.address)
        self._followed[db].advanced_at = self._clock()
        self._views.hint()
        return True

    async def _clear(self, db: str, epoch: Epoch, fence: Compare) -> None:
        """Once no session of an older epoch is left unproven, nothing has to be made up for any more."""
        followed, keys = self._followed[db], self._keys.db(db)
        if self._clock() < followed.clear_at:
            return
        followed.clear_at = self._clock() + CLEAR_SECONDS
        snapshot = await self._ledgers[db].snapshot()
        left = any(held.session.epoch < epoch.number and held.session.kind is not Kind.ADMIN
                   for held in snapshot.sessions)
        if left or self._ledgers[db].lost:
            return
        before = await read_epoch(self._store, keys)
        if before.epoch == epoch and await swap_epoch(
                self._store, keys, before, replace(epoch, failover=False), fence):
            _log.info(Event.FAILOVER_OVER, database=db, epoch=epoch.number)
            self._views.hint()


def _is_whole(view: View) -> bool:
    """Whether its epoch may be moved: it is there, and nothing of it is lost or being rebuilt."""
    return (view.reachable and not view.lost and view.head is not None
            and view.head.state is LedgerState.ACTIVE)


def wants_fencing(role: str, old: Backend, seen: Seen | None) -> bool:
    """Whether a backend that was left may still do harm: not one that is seen as a standby, nor one whose
    address is another cluster's by now."""
    if role != "write":
        return False
    if not isinstance(seen, Glance):
        return True
    return not seen.backend.in_recovery and seen.backend.system_identifier == old.system_identifier
