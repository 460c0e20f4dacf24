"""What a session needs of whoever it serves: a client of the reactor, or a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pooler.relay import owed as o
from pooler.wire.parameters import ParameterSet
from pooler.wire.prepared import ClientStatements

if TYPE_CHECKING:
    from pooler.relay.server import ServerConn


class Served(Protocol):
    """Plain calls out of the reader of a session; none may wait."""

    parameters: ParameterSet
    skip: int  # bytes of a message that is being sent on in pieces
    holds: bool  # it keeps the session until it leaves, whatever ReadyForQuery says
    proven: bool  # a server has taken its parameters before
    statements: ClientStatements | None  # what it has prepared
    forgets: bytes | None  # prepared names that what was sent last forgets
    last_sent: bytes  # the last text of a query
    last_word: bytes  # to be said where the message that is half way ends; then it is served no more
    fitting: bool  # what it sends waits until a server has taken its parameters

    def deliver(self, data: bytes) -> None:
        """An answer."""

    def pause(self, paused: bool) -> None:
        """The server cannot take more (or can again)."""

    def transaction_ended(self, now: float) -> None:
        """A transaction ended and the session is kept."""

    def detached(self, now: float) -> None:
        """The session was taken back."""

    def server_lost(self, server: ServerConn, fatal: bytes) -> None:
        """The session went away; `fatal` is the server's last word, already delivered."""

    def break_off(self, sqlstate: str, text: str) -> None:
        """FATAL; the session is closed."""

    def fitted(self) -> None:
        """The session has its parameters now."""

    def did_not_happen(self, entry: o.Entry) -> None:
        """The server skipped it after an error."""

    def reset_asked(self) -> None:
        """RESET ALL or DISCARD ALL went through."""

    def go_on(self) -> None:
        """What `forgets` is about was answered."""
