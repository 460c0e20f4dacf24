"""Playing a script straight at PostgreSQL, and through a pooler."""

from __future__ import annotations

import fcntl
import select
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from termios import TIOCOUTQ
from time import monotonic

from pooler.demo.client import TERMINATE, Disconnected, Message, RawClient, query
from tests.differential.script import (
    Reference,
    Steps,
    a_query_ends_a_group,
    count,
    first_difference,
    keeps_session,
    kinds,
    without_news,
    writes,
)

WAIT_SECONDS = 10.0
ENDED = Message("end", b"")
MISSING = Message("nothing within the time", b"")

Login = Callable[[], RawClient]
Cut = Callable[[bytes], Sequence[bytes]]


def whole(data: bytes) -> Sequence[bytes]:
    """Not cut at all."""
    return (data,)


class Watch:
    """Sees from outside when a session of the server waits for its client. Speaks over the local socket."""

    def __init__(self, client: RawClient) -> None:
        self._client = client

    def go_on_with(self, client: RawClient) -> None:
        """The server has ended the one it had."""
        self.close()
        self._client = client

    def close(self) -> None:
        """Its connection."""
        self._client.close()

    def is_quiet(self, watched: RawClient) -> bool | None:
        """The server has read all that was sent, did it, and waits for more. None: it is gone."""
        unread = struct.unpack("i", fcntl.ioctl(watched.socket, TIOCOUTQ, bytes(4)))[0]
        said = self._client.query(f"select wait_event from pg_stat_get_activity({watched.session.pid})")
        return (not unread and said == [["ClientRead"]]) if said else None


class Listener:
    """A client, what it heard since its login, and the kinds of messages that it sent."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.heard: list[Message] = []
        self.sent = b""
        self.ended = False

    def send(self, data: bytes, cut: Cut = whole) -> None:
        """Nothing ends the connection; a server that has ended it already is no error."""
        if not data:
            self.client.abort()
            self.ended = True
            return
        self.sent += kinds(data)
        with suppress(OSError):
            for piece in cut(data):
                self.client.send(piece)

    def take_what_came(self) -> None:
        """Without waiting."""
        self.client.socket.setblocking(False)
        try:
            while not self.ended:
                self._take()
        except BlockingIOError:
            pass
        finally:
            self.client.socket.settimeout(WAIT_SECONDS)

    def take_until_quiet(self, watch: Watch) -> None:
        """All that the server has to say by now."""
        deadline = monotonic() + WAIT_SECONDS
        while not self.ended:
            quiet = watch.is_quiet(self.client)
            self.take_what_came()
            while quiet is None and not self.ended:
                self._take()
            if quiet:
                return
            assert monotonic() < deadline, "the server itself does not come to an end"

    def _take(self) -> None:
        try:
            said = self.client.receive()
        except (Disconnected, ConnectionResetError, BrokenPipeError):
            self.heard.append(ENDED)
            self.ended = True
            return
        self.heard.append(said)

    def take_until_end(self) -> None:
        """Says goodbye and hears the rest."""
        if not self.ended:
            self.send(TERMINATE)
            try:
                while not self.ended:
                    self._take()
            except TimeoutError:
                self.heard.append(MISSING)


def play_straight(steps: Steps, login: Login, watch: Watch) -> Reference:
    """Every client with a session of its own."""
    found = Reference()
    with ExitStack() as opened:
        listeners: dict[int, Listener] = {}
        for write in writes(steps):
            if write.client not in listeners:
                listeners[write.client] = Listener(opened.enter_context(login()))
            listener = listeners[write.client]
            if not listener.ended:
                listener.send(write.data)
                listener.take_until_quiet(watch)
            found.counts.append(count(listener.heard))
            found.closed.append(listener.ended)
            found.holds.append(not listener.ended and keeps_session(listener.heard, listener.sent))
            found.blocks |= any(said.type == "Z" and said.body != b"I" for said in listener.heard)
        for client, listener in listeners.items():
            listener.take_until_end()
            found.heard[client] = listener.heard
    return found


@dataclass(slots=True)
class Pooled:
    """A run through the pooler: who has a session, who waits for one."""

    reference: Reference
    sessions: int
    cut: Cut = whole

    def play(self, steps: Steps, login: Login) -> dict[int, list[Message]]:
        """What each client heard; who did not hear in time what it should have by then heard MISSING."""
        script = writes(steps)
        clients = sorted({write.client for write in script})
        with ExitStack() as opened:
            listeners = {n: Listener(opened.enter_context(login())) for n in clients}
            due: dict[int, int] = {}  # client: the write that is not fully answered
            holders: set[int] = set()
            left = list(enumerate(script))
            while left:
                # who waits for a session says no more until it has one: the first of those who do not
                place = next((n for n, (_, write) in enumerate(left) if write.client not in due), None)
                assert place is not None, f"{due} wait for what {holders} have, and these say no more"
                at, write = left.pop(place)
                if listeners[write.client].ended:
                    continue
                listeners[write.client].send(write.data, self.cut)
                due[write.client] = at
                if not self._settle(due, holders, listeners):
                    break
            else:
                for listener in listeners.values():
                    listener.take_until_end()
            return {n: listener.heard for n, listener in listeners.items()}

    def _settle(self, due: dict[int, int], holders: set[int], listeners: dict[int, Listener]) -> bool:
        """Wait for everybody who has a session or can get one. False: in vain.

        A write may be several units of work, between which a session may go to somebody else: so whoever is
        answered first is taken first.
        """
        deadline = monotonic() + WAIT_SECONDS
        while due and len(holders - due.keys()) < self.sessions:
            for client, at in list(due.items()):
                listener = listeners[client]
                if not listener.ended:
                    listener.take_what_came()
                if count(listener.heard) >= self.reference.counts[at] or listener.ended:
                    del due[client]
                    holders.discard(client)
                    holders |= {client} if self.reference.holds[at] and not listener.ended else set()
                    break
            else:
                waiting = [listeners[n].client.socket for n in due]
                if not select.select(waiting, (), (), max(0.0, deadline - monotonic()))[0]:
                    for client in due:
                        listeners[client].heard.append(MISSING)
                    return False
        return True


def differences(
    steps: Steps, reference: Reference, login: Login, sessions: int, cut: Cut = whole
) -> dict[int, str]:
    """Client: where what it heard through the pooler parts from the reference. Empty: nowhere."""
    heard = Pooled(reference, sessions, cut).play(steps, login)
    cut_short = any(said and said[-1] is MISSING for said in heard.values())
    if cut_short:
        heard = {n: said for n, said in heard.items() if said and said[-1] is MISSING}
    for n in {write.client for write in writes(steps) if not write.data} & heard.keys():
        # who leaves without a word may have heard more of what nobody had asked to be flushed
        del heard[n][len(reference.heard[n]) :]
    found = {
        n: first_difference(
            *(without_news(said) if a_query_ends_a_group(steps, n) else said
              for said in (heard[n], reference.heard[n])))
        for n in heard}
    return {n: said for n, said in found.items() if said}


def run(client: RawClient, *statements: str) -> None:
    """Each as a query of its own. Raises ServerSaid."""
    for text in statements:
        client.send(query(text))
        for said in client.until_ready():
            if said.type == "E":
                raise said.error()
