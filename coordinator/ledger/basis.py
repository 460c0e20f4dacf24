"""What reservations are decided on, as far as one process knows it: the policy's limits, windows of slots,
and what stands in the keys that a reservation compares.

Pure. All of it is only tried, as `known` says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from coordinator.ledger.batch import Wanted
from coordinator.ledger.homes import Home
from coordinator.ledger.keys import DbKeys, only
from coordinator.ledger.known import Known, Span
from coordinator.ledger.limits import Limits, limits_for
from coordinator.ledger.record import Alias, Kind
from coordinator.ledger.reservation import (
    WINDOW,
    Grounds,
    Reserve,
    Window,
    beyond_range,
    grounds_reads,
    window_at,
)
from coordinator.store.api import Entry

_alias = lru_cache(16)(Alias.decode)
WINDOWS_MAX = 1_000  # remembered; then anew

Alike = tuple[str, str, str, Limits]  # requests that differ in nothing but their receipts


class Basis:
    """Of one ledger. `limits` are those of the policy generations that grant: a generation never changes."""

    def __init__(self, keys: DbKeys) -> None:
        self.home = Home()
        self.known = Known()
        self.limits: dict[int, Limits] = {}
        self.unpublished: set[int] = set()  # generations that the alias names and that were not there
        self._keys = keys
        self._windows: dict[tuple[Kind, int, int, int], Window] = {}

    def clear(self) -> None:
        """Another ledger stands where that one was: what was read of it says nothing."""
        self.known.clear()
        self.limits.clear()

    @property
    def alias(self) -> tuple[Entry, ...] | None:
        """The alias of the policy, if it is known (nothing in it: none is published)."""
        return self.known.read(only(self._keys.alias()))

    def limits_for(self, ask: Reserve) -> Limits | None:
        """By the policy as it is known to grant; None: not known."""
        entries = self.alias
        if entries is None:
            return None
        if not entries:
            return Limits(0)
        alias = _alias(entries[0].value)
        if not {0, alias.granting, alias.taking_over} <= {0, *self.limits, *self.unpublished}:
            return None
        return limits_for(alias, ask.request_id, ask.kind, self.limits)

    def windows_for(self, ask: Reserve) -> int:
        """How many windows its slots make."""
        limits = self.limits_for(ask) or Limits(0)
        return -(-limits.of(ask.kind) // WINDOW)

    def is_beyond(self, ask: Reserve) -> bool:
        """Whether slots are held that no policy has: then no window has room."""
        limits = self.limits_for(ask) or Limits(0)
        return bool(self.known.read(beyond_range(self._keys, ask.kind, limits.bound(ask.kind))))

    def spans(self, ask: Reserve, turn: int) -> tuple[Span, ...]:
        """What is to be read for it, with the `turn`-th window."""
        limits = self.limits_for(ask) or Limits(0)
        return grounds_reads(ask, self._keys, limits, self._window(ask.kind, limits, turn))

    def wanted(self, ask: Reserve, turn: int, alike: dict[Alike, Wanted]) -> Wanted | None:
        """The request with its grounds; None if they are not all known. Its receipt is new, as far as is
        known. `alike` keeps those of one round, for they differ in little."""
        limits = self.limits_for(ask)
        if limits is None:
            return None
        like = (ask.owner, ask.seats_of, ask.user, limits)
        first = alike.get(like)
        if first is None:
            grounds = self._grounds(ask, limits, turn)
            if grounds is None:
                return None
            window = self._window(ask.kind, limits, self.next_turn(ask, turn))
            first = alike[like] = Wanted(ask, grounds, grounds_reads(ask, self._keys, limits, window))
        its = only(self._keys.receipt(first.ask.request_id))
        receipt = only(self._keys.receipt(ask.request_id))
        entries = self.known.read(receipt)
        reads = tuple(receipt if span == its else span for span in first.reads)
        return Wanted(ask, replace(first.grounds, receipt=entries[0] if entries else None), reads)

    def next_turn(self, ask: Reserve, turn: int) -> int:
        """One window on; after the last, the first."""
        return (turn + 1) % max(1, self.windows_for(ask))

    def _grounds(self, ask: Reserve, limits: Limits, turn: int) -> Grounds | None:
        """As reservation.grounds_from makes them, without a receipt; None if they are not all known."""
        known, receipt = self.known, only(self._keys.receipt(ask.request_id))
        window = self._window(ask.kind, limits, turn)
        spans = grounds_reads(ask, self._keys, limits, window)
        found = [() if span == receipt else known.read(span) for span in spans]
        if None in found:
            return None
        head, epoch, alias, worker, _, beyond = ((entries or (None,))[0] for entries in found[:6])
        return Grounds(
            head=head, epoch=epoch, alias=alias, worker=worker, receipt=None, beyond=beyond is not None,
            seats=known.numbers(spans[6]), held=frozenset().union(*map(known.numbers, spans[7:])),
            limits=limits, window=window)

    def _window(self, kind: Kind, limits: Limits, turn: int) -> Window:
        count = limits.of(kind)
        first = self.home.first_of(count)
        key = (kind, count, first, turn)
        if key not in self._windows:
            if len(self._windows) > WINDOWS_MAX:
                self._windows.clear()
            self._windows[key] = window_at(self._keys, kind, count, first, turn)
        return self._windows[key]
