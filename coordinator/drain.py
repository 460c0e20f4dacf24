"""The failover drain, run by a command on a store: the old epoch ends with proof, then the next one grants.

Planned order for a primary: check the target; the old epoch stops granting; every session of it ends with
proof; the promotion; the next epoch. So no transaction is granted at the new primary while one at the old
may still commit. Whatever goes wrong before the last step, the old epoch grants again: by this command, or,
when it died, by the leader, because its `drain` key goes with its lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from coordinator.drain_progress import Progress, Waits, look_at
from coordinator.drain_target import Code, Ended, Order, fit_target
from coordinator.epoch import (
    EpochEntry,
    NoEpoch,
    active_again,
    advanced,
    draining,
    is_in_recovery_still,
    note_promotion,
    ordering,
    read_epoch,
)
from coordinator.epoch_moves import MoveUnknown, move_epoch, pause
from coordinator.inspect import read_activities
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Backend, Epoch, EpochState, UnknownSchema
from coordinator.looks import Eyes, LookFailed
from coordinator.store.api import (
    Lease,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    absent,
)

PROGRESS_SECONDS = 1.0
KEY_TTL_SECONDS = 5.0
CLEANUP_SECONDS = 5.0
GRANT_AGAIN_SECONDS = 3.0
LOOK_SECONDS_MAX = 2.0
_MOVED = "the epoch moved meanwhile: nothing was changed"
_SILENT = "etcd does not answer"


@dataclass(frozen=True, slots=True)
class DrainOutcome:
    """How a drain ended; `text` says it in one line, `resolve` what frees the unknown permits."""

    code: Code
    text: str
    epoch: int
    backend: Backend | None = None
    unknown: tuple[str, ...] = ()
    waits_for: tuple[Waits, ...] = ()  # who has not acknowledged the new epoch, and why
    resolve: str = ""

    @property
    def not_acknowledged(self) -> tuple[str, ...]:
        """Boot ids of those workers."""
        return tuple(each.worker for each in self.waits_for)


async def drain(
    store: Store, keys: FleetKeys, ledger: Ledger, eyes: Eyes, order: Order, *,
    progress: Callable[[dict[str, Any]], None], now_us: Callable[[], int], run_dir: Path | None = None,
) -> DrainOutcome:
    """Carries the order out; `progress` is called each second and at each step.

    Raises StoreUnavailable if etcd does not answer at the start; nothing has been changed then.
    """
    return await _Drain(store, keys, ledger, eyes, order, progress, now_us, run_dir).run()


class _Drain:
    """One drain: the epoch as this command last wrote it, and the clock it runs by."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledger: Ledger, eyes: Eyes, order: Order,
        progress: Callable[[dict[str, Any]], None], now_us: Callable[[], int], run_dir: Path | None,
    ) -> None:
        self._store = store
        self._keys = keys.db(order.db)
        self._ledger = ledger
        self._eyes = eyes
        self._order = order
        self._progress = progress
        self._now_us = now_us
        self._run_dir = run_dir
        self._started = trio.current_time()
        self._said_at = float("-inf")
        self._last: Progress | None = None
        self._ordered: EpochEntry | None = None  # from then on the target may be a primary, whatever it says

    @property
    def _deadline(self) -> float:
        return self._started + self._order.timeout_seconds

    async def run(self) -> DrainOutcome:
        try:
            before = await read_epoch(self._store, self._keys)
            look = await fit_target(before.epoch, self._eyes, self._order)
        except NoEpoch as missing:
            return DrainOutcome(Code.UNFIT, str(missing), 0)
        except Ended as ended:
            return DrainOutcome(ended.code, ended.text, before.epoch.number)
        renews = look.backend.address == before.epoch.backend.address
        if self._order.switch_first or self._order.role == "read" or renews:
            return await self._switch_first(before, look.backend)
        return await self._planned(before, look.backend)

    # ---- old first: the planned order

    async def _planned(self, before: EpochEntry, target: Backend) -> DrainOutcome:
        lease = await self._new_lease()
        stopped: EpochEntry | None = None
        won: EpochEntry | None = None
        ended = Ended(Code.TIMED_OUT, "the drain was interrupted")
        again = ""
        try:
            stopped = await self._stop_granting(before, lease, target)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep, lease)
                try:
                    won = await self._drain_promote_advance(stopped, target, lease)
                except Ended as fault:
                    ended = fault
                nursery.cancel_scope.cancel()
        except Ended as fault:
            ended = fault
        finally:
            with trio.move_on_after(CLEANUP_SECONDS + LOOK_SECONDS_MAX, shield=True):
                if won is None and stopped is not None:
                    again = await self._grant_again(stopped)
                await _revoke(lease)
        if won is not None:
            return await self._acknowledged(won, target)
        unknown = self._last.unknown if self._last else ()
        return DrainOutcome(ended.code, f"{ended.text}{again}", before.epoch.number, unknown=unknown,
                            resolve=self._resolve_line(ended.code, before.epoch.number))

    async def _new_lease(self) -> Lease:
        try:
            return await self._store.lease(KEY_TTL_SECONDS)
        except StoreUnknown as fault:  # it may exist: with no key on it, it only ends
            raise StoreUnavailable(str(fault)) from None

    async def _stop_granting(self, before: EpochEntry, lease: Lease, target: Backend) -> EpochEntry:
        """Raises Ended, StoreUnavailable; a write that lands after that needs the lease, which is revoked."""
        number = before.epoch.number
        after = draining(
            before.epoch, timeout_seconds=self._order.drain_timeout_seconds, now_us=self._now_us(),
            reason=f"drain to {self._order.target or 'the primary'}", target=target)
        try:
            stopped = await move_epoch(
                self._store, self._keys, before, after, absent(self._keys.drain()),
                puts=(Put(self._keys.drain(), b"", lease.id),), seconds_max=CLEANUP_SECONDS,
                is_mine=lambda found, command: command == lease.id)
        except MoveUnknown:
            raise Ended(Code.TIMED_OUT, f"{_SILENT}: epoch {number} grants, or does again in "
                                        f"{KEY_TTL_SECONDS:g} s; the target was not promoted") from None
        if stopped is None:
            raise Ended(Code.UNFIT, _MOVED)
        return stopped

    async def _drain_promote_advance(
        self, stopped: EpochEntry, target: Backend, lease: Lease
    ) -> EpochEntry:
        """The next epoch as it stands. Raises Ended."""
        number = stopped.epoch.number
        await self._until_gone(number, "draining", stopped)
        if target.in_recovery:
            stopped = self._ordered = await self._confirm(stopped, lease)
        await self._promote(target, number)
        fresh = await self._until_primary(target, number)
        after = advanced(stopped.epoch, fresh, now_us=self._now_us(), reason="drained",
                         drain_timeout_seconds=self._order.drain_timeout_seconds)
        return await self._advance(stopped, after)

    async def _confirm(self, stopped: EpochEntry, lease: Lease) -> EpochEntry:
        """The old epoch is still closed, by this command, for a lease's time: else nothing is promoted. From
        here on nobody aborts it. Raises Ended."""
        while True:
            try:
                if not await lease.keep_alive():
                    raise Ended(Code.TIMED_OUT, "aborted: the drain's lease is gone; nothing was promoted")
                ordered = await note_promotion(self._store, self._keys, stopped, lease.id)
                if ordered is not None:
                    return ordered
                raise Ended(Code.TIMED_OUT, "aborted before the promotion")
            except (StoreUnknown, StoreUnavailable, NoEpoch) as fault:
                if trio.current_time() >= self._deadline:
                    raise Ended(Code.TIMED_OUT, f"{_SILENT}, nothing was promoted: {fault}") from None
            await pause()

    async def _advance(self, stopped: EpochEntry, after: Epoch) -> EpochEntry:
        """N+1, only while N still stands as this command left it. Raises Ended."""

        def is_mine(found: EpochEntry, command: int) -> bool:
            """Or the leader's, who took this command for dead and saw the same server promoted."""
            return (found.epoch.number, found.epoch.backend.address) == (after.number, after.backend.address)

        seconds = max(0.0, self._deadline - trio.current_time()) + CLEANUP_SECONDS
        try:
            won = await move_epoch(
                self._store, self._keys, stopped, after, deletes=(self._keys.drain(),), is_mine=is_mine,
                seconds_max=seconds)
        except (MoveUnknown, StoreUnavailable):
            raise Ended(Code.TIMED_OUT, _SILENT) from None
        if won is None:
            raise Ended(Code.TIMED_OUT, "aborted: the epoch was moved by somebody else")
        return won

    async def _acknowledged(self, won: EpochEntry, target: Backend) -> DrainOutcome:
        waiting = await self._until_acknowledged(won.epoch.number - 1)
        text = f"drained: epoch {won.epoch.number} is active at {target.address}"
        if waiting is None:
            text += f"; {_SILENT}: which workers have acknowledged it is not known"
        return DrainOutcome(Code.DRAINED, text, won.epoch.number, backend=won.epoch.backend,
                            waits_for=waiting or ())

    async def _promote(self, target: Backend, number: int) -> None:
        if not target.in_recovery:
            return
        if self._order.promote is None:
            self._say("drained: promote now", number)
            return
        self._say("promoting", number)
        code: int | None = None
        with trio.move_on_at(self._deadline):
            code = await self._order.promote()
        if code is None:
            raise Ended(Code.TIMED_OUT, "the promotion command did not end in time")
        if code != 0:
            raise Ended(Code.TIMED_OUT, f"the promotion command ended with code {code}")

    async def _until_primary(self, target: Backend, number: int) -> Backend:
        """The target once it is out of recovery. Raises Ended."""
        why = "it stays in recovery"
        while True:
            try:
                look = await self._eyes.look(target.address)
                if not look.backend.in_recovery:
                    return look.backend
            except LookFailed as failed:
                why = str(failed)
            if trio.current_time() >= self._deadline:
                raise Ended(Code.TIMED_OUT, f"{target.address} was not promoted in time: {why}")
            self._say_each_second("waiting for the promotion", number)
            await pause()

    async def _grant_again(self, stopped: EpochEntry) -> str:
        """Best effort; what became of the old epoch, as a suffix. What is not written here the leader writes
        once the lease is gone: it too looks at the target first."""
        number = stopped.epoch.number
        if self._ordered is not None and await self._may_be_promoted(stopped.epoch):
            return (f"; epoch {number} does not grant again here, since the target was or may be promoted: "
                    f"the leader decides by what it sees there")
        after = active_again(stopped.epoch, now_us=self._now_us(), reason="the drain was given up")
        try:
            now = await self._move_back(self._ordered or stopped, after)
            if now.epoch == ordering(stopped.epoch) and self._ordered is None:
                now = await self._move_back(now, after)  # the note of it landed late: nothing was ordered
        except (MoveUnknown, StoreUnknown, StoreUnavailable, NoEpoch):
            return f"; {_SILENT}: epoch {number} is active again once the leader sees this command gone"
        if now.epoch.number == number and now.epoch.state is EpochState.ACTIVE:
            return f"; epoch {number} is active again"
        return f"; epoch {now.epoch.number} is {now.epoch.state} at {now.epoch.backend.address}"

    async def _move_back(self, before: EpochEntry, after: Epoch) -> EpochEntry:
        """The epoch as it stands then. Raises MoveUnknown, StoreUnknown, StoreUnavailable, NoEpoch."""
        again = await move_epoch(
            self._store, self._keys, before, after, deletes=(self._keys.drain(),),
            is_mine=lambda found, command: found.epoch == after, seconds_max=GRANT_AGAIN_SECONDS)
        return again or await read_epoch(self._store, self._keys)

    async def _may_be_promoted(self, stopped: Epoch) -> bool:
        assert stopped.target is not None  # a planned drain names it
        with trio.move_on_after(LOOK_SECONDS_MAX):
            try:
                look = await self._eyes.look(stopped.target.address)
                return not is_in_recovery_still(stopped, look.backend)
            except LookFailed:
                pass
        return True

    async def _keep(self, lease: Lease) -> None:
        while True:
            await trio.sleep(KEY_TTL_SECONDS / 3)  # noqa: TID251 - the pace of keep-alives
            try:
                if not await lease.keep_alive():
                    return  # the leader makes the old epoch active again: the next look finds it moved
            except (StoreUnknown, StoreUnavailable):
                continue

    # ---- new first

    async def _switch_first(self, before: EpochEntry, target: Backend) -> DrainOutcome:
        number = before.epoch.number
        after = advanced(before.epoch, target, now_us=self._now_us(), reason="switched first",
                         drain_timeout_seconds=self._order.drain_timeout_seconds)
        try:
            won = await move_epoch(
                self._store, self._keys, before, after, seconds_max=CLEANUP_SECONDS,
                is_mine=lambda found, command: found.epoch == after)
        except MoveUnknown:
            return DrainOutcome(Code.TIMED_OUT, f"{_SILENT}: whether epoch {after.number} is active at "
                                                f"{target.address} is not known; order it again", number)
        if won is None:
            return DrainOutcome(Code.UNFIT, _MOVED, number)
        try:
            await self._until_gone(number, "draining behind", None)
        except Ended as ended:
            unknown = self._last.unknown if self._last else ()
            text = f"{ended.text}; epoch {after.number} is active at {target.address}"
            return DrainOutcome(ended.code, text, after.number, backend=target, unknown=unknown,
                                resolve=self._resolve_line(ended.code, number))
        return await self._acknowledged(won, target)

    # ---- waiting

    async def _until_gone(self, number: int, step: str, stopped: EpochEntry | None) -> None:
        """Until no permit of an epoch up to `number` is left. Raises Ended at the deadline or an abort."""
        while True:
            seen = await self._observe(number, step, stopped)
            if seen is not None and not seen.left:
                return
            if trio.current_time() >= self._deadline:
                if seen is not None and seen.only_unknown:
                    raise Ended(Code.UNKNOWN_LEFT, f"{seen.left} sessions are not proven gone")
                left = f"{seen.left} sessions of epoch {number} are left" if seen else _SILENT
                raise Ended(Code.TIMED_OUT, f"not drained within {self._order.timeout_seconds:g} s: {left}")
            await pause()

    async def _observe(self, number: int, step: str, stopped: EpochEntry | None) -> Progress | None:
        """One look at the ledger; None if etcd does not answer."""
        try:
            snapshot = await self._ledger.snapshot()
        except (StoreUnavailable, StoreUnknown, UnknownSchema, ValueError):
            return None
        if self._ledger.lost:
            if stopped is None:
                return None
            raise Ended(Code.TIMED_OUT, "the ledger is lost: what is missing in it proves nothing")
        if stopped is not None and snapshot.epoch != stopped.epoch:
            raise Ended(Code.TIMED_OUT, "aborted")
        activities = read_activities(self._run_dir) if self._run_dir else {}
        self._last = look_at(
            snapshot, self._order.db, number, activities, step=step, now_us=self._now_us(),
            elapsed_seconds=trio.current_time() - self._started,
            lease_ttl_seconds=self._order.lease_ttl_seconds)
        self._say_each_second(step, number)
        return self._last

    async def _until_acknowledged(self, old: int) -> tuple[Waits, ...] | None:
        """Until every live worker has acknowledged the new epoch; who has not when the time is over. None:
        etcd does not tell."""
        while True:
            seen = await self._observe(old, "advanced", None)
            if seen is not None and not seen.waits_for:
                return ()
            if trio.current_time() >= self._deadline:
                return seen.waits_for if seen is not None else None
            await pause()

    # ---- saying

    def _say_each_second(self, step: str, number: int) -> None:
        if trio.current_time() - self._said_at >= PROGRESS_SECONDS:
            self._say(step, number)

    def _say(self, step: str, number: int) -> None:
        self._said_at = trio.current_time()
        told = self._last.as_dict() if self._last else {"epoch": number}
        elapsed = round(trio.current_time() - self._started, 3)  # the look may be older
        self._progress({**told, "step": step, "elapsed_seconds": elapsed})

    def _resolve_line(self, code: Code, number: int) -> str:
        if code is not Code.UNKNOWN_LEFT:
            return ""
        return f"pooler ledger resolve {self._order.db} --epoch {number} --evidence '…'"


async def _revoke(lease: Lease) -> None:
    try:
        await lease.revoke()
    except (StoreUnavailable, StoreUnknown):
        return  # it ends by itself

