"""What the coordinator may want of a worker: the permits' end of the link calls this. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.ledger.living import Living
from coordinator.ledger.record import Permit
from pooler.pool.ledger_view import LedgerView


@dataclass(frozen=True, slots=True)
class LateCheckout:
    """A session that a client has had for longer than the policy lets a transaction last."""

    db: str
    permit: Permit
    pid: int
    tenant: str
    age_us: int
    limit_seconds: float
    holder: str = ""  # who has it, and what it waits for


class Holder(Protocol):
    """What the worker does at the coordinator's word. Plain calls must not wait; the others are tasks."""

    def holds(self, db: str, permit: Permit) -> bool:
        """Is there a session under this permit whose socket is open?"""

    def sessions(self, db: str) -> list[Living]:
        """Every session of this ledger whose socket is open and that is not being closed."""

    def move(self, db: str, permit: Permit, new: Permit) -> None:
        """Its session stands under another permit from now on."""

    def pooled(self) -> set[tuple[str, Permit]]:
        """Every permit whose session one of this worker's pools has, or a replication connection."""

    def late_checkouts(self) -> list[LateCheckout]:
        """Sessions whose client is past the transaction limit of its class, the latest first."""

    def close_now(self, db: str, permit: Permit) -> None:
        """The ledger no longer has the permit: close the socket at once, serve nobody with it."""

    def terminate(self, db: str, permit: Permit) -> None:
        """The session may not be kept: close it with proof, as soon as it can be."""

    def give_up(self, db: str, permit: Permit) -> None:
        """There is no slot for its session any more: close it with proof as it falls idle."""

    def shed(self, db: str, pool: str, user: str, count: int) -> None:
        """Another worker waits: close so many sessions of the pool as they fall idle."""

    def spare(self, db: str, pool: str, user: str, count: int) -> None:
        """Another worker waits: close up to so many that nobody here has needed for a while."""

    def ledger_changed(self, view: LedgerView) -> None:
        """A ledger's epoch, policy or reachability changed (a lost link makes it unreachable)."""

    async def cancel(self, key: bytes) -> None:
        """A CancelRequest with one of this worker's keys came in elsewhere."""

    async def show(self, what: str) -> list[Any]:
        """This worker's rows of a SHOW."""

    async def command(self, name: str, args: dict[str, Any]) -> list[str]:
        """This worker's part of a console command; what is to be told of it."""
