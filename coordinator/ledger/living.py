"""A session as the worker that holds it tells of it: what a rebuilt ledger is filled from."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.ledger.record import Backend, Permit


@dataclass(frozen=True, slots=True)
class Living:
    """A session that a worker holds open, as it tells of it when the ledger is rebuilt.

    `permit` is the one it had in the ledger that was lost; `seats`: sessions that its pool may have over the
    whole fleet.
    """

    permit: Permit
    dbname: str
    user: str
    seats: int
    pid: int
    backend_start_us: int
    backend: Backend
    epoch: int
    pool: str = ""

    @property
    def process(self) -> tuple[int, int]:
        """The server process, as nothing else at that server was or will be."""
        return self.pid, self.backend_start_us
