"""The ledger of one database, as a coordinator or a command uses it: read, decide, write, and again.

A thin shell: `rules.decide` and `reservation.plan_reservation` decide, this carries their transactions out
and knows what an answer means. Three outcomes, never two: after an unknown one the same transaction is
repeated until it wins or is seen to have lost; if the store stays away, the refusal says `settled=False` and
the caller acts as if both had happened (capacity asked for is not connected, capacity given back not used).

What it remembers (entries it wrote, the last grounds) is only ever *tried*: a transaction built on it wins or
loses by its compares, and no refusal is given without a fresh read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from coordinator.ledger.access import Access, Seen, first
from coordinator.ledger.keys import DbKeys, FleetKeys, only
from coordinator.ledger.record import Alias, Kind, LedgerHead, Permit, Receipt, Session, Worker
from coordinator.ledger.reservation import (
    Grounds,
    Limits,
    Plan,
    Repeated,
    Reserve,
    grounds_from,
    grounds_reads,
    limits_of_policy,
    plan_reservation,
    plan_void,
    window_at,
)
from coordinator.ledger.rules import (
    Already,
    Code,
    Command,
    MarkOwnerGone,
    Refused,
    Release,
    Write,
    decide,
    session_of,
)
from coordinator.ledger.snapshot import LedgerSnapshot, reading, snapshot_from, snapshot_txn
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import (
    Entry,
    Lost,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
    unchanged,
)

ROUNDS_MAX = 12  # of read, decide, lose


@dataclass(frozen=True, slots=True)
class Granted:
    """A session permit with its receipt written: the owner may connect. `tag` is the ledger's tag."""

    permit: Permit
    epoch: int
    address: str
    tag: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The command's end state stands; `changed` False: it stood already. `session` None: released."""

    session: Session | None
    mod_revision: int
    changed: bool


@dataclass(frozen=True, slots=True)
class Voided:
    """The request takes nothing any more; `given_back` is the permit it had taken, freed as `unused`."""

    given_back: Permit | None


