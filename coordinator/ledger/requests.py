"""Requests for session permits: each is granted once, or voided, whatever the store's answers were.

Part of the Ledger. A request whose write had an unknown outcome stays *unsettled* until its receipt was won
or seen: a refusal of a later attempt does not settle it, since the earlier one may still land.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from coordinator.ledger.access import Access
from coordinator.ledger.answers import Applied, Granted, Voided
from coordinator.ledger.keys import DbKeys, only
from coordinator.ledger.limits import Limits, limits_for
from coordinator.ledger.record import Alias, Kind, LedgerHead, Permit, Receipt, Session, Worker
from coordinator.ledger.reservation import (
    Grounds,
    Plan,
    Repeated,
    Reserve,
    grounds_from,
    grounds_reads,
    plan_reservation,
    plan_take_back,
    plan_void,
    window_at,
)
from coordinator.ledger.rules import Code, Command, Refused, Release, session_of
from coordinator.ledger.snapshot import reading
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Entry, Lost, Put, StoreUnavailable, StoreUnknown, Txn, Won, unchanged

ROUNDS_MAX = 12  # of read, plan, lose


class Requests:
    """Reserves and voids. `remember` keeps a granted slot's entry; `apply` carries out a release."""

    def __init__(
        self, access: Access, keys: DbKeys, now_us: Callable[[], int], home: int,
        limits_of: Callable[[bytes], Limits], remember: Callable[[Permit, Entry], None],
        apply: Callable[[Command], Awaitable[Applied | Refused]],
    ) -> None:
        self._access = access
        self._keys = keys
        self._now_us = now_us
        self._home = home
        self._limits_of = limits_of
        self._remember = remember
        self._apply = apply
        self._limits: dict[int, Limits] = {}  # of the generations that grant: they never change
        self._grounds: dict[tuple[Kind, str, str], Grounds] = {}
        self._busy_slots: set[tuple[Kind, int]] = set()
        self._busy_seats: set[tuple[str, str, int]] = set()
        self._unsettled: dict[str, str] = {}  # request → owner

    async def reserve(self, ask: Reserve) -> Granted | Refused:
        """One attempt to take a slot, a seat and write the receipt; the caller waits and repeats.

        Codes: full, seats_full, draining, ledger_unavailable, ledger_lost, voided. A repeated request id
        gets the stored answer. With `settled=False` an attempt of this request may still take a slot: repeat
        the same request until it is granted, or `void` it until that answers.
        """
        answer = await self._reserve(ask)
        if isinstance(answer, Granted) or answer.code is Code.VOIDED:
            self._unsettled.pop(ask.request_id, None)
        elif ask.request_id in self._unsettled:
            return replace(answer, settled=False)
        return answer

    async def _reserve(self, ask: Reserve) -> Granted | Refused:
        grounds = self._remembered(ask)
        for _ in range(ROUNDS_MAX):
            try:
                grounds, plan = await self._plan(ask, grounds)
                if isinstance(plan, Repeated):
                    return await self._stored_answer(ask, plan)
            except (StoreUnavailable, StoreUnknown) as why:
                return Refused(Code.LEDGER_UNAVAILABLE, str(why))
            if isinstance(plan, Refused):
                return plan
            outcome, sure = await self._take(plan, ask)
            if not sure:
                self._unsettled[ask.request_id] = ask.owner
            if self._access.lost:
                return await self._refused_as_lost(ask, plan, outcome)
            if outcome is None:
                return Refused(Code.LEDGER_UNAVAILABLE, "etcd does not answer")
            if isinstance(outcome, Won):
                return self._granted(ask, plan, grounds, outcome.revision)
            grounds = self._after_loss(ask, grounds, outcome)
        return Refused(Code.FULL, "others were faster")

    async def _refused_as_lost(self, ask: Reserve, plan: Plan, outcome: Won | Lost | None) -> Refused:
        """A grant of a ledger that went back may be somebody's living permit over again: it is voided."""
        if isinstance(outcome, Won) and not await self._access.take_back(
                plan_take_back(plan, outcome.revision, self._keys)):
            self._unsettled[ask.request_id] = ask.owner
        return Refused(Code.LEDGER_LOST, "the ledger is lost: etcd was wiped or restored")

    def forget_grounds(self) -> None:
        """Another ledger stands where that one was: what was read of it says nothing."""
        self._grounds.clear()
        self._limits.clear()

    async def void(self, request_id: str, owner: str, kind: Kind = Kind.MAIN) -> Voided | Refused:
        """Give a request up: after Voided it takes nothing, and what it had taken is given back as `unused`.

        Only for a request whose permit was never connected. Refused(ledger_unavailable): repeat.
        """
        answer = await self._void(request_id, owner, kind)
        if isinstance(answer, Voided):
            self._unsettled.pop(request_id, None)
        return answer

    async def _void(self, request_id: str, owner: str, kind: Kind) -> Voided | Refused:
        receipt_key, worker_key = self._keys.receipt(request_id), self._keys.worker(owner)
        try:
            for _ in range(ROUNDS_MAX):
                if self._access.lost and not await self._access.check():
                    return Refused(Code.LEDGER_LOST, settled=False)
                receipt, worker = await self._access.read(only(receipt_key), only(worker_key))
                if self._access.lost:
                    continue
                if receipt is None and worker is None:
                    return Voided(None)  # what compares the registration can only lose now
                if receipt is None and worker is not None:
                    outcome, _ = await self._access.carry_out(plan_void(request_id, kind, worker, self._keys))
                    if isinstance(outcome, Won):
                        return Voided(None)
                    if outcome is None:
                        break
                if receipt is not None:
                    return await self._give_back(receipt)
        except (StoreUnavailable, StoreUnknown) as why:
            return Refused(Code.LEDGER_UNAVAILABLE, str(why), settled=False)
        return Refused(Code.LEDGER_UNAVAILABLE, "the void did not settle", settled=False)

    async def forget(self, owner: str, answered: Collection[str]) -> bool:
        """Delete answered receipts of a worker that has no request outstanding; False: not now.

        Its worker key is put again first, which makes every older reservation still on its way lose.
        """
        worker_key = self._keys.worker(owner)
        try:
            worker, _ = await self._access.read(only(worker_key), only(self._keys.ledger()))
            if worker is None:
                return False
            record = Worker.decode(worker.value)
            again = replace(record, registered=record.registered + 1)
            put = Put(worker_key, again.encode(), worker.lease)
            outcome, _ = await self._access.carry_out(
                Txn((unchanged(worker_key, worker.mod_revision),), puts=(put,), reads=(only(worker_key),)))
            if not isinstance(outcome, Won):
                return False
            self._unsettled = {each: of for each, of in self._unsettled.items() if of != owner}
            keys = [self._keys.receipt(request_id) for request_id in answered]
            for i in range(0, len(keys), 100):
                await self._access.carry_out(Txn(deletes=tuple(keys[i : i + 100])))
        except (StoreUnavailable, StoreUnknown):
            return False
        return True

    def freed(self, session: Session) -> None:
        """This process released it: its numbers may be tried again."""
        pool = (session.kind, session.seats_of, session.user)
        grounds = self._grounds.get(pool)
        if grounds is not None:
            self._grounds[pool] = replace(
                grounds, held=grounds.held - {session.slot}, seats=grounds.seats - {session.seat})

    # ---- plans

    def _remembered(self, ask: Reserve) -> Grounds | None:
        """The grounds of the last reservation of this pool, without a receipt and with this worker's key."""
        grounds = self._grounds.get((ask.kind, ask.seats_of, ask.user))
        if grounds is None or grounds.worker is None or grounds.worker.key != self._keys.worker(ask.owner):
            return None
        return replace(grounds, receipt=None) if self._decides(ask, grounds) else None

    def _decides(self, ask: Reserve, grounds: Grounds) -> bool:
        """Whether they have the limits of the generation that grants this request."""
        if grounds.alias is None:
            return False
        alias = Alias.decode(grounds.alias.value)
        known = {0, alias.granting, alias.taking_over} <= {0, *self._limits}
        return known and limits_for(alias, ask.request_id, ask.kind, self._limits) == grounds.limits

    async def _plan(
        self, ask: Reserve, grounds: Grounds | None
    ) -> tuple[Grounds, Plan | Repeated | Refused]:
        """A plan on `grounds`; where they give none, on fresh ones, window after window."""
        if grounds is not None:
            plan = self._plan_on(ask, grounds)
            if isinstance(plan, Plan):
                return grounds, plan
        (alias, limits), turn = await self._read_limits(ask), 0
        while True:
            window = window_at(self._keys, ask.kind, limits.of(ask.kind), self._home, turn)
            outcome = await self._access.ask(reading(*grounds_reads(ask, self._keys, limits, window)))
            grounds = grounds_from(outcome.reads, limits, window)
            if _mod(grounds.alias) != alias:  # the policy changed between the two reads
                (alias, limits), turn = await self._read_limits(ask), 0
                continue
            plan = self._plan_on(ask, grounds)
            full = isinstance(plan, Refused) and plan.code is Code.FULL and not grounds.beyond
            if not full or not window.slots:
                return grounds, plan
            turn += 1

    def _plan_on(self, ask: Reserve, grounds: Grounds) -> Plan | Repeated | Refused:
        slots = [slot for kind, slot in self._busy_slots if kind is ask.kind]
        seats = [seat for *pool, seat in self._busy_seats if pool == [ask.seats_of, ask.user]]
        if self._access.lost:
            return Refused(Code.LEDGER_LOST)
        return plan_reservation(
            ask, grounds, self._keys, self._now_us(), home=self._home, busy_slots=slots, busy_seats=seats)

    async def _take(self, plan: Plan, ask: Reserve) -> tuple[Won | Lost | None, bool]:
        """Carry the plan out; meanwhile no other reservation of this process tries its numbers."""
        slot, seat = (ask.kind, plan.session.slot), (ask.seats_of, ask.user, plan.session.seat)
        self._busy_slots.add(slot)
        self._busy_seats.add(seat)
        try:
            return await self._access.carry_out(plan.txn)
        finally:
            self._busy_slots.discard(slot)
            self._busy_seats.discard(seat)

    def _after_loss(self, ask: Reserve, grounds: Grounds, outcome: Lost) -> Grounds | None:
        """Fresh grounds out of the failure branch; None if the policy changed and all must be read anew."""
        fresh = grounds_from(outcome.reads, grounds.limits, grounds.window)
        if _mod(fresh.alias) != _mod(grounds.alias):
            return None
        self._grounds[ask.kind, ask.seats_of, ask.user] = fresh
        return fresh

    def _granted(self, ask: Reserve, plan: Plan, grounds: Grounds, revision: int) -> Granted:
        session = replace(plan.session, generation=revision - plan.session.generation)
        slot_put = plan.txn.puts[0]
        self._remember(session.permit, Entry(slot_put.key, slot_put.value, revision, revision))
        self._grounds[ask.kind, ask.seats_of, ask.user] = replace(
            grounds, held=grounds.held | {session.slot}, seats=grounds.seats | ({session.seat} - {-1}))
        return self._answer(session, grounds.head, revision)

    async def _stored_answer(self, ask: Reserve, repeated: Repeated) -> Granted | Refused:
        """The answer that a repeated request got the first time, if its permit still stands."""
        permit = Permit(repeated.receipt.kind, repeated.receipt.slot, repeated.generation)
        slot, head = await self._access.read(
            only(self._keys.session(permit.kind, permit.slot)), only(self._keys.ledger()))
        if slot is None or session_of(slot).permit != permit:
            return Refused(Code.VOIDED, f"{permit}, once granted to {ask.request_id}, is released")
        self._remember(permit, slot)
        return self._answer(session_of(slot), head, slot.mod_revision)

    def _answer(self, session: Session, head: Entry | None, mod_revision: int) -> Granted:
        address = session.backend.address if session.backend else ""
        tag = LedgerHead.decode(head.value).tag if head else ""
        return Granted(session.permit, session.epoch, address, tag, mod_revision)

    async def _give_back(self, receipt: Entry) -> Voided | Refused:
        given = Receipt.decode(receipt.value)
        if given.voided:
            return Voided(None)
        permit = Permit(given.kind, given.slot, receipt.create_revision + given.base)
        answer = await self._apply(Release(permit, Proof.UNUSED, Actor.OWNER))
        if isinstance(answer, Refused) and answer.code is not Code.GONE:
            return answer
        return Voided(permit if isinstance(answer, Applied) else None)

    async def _read_limits(self, ask: Reserve) -> tuple[int, Limits]:
        """The revision of the alias, and the limits of the generation that grants this request; none
        published: 0 and no slots."""
        entry, = await self._access.read(only(self._keys.alias()))
        if entry is None:
            return 0, Limits(0)
        alias = Alias.decode(entry.value)
        generations = {alias.granting, alias.taking_over} - {0}
        for each in generations - self._limits.keys():
            policy, = await self._access.read(only(self._keys.policy(each)))
            if policy is not None:
                self._limits[each] = self._limits_of(policy.value)
        return entry.mod_revision, limits_for(alias, ask.request_id, ask.kind, self._limits)


def _mod(entry: Entry | None) -> int:
    return entry.mod_revision if entry else 0
