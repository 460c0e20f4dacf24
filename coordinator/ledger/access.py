"""The store as the ledger uses it: what an answer means, and whether this is still the same ledger.

An unknown outcome is settled by repeating the same transaction until it wins or is seen to have lost. Every
answer is checked against what was seen before: another incarnation, a missing `ledger/` key or a revision
that went back mean that etcd was wiped or restored, and then nothing that is missing there proves anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.ledger.keys import DbKeys, only
from coordinator.ledger.record import LedgerHead
from coordinator.ledger.snapshot import reading
from coordinator.store.api import Entry, Lost, Store, StoreUnavailable, StoreUnknown, Txn, Won

TRIES_MAX = 3  # of one transaction whose outcome stays unknown


@dataclass(frozen=True, slots=True)
class Seen:
    """What this host last knew of the ledger: kept in the run directory over restarts."""

    incarnation: str = ""
    revision: int = 0


class Access:
    """Reads and transactions on one ledger. `lost` stays set until somebody rebuilds the ledger."""

    def __init__(self, store: Store, keys: DbKeys, seen: Seen) -> None:
        self.lost = False
        self.seen = seen
        self._store = store
        self._keys = keys

    async def read(self, *ranges: tuple[str, str]) -> list[Entry | None]:
        return [first(entries) for entries in (await self.ask(reading(*ranges))).reads]

    async def ask(self, txn: Txn) -> Lost:
        """A transaction that only reads."""
        floor = self.seen.revision
        outcome = await self._store.txn(txn)
        if isinstance(outcome, Won):  # its compare cannot hold
            raise StoreUnavailable("the store believes the impossible")
        self._observe(txn, outcome, floor)
        return outcome

    async def carry_out(self, txn: Txn) -> tuple[Won | Lost | None, bool]:
        """The transaction's answer, repeated while it is unknown (None: no answer to be had).

        The second value is False if an attempt may still take effect.
        """
        sure = True
        for _ in range(TRIES_MAX):
            floor = self.seen.revision
            try:
                outcome = await self._store.txn(txn)
            except StoreUnknown:
                sure = False
                continue
            except StoreUnavailable:
                return None, sure
            if isinstance(outcome, Won):
                self.seen = replace(self.seen, revision=max(self.seen.revision, outcome.revision))
                return outcome, True
            self._observe(txn, outcome, floor)
            return outcome, sure
        return None, sure

    def _observe(self, txn: Txn, answer: Lost, floor: int) -> None:
        """Notice a ledger that is not the one seen before. `floor`: highest revision seen before asking."""
        known, stands = self.seen.incarnation, self.seen.incarnation
        asked = only(self._keys.ledger())
        if asked in txn.reads:
            head = first(answer.reads[txn.reads.index(asked)])
            stands = LedgerHead.decode(head.value).incarnation if head else ""
        if answer.revision < floor or (known and stands != known):
            self.lost = True
            return
        self.seen = Seen(stands, max(self.seen.revision, answer.revision))


def first(entries: Sequence[Entry]) -> Entry | None:
    """The entry of a range that holds one key."""
    return entries[0] if entries else None
