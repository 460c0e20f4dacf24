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
from dataclasses import replace

import trio

from coordinator.ledger.access import Access, Memory, Seen, first
from coordinator.ledger.answers import Applied, Granted, Voided
from coordinator.ledger.claims import Claims, FleetClaims, claims_from, claims_txn
from coordinator.ledger.gathering import Gathering
from coordinator.ledger.homes import Home
from coordinator.ledger.keys import DbKeys, FleetKeys, only, prefix_end
from coordinator.ledger.limits import Limits, limits_of_policy
from coordinator.ledger.moving import Move, Moving, may_share
from coordinator.ledger.record import Kind, Permit, Session
from coordinator.ledger.requests import Requests
from coordinator.ledger.reservation import Reserve
from coordinator.ledger.reserving import Reserving
from coordinator.ledger.rules import (
    Already,
    Code,
    Command,
    Decision,
    MarkOwnerGone,
    Refused,
    Release,
    Relocate,
    Write,
    decide,
    session_of,
)
from coordinator.ledger.snapshot import LedgerSnapshot, reading, snapshot_from, snapshot_txn
from coordinator.ledger.states import Actor, Proof
from coordinator.ledger.strange import Sieve
from coordinator.store.api import Entry, Store, StoreUnavailable, StoreUnknown, Won

__all__ = ["Applied", "Granted", "Ledger", "Seen", "Voided"]

ROUNDS_MAX = 12  # of read, decide, lose
LOST = "the ledger is lost: etcd was wiped or restored"


