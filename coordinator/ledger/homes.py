"""Where each coordinator begins to look for a free number, so that many of them at once do not want the same.

Pure. Every row of numbers (slots of a kind, seats of a pool) is shared out evenly, by the coordinator's place
among those that are registered. It is only a beginning: whose share is taken goes on to the next one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.store.api import Entry


@dataclass(frozen=True, slots=True)
class Home:
    """The place `rank` (from 0) among `hosts` coordinators."""

    rank: int = 0
    hosts: int = 1

    def first_of(self, count: int) -> int:
        """The first number to try, of `count` from 0."""
        return self.rank * count // self.hosts


def home_among(coordinators: Sequence[Entry], own_key: str) -> Home:
    """The place of the coordinator with this key: in the order in which they came, so that one that comes
    moves nobody's rank. One that is not there yet takes the place after the last."""
    keys = [entry.key for entry in sorted(coordinators, key=lambda entry: (entry.create_revision, entry.key))]
    if own_key not in keys:
        return Home(len(keys), len(keys) + 1)
    return Home(keys.index(own_key), len(keys))
