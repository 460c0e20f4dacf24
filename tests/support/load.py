"""Clients of a fleet that work without a pause while something is done to it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.support.wait import wait_until


class Clients(ABC):
    """So many threads, each a client that works until it is over."""

    def __init__(self, dsn: str, count: int) -> None:
        self.dsn = dsn
        self.over = threading.Event()
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self.work, args=(number,)) for number in range(count)]

    @abstractmethod
    def work(self, number: int) -> None:
        """What one of them does."""

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in self._threads:
                thread.join()


class Load(Clients):
    """A connection each, which they never replace: who loses it says so in `faults`, and is done.

    `in_blocks`: each statement in a transaction block of its own; `pause_seconds` between two of them.
    """

    def __init__(
        self, dsn: str, count: int, statement: str = "select 1", *, in_blocks: bool = False,
        pause_seconds: float = 0.01,
    ) -> None:
        super().__init__(dsn, count)
        self._statement, self._in_blocks, self._pause_seconds = statement, in_blocks, pause_seconds
        self._done = [0] * count

    @property
    def done(self) -> int:
        """Statements that were answered."""
        return sum(self._done)

    def work(self, number: int) -> None:
        try:
            with psycopg.connect(self.dsn, autocommit=not self._in_blocks) as connection:
                while not self.over.is_set():
                    connection.execute(self._statement)
                    connection.commit()
                    self._done[number] += 1
                    self.over.wait(self._pause_seconds)
        except psycopg.Error as fault:
            self.faults.append(str(fault))

    def goes_on(self, seconds: float = 30, statements: int = 100) -> None:
        """From now on each client is served, too, and together they have so many more answers."""
        before = tuple(self._done)
        wait_until(lambda: self.done > sum(before) + statements
                   and all(now > then for now, then in zip(self._done, before, strict=True)),
                   "every client of the load goes on", seconds)
