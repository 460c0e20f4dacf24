"""The store as the ledger uses it: what an answer means, and whether this is still the same ledger.

An unknown outcome is settled by repeating the same transaction until it wins or is seen to have lost. Every
answer, also that of a write, is held against what was seen before: another incarnation, a missing `ledger/`
key or a revision that went back mean that etcd was wiped or restored, and then nothing that is missing there
proves anything, and nothing is written any more. After a request that failed, and at the start, one read
makes sure of that before anything is written: who broke the connection may have been the restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.ledger.keys import DbKeys, only
from coordinator.ledger.record import LedgerHead, LedgerState
from coordinator.ledger.snapshot import reading
from coordinator.store.api import Entry, Lost, Store, StoreUnavailable, StoreUnknown, Txn, Won

SILENT = "etcd does not answer"
TRIES_MAX = 3  # of one transaction whose outcome stays unknown
_NOT_ASKED = LedgerHead("", LedgerState.ACTIVE, "")


@dataclass(frozen=True, slots=True)
class Seen:
    """What this host last knew of the ledger: kept in the run directory over restarts.

    `rebuilt`: the rebuild (`LedgerHead.rebuilt`) that this incarnation came from. `lost`: it was found to be
    another or an older one; stays until a later rebuild is seen. `base`: LedgerHead.generation_base.
    """

    incarnation: str = ""
    revision: int = 0
    rebuilt: str = ""
    lost: bool = False
    base: int = 0


@dataclass(frozen=True, slots=True)
class _Floor:
    """What was known when a request was sent: its answer cannot be older."""

    revision: int
    accepted: int


class Memory:
    """What is known of one ledger, shared by everything in this process that asks for it."""

    def __init__(self, seen: Seen | None = None) -> None:
        self.seen = seen or Seen()
        self.accepted = 0  # how many rebuilt ledgers took the place of a lost one

    @property
    def floor(self) -> _Floor:
        """To be taken before a request is sent."""
        return _Floor(self.seen.revision, self.accepted)

    def wrote(self, floor: _Floor, revision: int, *, surely: bool) -> None:
        """A transaction won. `surely`: it changed something, and so has a revision of its own."""
        if not self._went_back(floor, revision - surely):
            self._reached(revision)

    def read(self, floor: _Floor, revision: int, head: LedgerHead | None = _NOT_ASKED) -> None:
        """A read was answered; with the `ledger/` key where that was asked for."""
        seen = self.seen
        stands = head.incarnation if head is not None else ""
        if head is _NOT_ASKED or stands == seen.incarnation:
            if not self._went_back(floor, revision):
                self._reached(revision)
        elif not seen.incarnation:
            if not self._went_back(floor, revision):
                self.seen = replace(seen, incarnation=stands, rebuilt=head.rebuilt if head else "",
                                    base=head.generation_base if head else 0)
                self._reached(revision)
        elif head is not None and head.rebuilt > seen.rebuilt:
            self.seen = Seen(stands, revision, head.rebuilt, base=head.generation_base)
            self.accepted += 1
        else:
            self.seen = replace(seen, lost=True)

    def _went_back(self, floor: _Floor, revision: int) -> bool:
        if floor.accepted == self.accepted and revision < floor.revision:
            self.seen = replace(self.seen, lost=True)
        return self.seen.lost

    def _reached(self, revision: int) -> None:
        self.seen = replace(self.seen, revision=max(self.seen.revision, revision))


class Access:
    """Reads and transactions on one ledger. `lost` stays set until somebody rebuilds the ledger."""

    def __init__(self, store: Store, keys: DbKeys, memory: Memory) -> None:
        self.memory = memory
        self._store = store
        self._keys = keys
        self._checked = False  # nothing failed since the last read
        self.unanswered = SILENT  # why the last transaction had no answer

    @property
    def lost(self) -> bool:
        """Nothing is written while it is, and nothing is believed."""
        return self.memory.seen.lost

    async def read(self, *ranges: tuple[str, str]) -> list[Entry | None]:
        return [first(entries) for entries in (await self.ask(reading(*ranges))).reads]

    async def ask(self, txn: Txn) -> Lost:
        """A transaction that only reads. Raises StoreUnavailable, StoreUnknown."""
        floor = self.memory.floor
        try:
            outcome = await self._store.txn(txn)
        except (StoreUnavailable, StoreUnknown):
            self._checked = False
            raise
        if isinstance(outcome, Won):  # its compare cannot hold
            raise StoreUnavailable("the store believes the impossible")
        self._observe(txn, outcome, floor)
        return outcome

    async def check(self) -> bool:
        """One read that holds incarnation and revision against what is remembered; whether it was answered
        and the ledger is not lost."""
        try:
            await self.ask(reading(only(self._keys.ledger())))
        except (StoreUnavailable, StoreUnknown):
            return False
        return not self.lost

    async def carry_out(self, txn: Txn) -> tuple[Won | Lost | None, bool]:
        """The transaction's answer, repeated while it is unknown (None: no answer to be had, or it was not
        sent, because the ledger is `lost`).

        The second value is False if an attempt may still take effect. A Won on a ledger that is `lost` by
        then was won on another one than it was meant for: the caller takes it back.
        """
        sure = True
        for _ in range(TRIES_MAX):
            if self.lost or not (self._checked or await self.check()):
                return None, sure
            floor = self.memory.floor
            try:
                outcome = await self._store.txn(txn)
            except StoreUnknown:
                self._checked = sure = False
                self.unanswered = SILENT
                continue
            except StoreUnavailable as why:
                self._checked = False
                self.unanswered = str(why) or SILENT
                return None, sure
            if isinstance(outcome, Won):
                self.memory.wrote(floor, outcome.revision, surely=bool(txn.puts or txn.compares))
                return outcome, True
            self._observe(txn, outcome, floor)
            return outcome, sure
        return None, sure

    async def take_back(self, txn: Txn) -> bool:
        """Undo a Won that a lost ledger gave: one try, on a ledger that is written to no more otherwise."""
        try:
            return isinstance(await self._store.txn(txn), Won)
        except (StoreUnavailable, StoreUnknown):
            return False

    def _observe(self, txn: Txn, answer: Lost, floor: _Floor) -> None:
        """Notice a ledger that is not the one seen before; `floor` was taken before asking."""
        asked = only(self._keys.ledger())
        if asked not in txn.reads:
            self.memory.read(floor, answer.revision)
            return
        entry = first(answer.reads[txn.reads.index(asked)])
        self.memory.read(floor, answer.revision, LedgerHead.decode(entry.value) if entry else None)
        self._checked = True


def first(entries: Sequence[Entry]) -> Entry | None:
    """The entry of a range that holds one key."""
    return entries[0] if entries else None
