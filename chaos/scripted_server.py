"""A stand-alone scripted server on loopback: one thread, one epoll, any number of `chaos.script` sessions."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from chaos.script import STARTED_US, Say, Script, Session, Then

_RECV_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)

ScriptFor = Callable[[Session], Script]


class ScriptedServer:
    """Serves until closed. `script_for` chooses by what the startup packet said; it may be exchanged."""

    def __init__(self, script_for: ScriptFor | None = None, *, script: Script | None = None) -> None:
        chosen = script or Script()
        self.script_for: ScriptFor = script_for or (lambda session: chosen)
        self.sessions: dict[int, tuple[socket.socket, Session]] = {}  # by pid
        self.started: Counter[str] = Counter()  # startup packets seen, by user
        self.born = 0
        self.first_words = b""  # said to each connection before it has asked anything
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._orders: deque[Callable[[], None]] = deque()
        self._ring, self._bell = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="scripted server", daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop)
        self._thread.join(10)

    def push(self, user: str, said: Say) -> int:
        """Say something to every session of a user that is in, unasked; how many there were."""
        done, count = threading.Event(), [0]

        def order() -> None:
            for sock, session in list(self.sessions.values()):
                if session.user == user and session.is_idle:
                    count[0] += 1
                    session.say(said)
                    self._go_on(sock, session)
            done.set()

        self._do(order)
        done.wait(10)
        return count[0]

    def alive(self, user: str) -> int:
        """How many of a user's sessions have not ended."""
        return sum(session.user == user for _, session in list(self.sessions.values()))

    def _do(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._ring.send(b"!")

    def _serve(self) -> None:
        while not self._closing:
            for key, mask in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._bell:
                    self._bell.recv(_RECV_BYTES)
                    while self._orders:
                        self._orders.popleft()()
                else:
                    self._ready(*self.sessions[key.data], mask)

    def _stop(self) -> None:
        self._closing = True
        for sock, _ in list(self.sessions.values()):
            sock.close()
        for each in (self._listener, self._bell, self._ring):
            each.close()
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, peer = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.born += 1
                pid = 10_000 + self.born
                session = Session(pid, STARTED_US + 1_000 * self.born, self._chosen, self._sessions,
                                  (peer[:2], sock.getsockname()[:2]))
                self.sessions[pid] = sock, session
                self._selector.register(sock, selectors.EVENT_READ, pid)
                if self.first_words:
                    session.say(Say(self.first_words))
                    self._go_on(sock, session)

    def _chosen(self, session: Session) -> Script:
        self.started[session.user] += 1
        return self.script_for(session)

    def _sessions(self) -> list[Session]:
        return [session for _, session in self.sessions.values()]

    def _ready(self, sock: socket.socket, session: Session, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            try:
                data = sock.recv(_RECV_BYTES)
            except BlockingIOError:
                data = b""
            except OSError:
                data = b""
                session.then = Then.RST
            else:
                if not data:
                    self._end(sock, session)
                    return
                session.feed(data)
        self._go_on(sock, session)

    def _go_on(self, sock: socket.socket, session: Session) -> None:
        try:
            while session.out:
                del session.out[: sock.send(session.out)]
        except BlockingIOError:
            self._selector.modify(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, session.pid)
            return
        except OSError:
            session.then = Then.RST
        if session.then is Then.RST:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._end(sock, session)
            return
        self._selector.modify(sock, selectors.EVENT_READ, session.pid)
        if session.then is Then.FIN:  # what still comes is read, so that it does not turn into a reset
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            session.is_in = False

    def _end(self, sock: socket.socket, session: Session) -> None:
        session.is_in = False
        self.sessions.pop(session.pid, None)
        self._selector.unregister(sock)
        sock.close()
