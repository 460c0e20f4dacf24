"""Rounds of reservations: as many of the waiting requests as fit, in their order, in one transaction.

A thin shell: `batch.plan_batch` decides. A round begins on what is known from the last one; only where that
gives no plan is anything read. A lost transaction brings what it was to stand on, read one window further on:
whoever was faster is likely to want more of the same. Who loses twice goes on alone, so that one request
cannot make all the others lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, takewhile

from coordinator.ledger.access import Access, first
from coordinator.ledger.answers import Granted
from coordinator.ledger.basis import Alike, Basis
from coordinator.ledger.batch import RESERVATIONS_MAX, Batch, Wanted, plan_batch
from coordinator.ledger.homes import Home
from coordinator.ledger.keys import DbKeys, only
from coordinator.ledger.known import Span
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import Alias, Kind, LedgerHead, Permit, Session, UnknownSchema
from coordinator.ledger.reservation import (
    Plan,
    Repeated,
    Reserve,
    plan_take_back,
)
from coordinator.ledger.rules import Code, Refused, seat_keys, session_of
from coordinator.ledger.snapshot import reading
from coordinator.store.api import TXN_OPERATIONS_MAX, Entry, Lost, StoreUnavailable, StoreUnknown, Txn, Won

ROUNDS_MAX = 12  # of plan and lose
_head = lru_cache(16)(LedgerHead.decode)
LOSSES_TOGETHER = 2  # after so many a request goes on alone


@dataclass(eq=False, slots=True)
class Pending:
    """A request until it has its answer. `left`: nobody waits any more, and nothing is planned for it.

    `sure` False: an earlier transaction may yet take effect.
    """

    ask: Reserve
    answer: Granted | Refused | Exception | None = None
    losses: int = 0
    sure: bool = True
    left: bool = False

    @property
    def answered(self) -> bool:
        return self.answer is not None


class Reserving:
    """Reservations on one ledger. `remember` keeps a granted slot's entry."""

    def __init__(
        self, access: Access, keys: DbKeys, now_us: Callable[[], int],
        limits_of: Callable[[bytes], Limits], remember: Callable[[Permit, Entry], None],
    ) -> None:
        self._access = access
        self._keys = keys
        self._now_us = now_us
        self._limits_of = limits_of
        self._remember = remember
        self._basis = Basis(keys)
        self._turns: dict[Kind, int] = {}  # which window is known
        self._busy_slots: set[tuple[Kind, int]] = set()
        self._busy_seats: set[tuple[str, str, int]] = set()

    async def round(self, waiting: Sequence[Pending]) -> None:
        """One transaction for the first of `waiting` and those behind it that can share it: some of them
        have their answers then."""
        wave = _wave(waiting)
        try:
            batch = await self._plan(wave)
        except (StoreUnavailable, StoreUnknown) as why:
            _answer_all(wave, Refused(Code.LEDGER_UNAVAILABLE, str(why)))
            return
        except (UnknownSchema, ValueError) as fault:
            _answer_all(wave, fault)
            return
        asked = {each.ask.request_id: each for each in reversed(wave)}
        for request, answer in batch.answers.items():
            pending = asked[request]
            pending.answer = (await self._stored_answer(pending.ask, answer)
                              if isinstance(answer, Repeated) else answer)
        if batch.plans:
            await self._take(batch, [asked[request] for request in batch.plans])
        for each in wave:
            if each.answer is not None:
                self._basis.known.drop(only(self._keys.receipt(each.ask.request_id)))

    def settle_at(self, home: Home) -> None:
        """Where to look from for what is free."""
        self._basis.home = home

    def freed(self, session: Session) -> None:
        """This process released it: its numbers may be tried again."""
        slot = self._keys.session(session.kind, session.slot)
        self._basis.known.gone((slot, *seat_keys(session, self._keys)))

    def forget(self) -> None:
        """Another ledger stands where that one was: what was read of it says nothing."""
        self._basis.clear()
        self._turns.clear()

    # ---- plans

    async def _plan(self, wave: Sequence[Pending]) -> Batch:
        """On what is known; where the first has no plan on it, on what is read then, window after window."""
        kind = wave[0].ask.kind
        turn = self._turns.get(kind, 0)
        batch = self._plan_on_known(wave, turn, stops=True)
        if not batch.plans:
            batch = await self._plan_ahead(wave, turn)
        if batch.plans:
            return batch
        alias, looked_at = self._basis.alias, 0
        if alias is None or self._basis.limits_for(wave[0].ask) is None:
            alias = await self._read_limits()
        while True:
            turn %= max(1, self._basis.windows_for(wave[0].ask))
            await self._read_grounds(wave, turn)
            if self._basis.alias != alias:  # the policy changed between the reads
                alias, looked_at = await self._read_limits(), 0
                continue
            self._turns[kind], looked_at = turn, looked_at + 1
            batch = self._plan_on_known(wave, turn, stops=False)
            answers = {each.ask.request_id: batch.answers[each.ask.request_id] for each in wave
                       if self._is_final(each.ask, batch, looked_at)}
            if batch.plans or answers or not batch.answers:
                return replace(batch, answers=answers)
            turn += 1

    async def _plan_ahead(self, wave: Sequence[Pending], turn: int) -> Batch:
        """In the next window, of which nothing but itself is read: a pool may have thousands of seats."""
        ask = wave[0].ask
        ahead = self._basis.next_turn(ask, turn)
        if ahead == turn or self._basis.limits_for(ask) is None:
            return Batch()
        await self._read_grounds(wave, ahead, what_is_unknown=True)
        batch = self._plan_on_known(wave, ahead, stops=True)
        if batch.plans:
            self._turns[ask.kind] = ahead
        return batch

    def _plan_on_known(self, wave: Sequence[Pending], turn: int, *, stops: bool) -> Batch:
        """No await between this and the sending of what it plans: nobody leaves in between."""
        if self._access.lost:
            refused = Refused(Code.LEDGER_LOST)
            return Batch(answers={each.ask.request_id: refused for each in wave})
        wanted: list[Wanted] = []
        alike: dict[Alike, Wanted] = {}
        for each in wave:
            one = self._basis.wanted(each.ask, turn, alike)
            if one is None:
                break
            if not each.left:
                wanted.append(one)
        return plan_batch(
            wanted, self._keys, self._now_us(), first_seat=self._basis.home.first_of,
            busy_slots=self._busy_slots, busy_seats=self._busy_seats, stops=stops)

    def _is_final(self, ask: Reserve, batch: Batch, looked_at: int) -> bool:
        """Whether there is an answer, and another window cannot make it another."""
        answer = batch.answers.get(ask.request_id)
        if not isinstance(answer, Refused) or answer.code is not Code.FULL:
            return answer is not None
        return looked_at >= self._basis.windows_for(ask) or self._basis.is_beyond(ask)

    async def _read_grounds(
        self, wave: Sequence[Pending], turn: int, *, what_is_unknown: bool = False
    ) -> None:
        """For the first of them, and as many more as one read has room for."""
        spans: dict[Span, None] = {}
        for each in wave:
            more = spans | dict.fromkeys(self._basis.spans(each.ask, turn))
            if len(more) > TXN_OPERATIONS_MAX:
                break
            spans = more
        if what_is_unknown:
            spans = {span: None for span in spans if self._basis.known.read(span) is None}
            spans |= {only(self._keys.ledger()): None}
        outcome = await self._access.ask(reading(*spans))
        self._basis.known.learn(tuple(spans), outcome.reads)

    async def _read_limits(self) -> tuple[Entry, ...]:
        """The alias as it stands; the limits of the generations that grant are known then."""
        span, basis = only(self._keys.alias()), self._basis
        outcome = await self._access.ask(reading(span))
        basis.known.learn((span,), outcome.reads)
        entry = first(outcome.reads[0])
        alias = Alias.decode(entry.value) if entry else Alias(0)
        basis.unpublished = set()
        for each in {alias.granting, alias.taking_over} - {0, *basis.limits}:
            policy, = await self._access.read(only(self._keys.policy(each)))
            if policy is None:
                basis.unpublished.add(each)
            else:
                basis.limits[each] = self._limits_of(policy.value)
        return outcome.reads[0]

    # ---- what becomes of a plan

    async def _take(self, batch: Batch, pending: Sequence[Pending]) -> None:
        """Carry it out; meanwhile no other reservation of this process tries its numbers."""
        plans = tuple(batch.plans.values())
        slots = {(plan.session.kind, plan.session.slot) for plan in plans}
        seats = {(plan.session.seats_of, plan.session.user, plan.session.seat) for plan in plans}
        self._busy_slots |= slots
        self._busy_seats |= seats
        try:
            outcome, sure = await self._access.carry_out(batch.txn)
        finally:
            self._busy_slots -= slots
            self._busy_seats -= seats
        for each in pending:
            each.sure = each.sure and sure
        if self._access.lost:
            await self._refuse_as_lost(plans, pending, outcome)
        elif outcome is None:
            _answer_all(pending, Refused(Code.LEDGER_UNAVAILABLE, self._access.unanswered))
        elif isinstance(outcome, Won):
            self._basis.known.wrote(batch.txn, outcome.revision)
            for each, plan in zip(pending, plans, strict=True):
                each.answer = self._granted(plan, outcome.revision)
        else:
            self._after_loss(batch.txn, pending, outcome)

    def _after_loss(self, txn: Txn, pending: Sequence[Pending], outcome: Lost) -> None:
        """What it stands on is known anew, one window further on."""
        ask = pending[0].ask
        self._turns[ask.kind] = self._basis.next_turn(ask, self._turns.get(ask.kind, 0))
        self._basis.known.learn(txn.reads, outcome.reads)
        for each in pending:
            each.losses += 1
            if each.losses == ROUNDS_MAX:
                each.answer = Refused(Code.FULL, "others were faster")

    async def _refuse_as_lost(
        self, plans: Sequence[Plan], pending: Sequence[Pending], outcome: Won | Lost | None
    ) -> None:
        """A grant of a ledger that went back may be somebody's living permit over again: it is voided."""
        for each, plan in zip(pending, plans, strict=True):
            each.answer = Refused(Code.LEDGER_LOST, "the ledger is lost: etcd was wiped or restored")
            if isinstance(outcome, Won) and not await self._access.take_back(
                    plan_take_back(plan, outcome.revision, self._keys)):
                each.sure = False

    def _granted(self, plan: Plan, revision: int) -> Granted:
        session = replace(plan.session, generation=revision - plan.session.generation)
        slot_put = plan.txn.puts[0]
        self._remember(session.permit, Entry(slot_put.key, slot_put.value, revision, revision))
        head = self._basis.known.read(only(self._keys.ledger()))
        return _granted_of(session, first(head or ()), revision)

    async def _stored_answer(self, ask: Reserve, repeated: Repeated) -> Granted | Refused | Exception:
        """The answer that a repeated request got the first time, if its permit still stands."""
        permit = Permit(repeated.receipt.kind, repeated.receipt.slot, repeated.generation)
        try:
            slot, head = await self._access.read(
                only(self._keys.session(permit.kind, permit.slot)), only(self._keys.ledger()))
            if slot is None or session_of(slot).permit != permit:
                return Refused(Code.VOIDED, f"{permit}, once granted to {ask.request_id}, is released")
            granted = _granted_of(session_of(slot), head, slot.mod_revision)
        except (StoreUnavailable, StoreUnknown) as why:
            return Refused(Code.LEDGER_UNAVAILABLE, str(why))
        except (UnknownSchema, ValueError) as fault:
            return fault
        self._remember(permit, slot)
        return granted


def _wave(waiting: Sequence[Pending]) -> Sequence[Pending]:
    """The first, and those right behind it that may share a transaction with it: nobody is left out of it
    for one who came later, for they may want the last seat of the same pool."""
    first_one = waiting[0]
    if first_one.losses >= LOSSES_TOGETHER:
        return waiting[:1]

    def goes_along(each: Pending) -> bool:
        return each.ask.kind is first_one.ask.kind and each.losses < LOSSES_TOGETHER

    return tuple(islice(takewhile(goes_along, waiting), RESERVATIONS_MAX))


def _answer_all(pending: Sequence[Pending], answer: Refused | Exception) -> None:
    for each in pending:
        if each.answer is None:
            each.answer = answer


def _granted_of(session: Session, head: Entry | None, mod_revision: int) -> Granted:
    address = session.backend.address if session.backend else ""
    tag = _head(head.value).tag if head else ""
    return Granted(session.permit, session.epoch, address, tag, mod_revision)
