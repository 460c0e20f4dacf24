"""The session permit's state machine, written once.

Code, the documentation page and the tests read this table; a move that is not in it raises.
Nothing here knows about etcd, sockets or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SessionState(StrEnum):
    """What one numbered slot is doing. OPEN is refined to idle / busy in the worker's session table only."""

    RESERVED = "SESSION_RESERVED"
    CONNECTING = "CONNECTING"
    OPEN = "OPEN"
    CLOSING = "CLOSING"
    UNKNOWN = "SESSION_UNKNOWN"
    RELEASED = "SESSION_RELEASED"  # never stored: the slot's key is gone


class Actor(StrEnum):
    """Who may make a move."""

    OWNER = "owner"  # the worker that reserved it, through its coordinator
    OWNER_REAPER = "owner reaper"  # the leader, for owners without a worker key
    BACKEND_REAPER = "backend reaper"  # any coordinator that can look at the server
    OPERATOR = "operator"
    FENCER = "fencer"  # fence_command confirmed a node off


class Proof(StrEnum):
    """Why a backend is known to be gone. Nothing else frees a permit."""

    EOF = "eof"
    UNUSED = "unused"
    ABSENT = "absent"
    NEVER_BORN = "never_born"
    RESTARTED = "restarted"
    FENCED = "fenced"
    ATTESTED = "attested"


@dataclass(frozen=True, slots=True)
class Move:
    """One allowed transition: `proofs` is empty for moves that free nothing."""

    source: SessionState
    target: SessionState
    actor: Actor
    proofs: frozenset[Proof]
    reason: str


def _move(source: SessionState, target: SessionState, actor: Actor, reason: str, *proofs: Proof) -> Move:
    return Move(source, target, actor, frozenset(proofs), reason)


_S, _A, _P = SessionState, Actor, Proof

MOVES: tuple[Move, ...] = (
    _move(_S.RESERVED, _S.CONNECTING, _A.OWNER, "the owner holds the receipt and starts to connect"),
    _move(_S.RESERVED, _S.OPEN, _A.OWNER, "connected; the CONNECTING write is not waited for and was lost"),
    _move(_S.CONNECTING, _S.OPEN, _A.OWNER, "pid, backend_start and identity are recorded"),
    _move(_S.OPEN, _S.CLOSING, _A.OWNER, "Terminate is about to be sent"),
    _move(_S.OPEN, _S.OPEN, _A.OWNER, "moved to a lower slot that is free, or from a reserve to a main one"),
    _move(_S.RESERVED, _S.RELEASED, _A.OWNER, "given back before any connect", _P.UNUSED, _P.EOF),
    _move(_S.CONNECTING, _S.RELEASED, _A.OWNER, "connect failed, or FATAL and EOF", _P.UNUSED, _P.EOF),
    _move(_S.OPEN, _S.RELEASED, _A.OWNER, "the server ended the session itself", _P.EOF),
    _move(_S.CLOSING, _S.RELEASED, _A.OWNER, "orderly EOF after Terminate", _P.EOF),
    _move(_S.RESERVED, _S.UNKNOWN, _A.OWNER, "silent after the startup packet: abandoned"),
    _move(_S.CONNECTING, _S.UNKNOWN, _A.OWNER, "silent after the startup packet: abandoned"),
    _move(_S.OPEN, _S.UNKNOWN, _A.OWNER, "the connection broke without an orderly EOF"),
    _move(_S.CLOSING, _S.UNKNOWN, _A.OWNER, "no EOF in time after Terminate"),
    _move(_S.RESERVED, _S.UNKNOWN, _A.OWNER_REAPER, "its owner has no worker key"),
    _move(_S.CONNECTING, _S.UNKNOWN, _A.OWNER_REAPER, "its owner has no worker key"),
    _move(_S.OPEN, _S.UNKNOWN, _A.OWNER_REAPER, "its owner has no worker key"),
    _move(_S.CLOSING, _S.UNKNOWN, _A.OWNER_REAPER, "its owner has no worker key"),
    _move(_S.UNKNOWN, _S.OPEN, _A.OWNER, "the owner reasserts a session it still holds (not if terminating)"),
    _move(_S.UNKNOWN, _S.CLOSING, _A.OWNER, "the owner closes a session it still holds (not if terminating)"),
    _move(_S.UNKNOWN, _S.UNKNOWN, _A.OWNER, "the owner records that it gave the attempt up: abandoned"),
    _move(_S.UNKNOWN, _S.UNKNOWN, _A.BACKEND_REAPER, "terminating is noted before pg_terminate_backend"),
    _move(_S.UNKNOWN, _S.RELEASED, _A.OWNER, "the owner has its proof after all", _P.UNUSED, _P.EOF),
    _move(_S.UNKNOWN, _S.RELEASED, _A.BACKEND_REAPER, "a look at the server proved it gone",
          _P.ABSENT, _P.NEVER_BORN, _P.RESTARTED),
    _move(_S.UNKNOWN, _S.RELEASED, _A.FENCER, "its node went off (no process: its owner died or gave it up)",
          _P.FENCED),
    _move(_S.UNKNOWN, _S.RELEASED, _A.OPERATOR, "an operator attested it", _P.ATTESTED),
)

HELD = frozenset(state for state in SessionState if state is not SessionState.RELEASED)

_ALLOWED = {(move.source, move.target, move.actor): move for move in MOVES}


class IllegalMove(Exception):
    """A transition that the table does not have: always our bug, never a peer's."""


def find_move(
    source: SessionState, target: SessionState, actor: Actor, proof: Proof | None = None
) -> Move:
    """The row for this transition.

    Raises IllegalMove when there is none, when a freeing move has no proof of its row, or when a proof
    is given to a move that frees nothing.
    """
    move = _ALLOWED.get((source, target, actor))
    if move is None:
        raise IllegalMove(f"{actor} may not move {source} to {target}")
    if (proof is None) == bool(move.proofs) or (proof is not None and proof not in move.proofs):
        raise IllegalMove(f"{source} to {target} by {actor} does not go by proof {proof}")
    return move
