"""The cancel keys given to clients: which worker one belongs to, and what makes it unguessable.

A key is 4 bytes of process id and a secret. Protocol 3.0 allows 4 bytes of secret, 3.2 allows 256: there 32
are used. A client that was promised no session gets a made-up process id: 01 in binary, 15 bits of the
worker's ordinal and 15 random bits, so that drivers see a positive number that no session has and any worker
can tell whose client it is. With session pooling it is the session's own, for drivers look for it in
pg_stat_activity and in notifications: then the key says nothing of the worker, all of its secret being random
as PostgreSQL's own is. Pure: the random bytes are an argument and must come from the system's generator.
"""

from __future__ import annotations

ORDINAL_MAX = 0x7FFF
SECRET_BYTES_SHORT = 4
SECRET_BYTES_LONG = 32
RANDOM_BYTES = 2 + SECRET_BYTES_LONG
KEY_BYTES_MAX = 4 + 256
_PASSED_ON = 0x80  # of the first byte, which no worker sets
_MADE_UP = 1 << 30  # of the process id; no system's are so high


def make_key(ordinal: int, random: bytes, *, protocol_minor: int, process_id: int = 0) -> bytes:
    """A key for a client of worker `ordinal`, from at least RANDOM_BYTES random bytes. `process_id`: of the
    session that the client is promised, 0 for none.

    Raises ValueError for an ordinal that does not fit or too few random bytes.
    """
    if not 0 <= ordinal <= ORDINAL_MAX:
        raise ValueError(f"worker ordinal {ordinal} is not within 0..{ORDINAL_MAX}")
    if len(random) < RANDOM_BYTES:
        raise ValueError(f"a cancel key needs {RANDOM_BYTES} random bytes")
    if not 0 < process_id < _MADE_UP:
        process_id = _MADE_UP | ordinal << 15 | int.from_bytes(random[:2], "big") & 0x7FFF
    size = SECRET_BYTES_LONG if protocol_minor >= 2 else SECRET_BYTES_SHORT
    return process_id.to_bytes(4, "big") + random[2 : 2 + size]


def ordinal_of(key: bytes) -> int | None:
    """The worker's ordinal in a key, or None for a key that names none."""
    process_id = _process_id(key)
    return process_id >> 15 & ORDINAL_MAX if process_id & _MADE_UP else None


def may_be_anybodys(key: bytes) -> bool:
    """Whether a key has the process id of a session, so that any worker of the fleet may have made it."""
    return 0 < _process_id(key) < _MADE_UP


def _process_id(key: bytes) -> int:
    """0 for what no worker made."""
    if not 8 <= len(key) <= KEY_BYTES_MAX:
        return 0
    process_id = int.from_bytes(key[:4], "big")
    return 0 if process_id >> 31 else process_id


def forwarded(key: bytes, hops: int) -> bytes:
    """A worker's key as hosts pass it on: marked as no client's, and behind it how often it was passed on."""
    return bytes([key[0] | _PASSED_ON]) + key[1:] + bytes([hops])


def read_forwarded(key: bytes) -> tuple[bytes, int]:
    """The key as its worker made it, and how often it was passed on (0: a client sent it)."""
    if len(key) < 9 or not key[0] & _PASSED_ON:
        return key, 0
    return bytes([key[0] & ~_PASSED_ON]) + key[1:-1], key[-1]
