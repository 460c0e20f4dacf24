"""What one process last read or wrote of some ranges of keys.

Pure. It is only ever tried: a transaction built on it compares, and no refusal is given on it. Ranges are
whole: that a key is missing in one is known, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.ledger.keys import numbers_at
from coordinator.store.api import Entry, Txn

RANGES_MAX = 2_000  # of workers long gone, above all; then it begins anew

Span = tuple[str, str]


class Known:
    """Ranges by their ends, each with what stands in it."""

    def __init__(self) -> None:
        self._ranges: dict[Span, dict[str, Entry]] = {}
        self._wide: set[Span] = set()  # of more than one key
        self._numbers: dict[Span, frozenset[int]] = {}

    def learn(self, spans: Sequence[Span], answers: Sequence[Sequence[Entry]]) -> None:
        """What was read, all at one revision."""
        if len(self._ranges) > RANGES_MAX:
            self.clear()
        for span, entries in zip(spans, answers, strict=True):
            self._ranges[span] = {entry.key: entry for entry in entries}
            self._numbers.pop(span, None)
            if span[1] != span[0] + "\0":
                self._wide.add(span)

    def read(self, span: Span) -> tuple[Entry, ...] | None:
        """What stands in a range; None: not known."""
        held = self._ranges.get(span)
        return None if held is None else tuple(held.values())

    def numbers(self, span: Span) -> frozenset[int]:
        """The numbers at the ends of the keys that stand in a range that is known; others have none."""
        found = self._numbers.get(span)
        if found is None:
            found = self._numbers[span] = numbers_at(self._ranges[span])
        return found

    def wrote(self, txn: Txn, revision: int) -> None:
        """A transaction that made new keys was won."""
        for put in txn.puts:
            entry = Entry(put.key, put.value, revision, revision, put.lease)
            for span in self._wide:
                if span[0] <= put.key < span[1]:
                    self._ranges[span][put.key] = entry
                    self._numbers.pop(span, None)

    def gone(self, keys: Iterable[str]) -> None:
        """These keys were deleted."""
        for key in keys:
            for span in self._wide:
                if self._ranges[span].pop(key, None) is not None:
                    self._numbers.pop(span, None)

    def drop(self, span: Span) -> None:
        """This range will not be asked for again."""
        self._ranges.pop(span, None)
        self._numbers.pop(span, None)
        self._wide.discard(span)

    def clear(self) -> None:
        """Another ledger stands where that one was."""
        self._ranges.clear()
        self._numbers.clear()
        self._wide.clear()
