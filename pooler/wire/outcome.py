"""What came of a transaction, as its client was told: read from the messages that are sent to it. Pure."""

from __future__ import annotations

from typing import Final

COMPLETE, READY, ERROR, FUNCTION_DONE, SUSPENDED = 0x43, 0x5A, 0x45, 0x56, 0x73
IDLE: Final = 0x49
TAG_BYTES_MAX: Final = 64
COMMITTED: Final = "committed"
ROLLED_BACK: Final = "rolled_back"
UNKNOWN: Final = "unknown"
_LOOKED_AT: Final = frozenset((COMPLETE, READY))


class OutcomeWatch:
    """Fed with everything that a client is sent, in pieces of any size.

    `outcome` is that of the first transaction (`keeps_last`: the last) that ended, empty before. A group in
    which nothing was executed (a Parse and its Sync) is none. A COMMIT that was answered as one counts over
    whatever else the same query did. A transaction that was PREPAREd is not over, and not the client's any
    more: unknown.
    """

    __slots__ = ("_buffer", "_committed", "_failed", "_left", "_prepared", "_ran", "_rolled", "keeps_last",
                 "outcome")

    def __init__(self, *, keeps_last: bool = False) -> None:
        self.keeps_last = keeps_last
        self.outcome = ""
        self._buffer = b""
        self._left = 0  # of a message that is not looked at
        self._begin()

    def _begin(self) -> None:
        self._ran = self._failed = self._committed = self._rolled = self._prepared = False

    @property
    def ran(self) -> bool:
        """Something was executed, or refused, since the last transaction ended."""
        return self._ran

    def feed(self, data: bytes) -> None:
        """What the client is sent next."""
        at = min(self._left, len(data))
        self._left -= at
        data = self._buffer + data[at:]
        self._buffer = b""
        at, size = 0, len(data)
        while size - at >= 5:
            kind, end = data[at], at + 1 + int.from_bytes(data[at + 1 : at + 5], "big")
            if kind in _LOOKED_AT and end > size and size - at < TAG_BYTES_MAX:
                break
            self._take(kind, data[at + 5 : min(end, at + 5 + TAG_BYTES_MAX)])
            if end > size:
                self._left = end - size
                return
            at = max(end, at + 5)
        self._buffer = data[at:]

    def _take(self, kind: int, body: bytes) -> None:
        if kind == COMPLETE:
            self._ran = True
            self._committed |= body == b"COMMIT\0"
            self._rolled |= body == b"ROLLBACK\0"
            self._prepared |= body == b"PREPARE TRANSACTION\0"
        elif kind == ERROR:
            self._ran = self._failed = True
        elif kind == FUNCTION_DONE or kind == SUSPENDED:
            self._ran = True
        elif kind == READY and body == b"I" and self._ran:
            if not self.outcome or self.keeps_last:
                self.outcome = self._decided()
            self._begin()

    def _decided(self) -> str:
        if self._prepared:
            return UNKNOWN
        if self._committed:
            return COMMITTED
        return ROLLED_BACK if self._failed or self._rolled else COMMITTED
