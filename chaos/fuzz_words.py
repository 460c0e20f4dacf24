"""What both halves of the fuzz share: spoiling bytes, and judging what a client of the pooler heard."""

from __future__ import annotations

import re
import socket
import zlib
from collections import deque
from random import Random

SERVER_KINDS = frozenset(b"123ACDEGHIKNRSTVWZcdnstv")
_MARK = re.compile(rb"<(\d+)[.](\d+)>")
HEARD_MAX = 40
_MESSAGE_BYTES_MAX = (1 << 30) + (1 << 16)  # the pooler's limit is on what is still to come of one
_LENGTHS = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\3", b"\0\0\0\4", b"\0\0\0\5", b"\x40\0\0\1",
            b"\0\1\0\0", b"\x00\x10\x00\x01", b"\x7f\xff\xff\xff", b"\x80\0\0\0")


def mark(number: int) -> str:
    """By which bytes made for input `number` are known again; a spoilt one is none."""
    return f"<{number}.{zlib.crc32(b'%d' % number)}>"


def marks(data: bytes) -> set[int]:
    """The numbers whose marks are in it."""
    return {int(each) for each, proof in _MARK.findall(data) if zlib.crc32(each) == int(proof)}


def noise(chance: Random) -> bytes:
    return chance.randbytes(chance.choice((1, 4, 7, 64, 300)))


def spoil(chance: Random, data: bytes, sound_in: int = 8) -> bytes:
    """In 5 of `sound_in` a bit, a length, the end, or bytes between are wrong; else as it is."""
    if not data:
        return data
    how = chance.randrange(sound_in)
    at = chance.randrange(len(data))
    match how:
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:1] + chance.choice(_LENGTHS) + data[5:]
        case 2:
            return data[:at]
        case 3:
            return data[:at] + noise(chance) + data[at:]
        case 4:
            end = chance.randint(at, len(data))
            return data[:at] + data[end:]
    return data


class Nonsense(Exception):
    """A client heard what is no protocol."""


class Hearing:
    """What one client hears, judged message by message. `asked`: the numbers whose marks it may hear.

    `bare`: single bytes that may come before, for it asked for encryption."""

    def __init__(self, *, bare: int = 0) -> None:
        self.asked: set[int] = set()
        self.readies = 0
        self.errors = 0
        self.copies_in = 0
        self.last = b""
        self.heard: deque[bytes] = deque(maxlen=HEARD_MAX)  # types, the newest last
        self.status = b""
        self.code = ""
        self.is_fatal = False  # since the last ReadyForQuery
        self.strange: set[int] = set()
        self._bare = bare
        self._buffer = bytearray()

    @property
    def is_inside(self) -> bool:
        """Whether the head of a message was heard, and not yet all of it."""
        return len(self._buffer) >= 5

    def take(self, data: bytes) -> None:
        """Raises Nonsense."""
        self._buffer += data
        while self._bare and self._buffer and self._buffer[0] in b"NS" and (
                len(self._buffer) == 1 or self._buffer[1] in b"NSER"):
            self._bare -= 1
            del self._buffer[:1]
        at = 0
        buffer = self._buffer
        while len(buffer) - at >= 5:
            size = int.from_bytes(buffer[at + 1 : at + 5])
            if buffer[at] not in SERVER_KINDS or not 4 <= size <= _MESSAGE_BYTES_MAX:
                raise Nonsense(f"{bytes(buffer[at:at + 40])!r} behind {self.last!r}")
            if len(buffer) - at < size + 1:
                break
            self._one(bytes(buffer[at : at + 1]), bytes(buffer[at + 5 : at + size + 1]))
            at += size + 1
        del buffer[:at]

    def _one(self, kind: bytes, body: bytes) -> None:
        self.last = kind
        self.heard.append(kind)
        if kind == b"Z":
            self.readies += 1
            self.is_fatal = False
            self.status = body
            if body not in (b"I", b"T", b"E"):
                raise Nonsense(f"ReadyForQuery with {body!r}")
        elif kind == b"E":
            self.errors += 1
            self.is_fatal = self.is_fatal or b"VFATAL\0" in body or b"VPANIC\0" in body
            found = re.search(rb"\0C([^\0]*)\0", body)
            self.code = found[1].decode(errors="replace") if found else ""
        elif kind == b"G":
            self.copies_in += 1
        elif kind == b"D":
            self.strange |= marks(body) - self.asked


def may_close(hearing: Hearing, *, was_cut: bool) -> bool:
    """Whether a client that heard this may be closed. `was_cut`: a session has just ended in the middle of a
    message that a client was being sent; inside of it nobody can be told anything."""
    return hearing.is_fatal or (was_cut and hearing.is_inside)


def read(sock: socket.socket, hearing: Hearing, seconds: float) -> str:
    """One recv: `answered`, `nothing` within the time, or `closed`. Raises Nonsense."""
    sock.settimeout(seconds)
    try:
        data = sock.recv(262_144)
    except TimeoutError:
        return "nothing"
    except OSError:
        return "closed"
    if not data:
        return "closed"
    hearing.take(data)
    return "answered"


def read_to_end(sock: socket.socket, hearing: Hearing, seconds: float) -> bool:
    """End our half and read the other to its end: then all that was sent has been looked at. False: it did
    not end within the time. Raises Nonsense."""
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        return True
    while (said := read(sock, hearing, seconds)) == "answered":
        pass
    return said == "closed"
