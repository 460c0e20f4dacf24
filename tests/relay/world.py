"""Clients, a pool and scripted sessions joined by socket pairs, moved by hand: no task, clock or chance."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any, cast

from coordinator.ledger.record import Backend, Kind, Permit
from pooler.demo.client import Inbox, Message
from pooler.net.facts import SessionFacts
from pooler.net.tls import TlsSocket
from pooler.pool.opener import OpenSession
from pooler.pool.parts import Parts
from pooler.pool.plan import PoolPlan
from pooler.pool.pool import Pool
from pooler.relay import reactor
from pooler.relay.asking import Asked
from pooler.relay.client import ClientConn
from pooler.relay.reactor import Reactor
from pooler.relay.server import ServerConn
from pooler.settings import PoolSettings
from pooler.wire.auth import ServerSecret
from pooler.wire.parameters import TrackedParameters
from pooler.wire.prepared import Statements
from pooler.wire.session_state import TextLook
from tests.net.tls_wires import clients, servers, shake_hands
from tests.relay.miniserver import MiniServer
from tests.relay.words import PARAMETERS

Chop = Callable[[bytes], Iterable[bytes]]


class Tasks:
    """Stands for a nursery: remembers what was started."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def start_soon(self, task: Any, *args: Any) -> None:
        self.started.append((task, *args))


class NoLedger:
    """Stands for the permits: nothing is known of any ledger; what is told it is remembered."""

    def __init__(self) -> None:
        self.ledgers: dict[str, Any] = {}
        self.ended: list[tuple[str, Permit]] = []

    async def closing(self, db: str, permit: Permit) -> None:
        """A session is about to be closed."""

    def released(self, db: str, permit: Permit, proof: Any) -> None:
        self.ended.append(("released", permit))

    def unknown(self, db: str, permit: Permit, *, abandoned: bool) -> None:
        self.ended.append(("unknown", permit))


def in_clear() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    return near, far


def in_tls() -> tuple[socket.socket, socket.socket]:
    """The same with TLS between them; `near` is its client."""
    near, far = in_clear()
    ours = TlsSocket.over(near, servers().context, server_side=False, server_hostname="db.test")
    theirs = TlsSocket.over(far, clients().context, server_side=True)
    shake_hands(ours, theirs)
    return ours, theirs


joined = in_clear
TLS_ROUNDS = 12  # a record that comes in pieces is seen by nobody before it is whole


def whole(data: bytes) -> Iterable[bytes]:
    """Not chopped at all."""
    return [data] if data else []


def bytewise(data: bytes) -> Iterable[bytes]:
    """Every byte on its own."""
    return (data[n : n + 1] for n in range(len(data)))


@dataclass
class Session:
    """One scripted session: `far` is the server's end."""

    mini: MiniServer
    near: socket.socket
    far: socket.socket
    conn: ServerConn
    unsent: list[bytes] = field(default_factory=list)
    received: bytes = b""
    stopped: bool = False  # reads nothing

    def move(self, chop: Chop) -> bool:
        """Take what came, answer; whether anything moved."""
        moved = False
        if not self.stopped:
            try:
                data = self.far.recv(65_536)
            except (BlockingIOError, OSError):
                data = b""
            if data:
                moved = True
                self.received += data
                self.unsent += chop(self.mini.feed(data))
        while self.unsent:
            try:
                sent = self.far.send(self.unsent[0])
            except BlockingIOError:
                break
            except OSError:
                self.unsent.clear()
                break
            moved = True
            self.unsent[0] = self.unsent[0][sent:]
            if self.unsent[0]:
                break
            del self.unsent[0]
            if chop is not whole:
                break  # one piece at a time
        if self.mini.ended and not self.unsent and self.far.fileno() >= 0:
            self.far.close()
            moved = True
        return moved


@dataclass
class Client:
    """A scripted client's end."""

    near: socket.socket
    conn: ClientConn
    inbox: Inbox = field(default_factory=Inbox)
    heard: list[Message] = field(default_factory=list)
    closed: bool = False
    stopped: bool = False
    unsent: bytes = b""
    got_bytes: int = 0

    def read(self) -> bool:
        """Take what came; whether anything did."""
        if self.stopped or self.closed:
            return False
        try:
            data = self.near.recv(1 << 20)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return True
        self.got_bytes += len(data)
        self.inbox.feed(data)
        while (said := self.inbox.next()) is not None:
            self.heard.append(said)
        return True

    def take(self) -> list[Message]:
        """What it heard since the last time."""
        heard, self.heard = self.heard, []
        return heard

    @property
    def kinds(self) -> str:
        """Letters of what it heard since the last time; Z with its status, E with its SQLSTATE."""
        return kinds(self.take())

    def leave(self) -> None:
        self.near.close()
        self.closed = True


def kinds(heard: Iterable[Message]) -> str:
    """Letters of messages; Z with its status, E with its SQLSTATE, D with a short row's value."""
    shown = []
    for said in heard:
        if said.type == "Z":
            shown.append(f"Z:{said.body.decode()}")
        elif said.type == "E":
            shown.append(f"E:{said.error().sqlstate}")
        elif said.type == "D" and len(said.body) < 40:
            shown.append(f"D:{said.body[6:].decode()}")
        elif said.type == "C":
            shown.append(f"C:{said.body[:-1].decode()}")
        else:
            shown.append(said.type)
    return " ".join(shown)


