"""The cancel keys given to clients: which worker one belongs to, and what makes it unguessable.

A key is 4 bytes of "process id" and a secret. The process id is 0, 16 bits of the worker's ordinal and
15 random bits, so that drivers see a positive number and any worker can tell whose client it is. Protocol
3.0 allows 4 bytes of secret (47 random bits in all), 3.2 allows 256: there 32 are used. Pure: the random
bytes are an argument and must come from the system's generator.
"""

from __future__ import annotations

ORDINAL_MAX = 0xFFFF
SECRET_BYTES_SHORT = 4
SECRET_BYTES_LONG = 32
RANDOM_BYTES = 2 + SECRET_BYTES_LONG
KEY_BYTES_MAX = 4 + 256
_PASSED_ON = 0x80  # of the first byte, which no worker sets


def make_key(ordinal: int, random: bytes, *, protocol_minor: int) -> bytes:
    """A key for a client of worker `ordinal`, from at least RANDOM_BYTES random bytes.

    Raises ValueError for an ordinal that does not fit or too few random bytes.
    """
    if not 0 <= ordinal <= ORDINAL_MAX:
        raise ValueError(f"worker ordinal {ordinal} is not within 0..{ORDINAL_MAX}")
    if len(random) < RANDOM_BYTES:
        raise ValueError(f"a cancel key needs {RANDOM_BYTES} random bytes")
    low = int.from_bytes(random[:2], "big") & 0x7FFF
    process_id = (ordinal << 15 | low) or 1  # 0 would read as "no backend" in drivers
    size = SECRET_BYTES_LONG if protocol_minor >= 2 else SECRET_BYTES_SHORT
    return process_id.to_bytes(4, "big") + random[2 : 2 + size]


def ordinal_of(key: bytes) -> int | None:
    """The worker's ordinal in a key, or None for a key that no worker made."""
    if not 8 <= len(key) <= KEY_BYTES_MAX:
        return None
    process_id = int.from_bytes(key[:4], "big")
    return None if process_id >> 31 else process_id >> 15


def forwarded(key: bytes, hops: int) -> bytes:
    """A worker's key as hosts pass it on: marked as no client's, and behind it how often it was passed on."""
    return bytes([key[0] | _PASSED_ON]) + key[1:] + bytes([hops])


def read_forwarded(key: bytes) -> tuple[bytes, int]:
    """The key as its worker made it, and how often it was passed on (0: a client sent it)."""
    if len(key) < 9 or not key[0] & _PASSED_ON:
        return key, 0
    return bytes([key[0] & ~_PASSED_ON]) + key[1:-1], key[-1]
