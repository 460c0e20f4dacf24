"""`session_state: reject`: which texts are refused, and what is said instead of running them.

Refused is what would leave state on a session that cannot go with its client: LISTEN, PREPARE, LOAD,
temporary objects, cursors with hold, advisory locks of the session. Settings go with their client, so SET is
not. The server is sent a text instead that it cannot take, so that the transaction fails as it would by any
other error; its words are replaced by ours. Pure.
"""

from __future__ import annotations

import re
from typing import Final

from pooler.wire.messages import Fault, error_response
from pooler.wire.session_state import Residue, TextLook, kinds, without_literals

UNSERVABLE: Final = b"CREATE ASSERTION pooler_refuses CHECK (true)"
"""PostgreSQL's grammar knows it, and answers 0A000 (feature not supported) without looking any further."""

_SQLSTATE: Final = b"C0A000\0"
_KINDS: Final = int(
    Residue.LISTEN | Residue.CURSORS | Residue.PREPARED | Residue.TEMP | Residue.ADVISORY | Residue.RENEW)
_STATEMENT = re.compile(rb"(?:^|;)\s*(?:(listen)|(prepare)(?!\s+transaction)|(load))\b", re.IGNORECASE)
_WORDS = re.compile(rb"listen|prepare|load", re.IGNORECASE)
_OF_GROUP: Final = (int(Residue.LISTEN), int(Residue.PREPARED), int(Residue.RENEW))


def refused_kinds(query: bytes, look: TextLook) -> tuple[str, ...]:
    """Kinds of state for which this text is refused; none in the common case."""
    found = look.residue(query)
    if _WORDS.search(query) is not None:
        for statement in _STATEMENT.finditer(without_literals(query) or query):
            assert statement.lastindex is not None
            found |= _OF_GROUP[statement.lastindex - 1]
    return kinds(found & _KINDS)


def words_for(message: bytes, refused: tuple[str, ...] | bytes) -> bytes | None:
    """What the client is told instead of the server's ErrorResponse; None if that is about something else.
    `refused`: the kinds of state, or the whole ErrorResponse where it was refused for something else."""
    if _SQLSTATE not in message:
        return None
    if isinstance(refused, bytes):
        return refused
    return error_response(Fault(
        "ERROR", "0A000", f"session state ({', '.join(refused)}) is not served in this pool (session_state)",
        hint="It would be lost with the transaction: use session pooling, or session_state: pin."))