class World:
    """A pool with `sessions` open sessions."""

    def __init__(self, sessions: int = 1, mode: str = "transaction", **settings: Any) -> None:
        self.tasks = Tasks()
        self.reactor = Reactor()
        self.tracked = TrackedParameters(("IntervalStyle",))
        look = TextLook()
        self.parts = Parts(
            nursery=cast(Any, self.tasks), reactor=self.reactor, permits=cast(Any, NoLedger()), table=None,
            random=Random(0), statements=Statements(look.residue), look=look,
            parameters_of=lambda told: self.tracked.from_statuses(told.items()),
            client_closed=lambda client: None)
        plan = PoolPlan(
            name="db", ledger="db/write", dbname="db", user="u", secret=ServerSecret(), mode=cast(Any, mode),
            size_max=sessions, size_min=0, query_wait_timeout_seconds=60,
            server_lifetime_seconds=float("inf"),
            settings=PoolSettings(**settings))
        self.pool = Pool(self.parts, plan)
        self.sessions: list[Session] = []
        self.clients: list[Client] = []
        self.chop: Chop = whole
        self.dialled = 0
        for _ in range(sessions):
            self.open_session()

    # ---- making

    def open_session(self) -> Session:
        """One more session becomes idle, or goes to who waits."""
        opened, far = self.dial()
        conn = self.pool.adopt(opened)
        session = Session(MiniServer(pid=opened.pid), opened.sock, far, conn)
        self.sessions.append(session)
        self.pool.core.opening += 1
        self.pool.core.opened(conn, monotonic())
        return session

    def dial(self) -> tuple[OpenSession, socket.socket]:
        """A session as it is opened, and the server's end of it."""
        near, far = joined()
        self.dialled += 1
        number = self.dialled
        backend = Backend("127.0.0.1:1")
        return OpenSession(
            sock=near, pid=number, secret_key=b"key", parameters=dict(PARAMETERS), db="db/write",
            permit=Permit(Kind.MAIN, number, number), epoch=0, backend=backend, backend_start_us=0,
            facts=SessionFacts(number, 0, backend, "", 0, "", 0, {}), eof_is_proof=True), far

    def client(self, buffer_bytes: int = 0, **startup: str) -> Client:
        """A logged-in client."""
        near, far = joined()
        if buffer_bytes:
            for sock in (near, far):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        base = self.tracked.from_statuses({**PARAMETERS, b"application_name": b""}.items())
        wanted = base.with_startup({k.encode(): v.encode() for k, v in startup.items()})
        conn = ClientConn(self.reactor, self.pool, far, "test:0", b"key", wanted, "", Asked("u"))
        self.pool.clients.add(conn)
        conn.start(b"")
        made = Client(near, conn)
        self.clients.append(made)
        return made

    # ---- moving

    def send(self, client: Client, data: bytes) -> None:
        """Queue bytes of a client."""
        client.unsent += data

    def settle(self) -> None:
        """Move everything until nothing moves any more."""
        idle_rounds, enough = 0, TLS_ROUNDS if joined is in_tls else 1
        while idle_rounds < enough:
            moved = False
            for client in self.clients:
                moved |= self._push(client)
            self.reactor._turn()
            for session in self.sessions:
                moved |= session.move(self.chop)
            self.reactor._turn()
            for client in self.clients:
                moved |= client.read()
            idle_rounds = 0 if moved else idle_rounds + 1
        assert self.reactor.faults == 0
        self.pool.core.check()

    def _push(self, client: Client) -> bool:
        if not client.unsent or client.near.fileno() < 0:
            return False
        piece = next(iter(self.chop(client.unsent)))
        try:
            sent = client.near.send(piece)
        except BlockingIOError:
            return False
        except OSError:
            client.unsent = b""
            return False
        client.unsent = client.unsent[sent:]
        return sent > 0

    def say(self, client: Client, data: bytes) -> str:
        """Send, settle, and what the client heard."""
        self.send(client, data)
        self.settle()
        return client.kinds

    # ---- looking

    def check_idle(self) -> None:
        """Nobody uses anything: every session is idle, clean and in step, or being closed."""
        core = self.pool.core
        assert not core.active, core.active
        assert not core.waiting
        live = [s for s in self.sessions if not s.conn.closing]
        assert len(core.idle) == len(live)
        for session in live:
            conn, mini = session.conn, session.mini
            assert (mini.status, mini.copy, mini.locks, mini.pending) == ("I", "", 0, [])
            assert not mini._skipping
            assert not mini._buffer
            assert not mini._implicit, "the next client would go on in this one's transaction"
            assert not conn.owed
            assert not conn.out
            assert conn.client is None
            assert not conn.residue
            assert not conn._paused
            held = {statement.server_name.decode() for statement in conn.statements._held}
            named = {name for name in mini.statements if name and name != "pooler_stand_in"}
            assert held == named, (held, named)

    def close(self) -> None:
        for client in self.clients:
            client.near.close()
            client.conn.sock.close()
        for session in self.sessions:
            session.far.close()
            session.near.close()
        self.reactor._epoll.close()


@contextmanager
def world(sessions: int = 1, mode: str = "transaction", **settings: Any) -> Iterator[World]:
    """A world, closed at the end."""
    made = World(sessions, mode, **settings)
    linger, reactor.LINGER_SECONDS = reactor.LINGER_SECONDS, 0.0  # here nothing comes by itself
    try:
        yield made
    finally:
        reactor.LINGER_SECONDS = linger
        made.close()
