"""The states of one server session inside a worker, written once.

Code, the documentation page and the tests read this table; a move that is not in it raises. The permit's own
states are the ledger's business (`coordinator.ledger.states`): what is IDLE, ACTIVE or CLEANING here is OPEN
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ServerState(StrEnum):
    """What a worker does with one server session."""

    CONNECTING = "connecting"
    IDLE = "idle"
    ACTIVE = "active"
    CLEANING = "cleaning"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Move:
    """One allowed transition: the reason is the documentation's text."""

    source: ServerState
    target: ServerState
    reason: str


_S = ServerState

MOVES: tuple[Move, ...] = (
    Move(_S.CONNECTING, _S.IDLE, "startup finished and OPEN is recorded"),
    Move(_S.IDLE, _S.ACTIVE, "a ticket got it"),
    Move(_S.ACTIVE, _S.IDLE, "returned clean, and nobody waits"),
    Move(_S.ACTIVE, _S.ACTIVE, "returned clean, and handed to the oldest waiter"),
    Move(_S.ACTIVE, _S.CLEANING, "returned with something left on it"),
    Move(_S.CLEANING, _S.IDLE, "the reset was answered"),
    Move(_S.CONNECTING, _S.CLOSING, "logged in, but it may not be used"),
    Move(_S.IDLE, _S.CLOSING, "its time is over, or others need its permit"),
    Move(_S.ACTIVE, _S.CLOSING, "its client left it in the middle of something"),
    Move(_S.CLEANING, _S.CLOSING, "the reset failed or took too long"),
    Move(_S.CONNECTING, _S.CLOSED, "no session came of it"),
    Move(_S.IDLE, _S.CLOSED, "the server ended it"),
    Move(_S.ACTIVE, _S.CLOSED, "the server ended it"),
    Move(_S.CLEANING, _S.CLOSED, "the server ended it"),
    Move(_S.CLOSING, _S.CLOSED, "the server's end was read, or waited for in vain"),
)

_ALLOWED = {(move.source, move.target): move for move in MOVES}


class IllegalMove(Exception):
    """A transition that the table does not have: always our bug."""


def find_move(source: ServerState, target: ServerState) -> Move:
    """The row for this transition. Raises IllegalMove when there is none."""
    move = _ALLOWED.get((source, target))
    if move is None:
        raise IllegalMove(f"a server session may not go from {source} to {target}")
    return move