class Ledger:
    """One database's ledger.

    `home` is the slot this coordinator starts to look from (any number); `seen` what the last life of this
    process knew; `limits_of` reads a stored policy generation.
    """

    def __init__(
        self, store: Store, keys: DbKeys, fleet: FleetKeys, now_us: Callable[[], int], *,
        home: int = 0, seen: Seen | None = None, limits_of: Callable[[bytes], Limits] = limits_of_policy,
    ) -> None:
        self.keys = keys
        self.fleet = fleet
        self._access = Access(store, keys, seen or Seen())
        self._now_us = now_us
        self._home = home
        self._limits_of = limits_of
        self._limits: tuple[int, Limits] | None = None  # of which generation
        self._entries: dict[Permit, Entry] = {}
        self._grounds: dict[tuple[Kind, str, str], Grounds] = {}
        self._busy_slots: set[tuple[Kind, int]] = set()
        self._busy_seats: set[tuple[str, str, int]] = set()

    @property
    def lost(self) -> bool:
        """The ledger in etcd is not the one seen before: nobody grows, nobody closes for a missing permit."""
        return self._access.lost

    @property
    def seen(self) -> Seen:
        """What to keep in the run directory, and give to the next life of this process."""
        return self._access.seen

    async def reserve(self, ask: Reserve) -> Granted | Refused:
        """One attempt to take a slot, a seat and write the receipt; the caller waits and repeats.

        Codes: full, seats_full, draining, ledger_unavailable, ledger_lost, voided. A repeated request id
        gets the stored answer. With `settled=False` the request may still take a slot: repeat the same
        request, or `void` it until that answers.
        """
        unsettled = False
        grounds = self._remembered(ask)
        for _ in range(ROUNDS_MAX):
            try:
                grounds, plan = await self._plan(ask, grounds)
                if isinstance(plan, Repeated):
                    return await self._stored_answer(ask, plan)
            except (StoreUnavailable, StoreUnknown) as why:
                return Refused(Code.LEDGER_UNAVAILABLE, str(why), settled=not unsettled)
            if isinstance(plan, Refused):
                return replace(plan, settled=plan.code is Code.VOIDED or not unsettled)
            outcome, sure = await self._take(plan, ask)
            unsettled = unsettled or not sure
            if outcome is None:
                return Refused(Code.LEDGER_UNAVAILABLE, "etcd does not answer", settled=not unsettled)
            if isinstance(outcome, Won):
                return self._granted(ask, plan, grounds, outcome.revision)
            grounds = self._after_loss(ask, grounds, outcome)
        return Refused(Code.FULL, "others were faster", settled=not unsettled)

    async def void(self, request_id: str, owner: str, kind: Kind = Kind.MAIN) -> Voided | Refused:
        """Give a request up: after Voided it takes nothing, and what it had taken is given back as `unused`.

        Only for a request whose permit was never connected. Refused(ledger_unavailable): repeat.
        """
        receipt_key, worker_key = self.keys.receipt(request_id), self.keys.worker(owner)
        try:
            for _ in range(ROUNDS_MAX):
                receipt, worker = await self._access.read(only(receipt_key), only(worker_key))
                if receipt is None and worker is None:
                    return Voided(None)  # what compares the registration can only lose now
                if receipt is None and worker is not None:
                    outcome, _ = await self._access.carry_out(plan_void(request_id, kind, worker, self.keys))
                    if isinstance(outcome, Won):
                        return Voided(None)
                    if outcome is None:
                        break
                if receipt is not None:
                    return await self._give_back(receipt)
        except (StoreUnavailable, StoreUnknown) as why:
            return Refused(Code.LEDGER_UNAVAILABLE, str(why), settled=False)
        return Refused(Code.LEDGER_UNAVAILABLE, "the void did not settle", settled=False)

    async def apply(self, command: Command) -> Applied | Refused:
        """Carry out one command on the permit it names, deciding anew whenever somebody was faster.

        Codes: those of rules.decide, ledger_unavailable (`settled=False`: it may yet happen; repeat it),
        ledger_lost instead of `gone` while the ledger itself is not to be believed.
        """
        permit = command.permit
        entry, fresh = self._entries.get(permit), False
        for _ in range(ROUNDS_MAX):
            try:
                if entry is None and not fresh:
                    entry, fresh = await self._read_slot(permit), True
                decision = decide(entry, command, self.keys, self._now_us())
                if not isinstance(decision, Write) and not fresh:
                    entry, fresh = await self._read_slot(permit), True
                    decision = decide(entry, command, self.keys, self._now_us())
            except (StoreUnavailable, StoreUnknown) as why:
                return Refused(Code.LEDGER_UNAVAILABLE, str(why))
            if isinstance(decision, Already) and entry is not None:
                return Applied(decision.session, entry.mod_revision, changed=False)
            if not isinstance(decision, Write) or entry is None:
                return self._refusal(permit, decision)
            outcome, sure = await self._access.carry_out(decision.txn)
            if outcome is None:
                self._entries.pop(permit, None)
                return Refused(Code.LEDGER_UNAVAILABLE, "etcd does not answer", settled=sure)
            if isinstance(outcome, Won):
                return self._applied(permit, entry, decision, outcome.revision)
            now = first(outcome.reads[0])
            if now is not None and now.mod_revision == entry.mod_revision:
                return _lost_elsewhere(command)
            entry, fresh = now, True
            self._remember(permit, entry)
        return Refused(Code.CHANGED, "others were faster", settled=False)

    async def free_unlisted(self, owner: str, listed: Collection[Permit]) -> list[Permit]:
        """Give back, as `unused`, what stands under `owner` and is not in `listed`; those freed.

        For a worker that says hello: it lists every permit it has, and what it never heard of it never
        connected. To be done before its next `reserve`: its receipts went with its last lease, so that a
        repeated request would not find its old answer. Sessions that were opened are never freed by this.
        Raises StoreUnavailable.
        """
        freed = []
        for held in (await self.snapshot()).of_owner(owner):
            if held.permit not in listed:
                answer = await self.apply(Release(held.permit, Proof.UNUSED, Actor.OWNER))
                if isinstance(answer, Applied):
                    freed.append(held.permit)
        return freed

    async def snapshot(self) -> LedgerSnapshot:
        """The whole ledger at one revision. Raises StoreUnavailable, UnknownSchema, ValueError."""
        outcome = await self._access.ask(snapshot_txn(self.keys, self.fleet))
        policies = outcome.reads[6]
        limits = {int(e.key.rpartition("/")[2]): self._limits_of(e.value) for e in policies}
        return snapshot_from(outcome.reads, outcome.revision, limits)

    async def forget(self, owner: str, answered: Collection[str]) -> bool:
        """Delete answered receipts of a worker that has no request outstanding; False: not now.

        Its worker key is put again first, which makes every older reservation still on its way lose.
        """
        worker_key = self.keys.worker(owner)
        try:
            worker, _ = await self._access.read(only(worker_key), only(self.keys.ledger()))
            if worker is None:
                return False
            record = Worker.decode(worker.value)
            again = replace(record, registered=record.registered + 1)
            put = Put(worker_key, again.encode(), worker.lease)
            outcome, _ = await self._access.carry_out(
                Txn((unchanged(worker_key, worker.mod_revision),), puts=(put,), reads=(only(worker_key),)))
            if not isinstance(outcome, Won):
                return False
            keys = [self.keys.receipt(request_id) for request_id in answered]
            for i in range(0, len(keys), 100):
                await self._access.carry_out(Txn(deletes=tuple(keys[i : i + 100])))
        except (StoreUnavailable, StoreUnknown):
            return False
        return True

    # ---- reservations

    def _remembered(self, ask: Reserve) -> Grounds | None:
        """The grounds of the last reservation of this pool, without a receipt and with this worker's key."""
        grounds = self._grounds.get((ask.kind, ask.dbname, ask.user))
        if grounds is None or grounds.worker is None or grounds.worker.key != self.keys.worker(ask.owner):
            return None
        return replace(grounds, receipt=None)

    async def _plan(
        self, ask: Reserve, grounds: Grounds | None
    ) -> tuple[Grounds, Plan | Repeated | Refused]:
        """A plan on `grounds`; where they give none, on fresh ones, window after window."""
        if grounds is not None:
            plan = self._plan_on(ask, grounds)
            if isinstance(plan, Plan):
                return grounds, plan
        limits, turn = await self._read_limits(), 0
        while True:
            window = window_at(self.keys, ask.kind, limits.of(ask.kind), self._home, turn)
            outcome = await self._access.ask(reading(*grounds_reads(ask, self.keys, limits, window)))
            grounds = grounds_from(outcome.reads, limits, window)
            plan = self._plan_on(ask, grounds)
            full = isinstance(plan, Refused) and plan.code is Code.FULL and not grounds.beyond
            if not full or not window.slots:
                return grounds, plan
            turn += 1

    def _plan_on(self, ask: Reserve, grounds: Grounds) -> Plan | Repeated | Refused:
        slots = [slot for kind, slot in self._busy_slots if kind is ask.kind]
        seats = [seat for dbname, user, seat in self._busy_seats if (dbname, user) == (ask.dbname, ask.user)]
        if self._access.lost:
            return Refused(Code.LEDGER_LOST)
        return plan_reservation(
            ask, grounds, self.keys, self._now_us(), home=self._home, busy_slots=slots, busy_seats=seats)

    async def _take(self, plan: Plan, ask: Reserve) -> tuple[Won | Lost | None, bool]:
        """Carry the plan out; meanwhile no other reservation of this process tries its numbers."""
        slot, seat = (ask.kind, plan.session.slot), (ask.dbname, ask.user, plan.session.seat)
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
            self._limits = None
            return None
        self._grounds[ask.kind, ask.dbname, ask.user] = fresh
        return fresh

    def _granted(self, ask: Reserve, plan: Plan, grounds: Grounds, revision: int) -> Granted:
        session = replace(plan.session, generation=revision)
        slot_put = plan.txn.puts[0]
        self._remember(session.permit, Entry(slot_put.key, slot_put.value, revision, revision))
        self._grounds[ask.kind, ask.dbname, ask.user] = replace(
            grounds, held=grounds.held | {session.slot}, seats=grounds.seats | {session.seat})
        return self._answer(session, grounds.head, revision)

    async def _stored_answer(self, ask: Reserve, repeated: Repeated) -> Granted | Refused:
        """The answer that a repeated request got the first time, if its permit still stands."""
        permit = Permit(repeated.receipt.kind, repeated.receipt.slot, repeated.generation)
        slot, head = await self._access.read(self._slot_of(permit), only(self.keys.ledger()))
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
        permit = Permit(given.kind, given.slot, receipt.create_revision)
        answer = await self.apply(Release(permit, Proof.UNUSED, Actor.OWNER))
        if isinstance(answer, Refused) and answer.code is not Code.GONE:
            return answer
        return Voided(permit if isinstance(answer, Applied) else None)

    # ---- commands

    def _applied(self, permit: Permit, entry: Entry, write: Write, revision: int) -> Applied:
        if write.session is None:
            self._entries.pop(permit, None)
            self._freed(session_of(entry))
        else:
            self._remember(permit, replace(entry, value=write.txn.puts[0].value, mod_revision=revision))
        return Applied(write.session, revision, changed=True)

    def _freed(self, session: Session) -> None:
        pool = (session.kind, session.dbname, session.user)
        grounds = self._grounds.get(pool)
        if grounds is not None:
            self._grounds[pool] = replace(
                grounds, held=grounds.held - {session.slot}, seats=grounds.seats - {session.seat})

    def _refusal(self, permit: Permit, decision: Write | Already | Refused) -> Refused:
        refusal = decision if isinstance(decision, Refused) else Refused(Code.GONE)
        if refusal.code is Code.GONE:
            self._entries.pop(permit, None)
            if self._access.lost:
                return Refused(Code.LEDGER_LOST, "the permit is missing because the ledger is")
        return refusal

    def _remember(self, permit: Permit, entry: Entry | None) -> None:
        if entry is None:
            self._entries.pop(permit, None)
        else:
            self._entries[permit] = entry

    # ---- the store

    async def _read_slot(self, permit: Permit) -> Entry | None:
        slot, _ = await self._access.read(self._slot_of(permit), only(self.keys.ledger()))
        return slot

    def _slot_of(self, permit: Permit) -> tuple[str, str]:
        return only(self.keys.session(permit.kind, permit.slot))

    async def _read_limits(self) -> Limits:
        """The active policy's limits; none published: no slots."""
        alias = await self._access.read(only(self.keys.alias()))
        generation = Alias.decode(alias[0].value).active if alias[0] else 0
        if self._limits is None or self._limits[0] != generation:
            policy = await self._access.read(only(self.keys.policy(generation)))
            self._limits = (generation, self._limits_of(policy[0].value) if policy[0] else Limits(0))
        return self._limits[1]


def _mod(entry: Entry | None) -> int:
    return entry.mod_revision if entry else 0


def _lost_elsewhere(command: Command) -> Refused:
    """The slot stands as it was read: the other compare of the transaction failed."""
    if isinstance(command, MarkOwnerGone):
        return Refused(Code.OWNER_LIVES)
    return Refused(Code.UNPROVEN, "its owner's exit is no longer on record")