class Ledger:
    """One database's ledger.

    `home` is where this coordinator begins to look for what is free; `memory` what is known of the ledger
    to this process, from its last life on; `limits_of` reads a stored policy generation.
    """

    def __init__(
        self, store: Store, keys: DbKeys, fleet: FleetKeys, now_us: Callable[[], int], *,
        home: Home | None = None, memory: Memory | None = None,
        limits_of: Callable[[bytes], Limits] = limits_of_policy,
    ) -> None:
        self.keys = keys
        self.fleet = fleet
        self._access = Access(store, keys, memory or Memory())
        self._accepted = self._access.memory.accepted
        self._now_us = now_us
        self._limits_of = limits_of
        self._entries: dict[Permit, Entry] = {}
        self._reserving = Reserving(self._access, keys, now_us, limits_of, self._remember)
        self.settle_at(home or Home())
        self._requests = Requests(self._access, keys, self._reserving, apply=self.apply)
        moving = Moving(self._access, self._entries.get, self._decide, self._applied, self._remember)
        self._moving, self._freeing = Gathering(moving.round), Gathering(moving.round)

    async def run(self) -> None:
        """While it runs, what is asked at the same time shares transactions; without it each has its own."""
        async with trio.open_nursery() as nursery:
            for gathering in (self._requests.gathering, self._moving, self._freeing):
                nursery.start_soon(gathering.run)

    def settle_at(self, home: Home) -> None:
        """Where to look from for what is free: another coordinator came, or went."""
        self._reserving.settle_at(home)

    @property
    def lost(self) -> bool:
        """The ledger in etcd is not the one seen before: nobody grows, nobody closes for a missing permit."""
        return self._access.lost

    @property
    def seen(self) -> Seen:
        """What to keep in the run directory, and give to the next life of this process."""
        return self._access.memory.seen

    async def reserve(self, ask: Reserve) -> Granted | Refused:
        """One attempt to take a slot, a seat and write the receipt; the caller waits and repeats.

        Codes: full, seats_full, draining, ledger_unavailable, ledger_lost, voided. A repeated request id
        gets the stored answer. With `settled=False` an attempt of this request may still take a slot: repeat
        the same request until it is granted, or `void` it until that answers.
        """
        self._forget_what_was_lost()
        return await self._requests.reserve(ask)

    async def void(self, request_id: str, owner: str, kind: Kind = Kind.MAIN) -> Voided | Refused:
        """Give a request up: after Voided it takes nothing, and what it had taken is given back as `unused`.

        Only for a request whose permit was never connected. Refused(ledger_unavailable): repeat.
        """
        return await self._requests.void(request_id, owner, kind)

    async def forget(self, owner: str, answered: Collection[str]) -> bool:
        """Delete answered receipts of a worker that has no request outstanding; False: not now.

        Its worker key is put again first, which makes every older reservation still on its way lose.
        """
        return await self._requests.forget(owner, answered)

    async def apply(self, command: Command) -> Applied | Refused:
        """Carry out one command on the permit it names, deciding anew whenever somebody was faster.

        Codes: those of rules.decide, ledger_unavailable (`settled=False`: it may yet happen; repeat it),
        ledger_lost instead of `gone` while the ledger itself is not to be believed.
        """
        if self._access.lost and not await self._access.check():
            return Refused(Code.LEDGER_LOST, LOST)
        self._forget_what_was_lost()
        gathering = self._freeing if isinstance(command, Release) else self._moving
        if not gathering.runs or not may_share(command):
            return await self._apply(command)
        move = Move(command)
        await gathering.answer(move)
        if move.answer is not None:
            return move.answer
        answer = await self._apply(command)
        if isinstance(answer, Refused) and answer.code is Code.LEDGER_UNAVAILABLE and not (
                move.alone and move.sure):
            return replace(answer, settled=False)
        return answer

    async def _apply(self, command: Command) -> Applied | Refused:
        """In a transaction of its own."""
        permit = command.permit
        entry, fresh = self._entries.get(permit), False
        for _ in range(ROUNDS_MAX):
            try:
                if entry is None and not fresh:
                    entry, fresh = await self._read_slot(permit), True
                decision = self._decide(entry, command)
                if not isinstance(decision, Write) and not fresh:
                    entry, fresh = await self._read_slot(permit), True
                    decision = self._decide(entry, command)
            except (StoreUnavailable, StoreUnknown) as why:
                return Refused(Code.LEDGER_UNAVAILABLE, str(why))
            if isinstance(decision, Already) and entry is not None:
                return Applied(decision.session, entry.mod_revision, changed=False)
            if not isinstance(decision, Write) or entry is None:
                return self._refusal(permit, decision)
            outcome, sure = await self._access.carry_out(decision.txn)
            if self._access.lost:
                return Refused(Code.LEDGER_LOST, LOST, settled=sure)
            if outcome is None:
                self._entries.pop(permit, None)
                return Refused(Code.LEDGER_UNAVAILABLE, self._access.unanswered, settled=sure)
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
        Raises StoreUnavailable when not all could be decided: the hello is not answered then.
        """
        freed = []
        for held in (await self.snapshot()).of_owner(owner):
            if not {held.permit, *held.session.former_permits} & set(listed):
                answer = await self.apply(Release(held.permit, Proof.UNUSED, Actor.OWNER))
                if isinstance(answer, Applied):
                    freed.append(held.permit)
                elif answer.code in (Code.LEDGER_UNAVAILABLE, Code.CHANGED):
                    raise StoreUnavailable(f"{held.permit} could not be given back: {answer.detail}")
        return freed

    async def snapshot(self) -> LedgerSnapshot:
        """The whole ledger at one revision; see snapshot_from. Raises StoreUnavailable, UnknownSchema,
        ValueError."""
        outcome = await self._access.ask(snapshot_txn(self.keys, self.fleet))
        return snapshot_from(outcome.reads, outcome.revision, self._limits_of)

    async def fleet_claims(self) -> FleetClaims:
        """Which sessions at servers are whose, of all ledgers of the fleet. Raises StoreUnavailable."""
        return claims_from((await self._access.ask(claims_txn(self.fleet))).reads, self.fleet)

    async def elsewhere(self) -> Claims:
        """The sessions that are another ledger's. Raises StoreUnavailable."""
        return (await self.fleet_claims()).besides(self.keys.database)

    async def apply_for(self, owner: str, command: Command) -> tuple[Applied | Refused, Session | None]:
        """As `apply`, for a worker that may not have heard yet that a session of its was moved; with the
        session as it stood, if it was."""
        outcome = await self.apply(command)
        if not isinstance(outcome, Refused) or outcome.code is not Code.GONE:
            return outcome, None
        try:
            moved = await self._moved(command.permit, owner)
        except (StoreUnavailable, StoreUnknown) as why:
            return Refused(Code.LEDGER_UNAVAILABLE, str(why)), None
        if moved is None:
            return outcome, None
        return await self.apply(replace(command, permit=moved.permit)), moved

    async def _moved(self, permit: Permit, owner: str) -> Session | None:
        """The session that had this permit: a slot it is gone from, it never comes back to."""
        sessions = self.keys.sessions()
        found = await self._access.ask(reading((sessions, prefix_end(sessions))))
        for session in Sieve().each(found.reads[0], session_of):
            if session.owner == owner and permit in session.former_permits:
                return session
        return None

    # ---- commands

    def _decide(self, entry: Entry | None, command: Command) -> Decision:
        return decide(entry, command, self.keys, self._now_us())

    def _forget_what_was_lost(self) -> None:
        """Entries of a ledger that another has taken the place of: its revisions are the new one's, too."""
        if self._accepted != self._access.memory.accepted:
            self._accepted = self._access.memory.accepted
            self._entries.clear()
            self._reserving.forget()

    def _applied(self, permit: Permit, entry: Entry, write: Write, revision: int) -> Applied:
        if write.session is None:
            self._entries.pop(permit, None)
            self._reserving.freed(session_of(entry))
        elif write.session.permit != permit:
            self._entries.pop(permit, None)
            self._reserving.freed(replace(session_of(entry), seat=-1))
            put = write.txn.puts[0]
            self._remember(write.session.permit, Entry(put.key, put.value, revision, revision))
        else:
            self._remember(permit, replace(entry, value=write.txn.puts[0].value, mod_revision=revision))
        return Applied(write.session, revision, changed=True)

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
        slot, _ = await self._access.read(
            only(self.keys.session(permit.kind, permit.slot)), only(self.keys.ledger()))
        return slot


def _lost_elsewhere(command: Command) -> Refused:
    """The slot stands as it was read: the other compare of the transaction failed."""
    if isinstance(command, MarkOwnerGone):
        return Refused(Code.OWNER_LIVES)
    if isinstance(command, Relocate):
        return Refused(Code.CHANGED, "the slot is not free any more, or the ledger is another")
    return Refused(Code.UNPROVEN, "its owner's exit is no longer on record")
