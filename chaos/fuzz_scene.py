"""Where hostile bytes meet the worker's relay alone: a pool, its sessions at a scripted server, and clients.

Nothing here waits: everything is moved by hand, over socket pairs, until it rests. Real are reactor, pool,
clients, sessions and what they are made of; the ledger, the logins and the tasks of a worker are not here.
"""

from __future__ import annotations

import socket
from random import Random
from time import monotonic
from typing import Any, cast

from chaos.fuzz_server import OddServer
from chaos.fuzz_words import Hearing, Nonsense
from chaos.script import GREETED, Script, Session, Then
from coordinator.ledger.record import Backend, Kind, Permit
from pooler.net.facts import SessionFacts
from pooler.pool import janitor
from pooler.pool.opener import OpenSession
from pooler.pool.parts import Parts
from pooler.pool.plan import PoolPlan
from pooler.pool.pool import Pool
from pooler.relay.asking import Asked
from pooler.relay.client import ClientConn
from pooler.relay.reactor import Reactor
from pooler.settings import PoolSettings
from pooler.wire.auth import ServerSecret
from pooler.wire.parameters import TrackedParameters
from pooler.wire.prepared import Statements
from pooler.wire.session_state import TextLook

SESSIONS, CLIENTS, PER_CLIENT = 2, 3, 40
SLOW = 0.1  # of the clients, so many have small buffers, and as many read little at a time
STARTS: tuple[dict[bytes, bytes], ...] = (
    {}, {}, {b"application_name": b"fuzz"}, {b"TimeZone": b"Asia/Tokyo"}, {b"work_mem": b"1MB", b"a.b": b"c"},
    {b"role": b"none"}, {b"client_encoding": b"LATIN1", b"search_path": b"\xe9"})
LATER_SECONDS = 3_600.0  # by then whatever has a time limit of its own is over
ROUNDS_MAX = 5_000
_TOLD = {name.encode(): value.encode() for name, value in GREETED.items()} | {b"application_name": b""}


class _Nursery:
    """Remembers what a pool has started: see Scene.work."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def start_soon(self, task: Any, *args: Any) -> None:
        self.started.append((task, *args))


class _NoLedger:
    """Nothing is known of any ledger."""

    ledgers: dict[str, Any] = {}  # noqa: RUF012  it stays empty


class Scene:
    """One pool, its sessions at a scripted server, and a few clients."""

    def __init__(self, seed: int, mode: str, settings: dict[str, Any], odd: OddServer | None) -> None:
        self.odd = odd
        self.nursery, self.reactor = _Nursery(), Reactor()
        self.tracked, look = TrackedParameters(("IntervalStyle",)), TextLook()
        self.parts = Parts(
            nursery=cast(Any, self.nursery), reactor=self.reactor, permits=cast(Any, _NoLedger()), table=None,
            random=Random(0), statements=Statements(look.residue), look=look,
            parameters_of=lambda told: self.tracked.from_statuses(told.items()),
            client_closed=lambda client: None)
        self.pool = Pool(self.parts, PoolPlan(
            name="db", ledger="db/write", dbname="db", user="u0", secret=ServerSecret(), mode=cast(Any, mode),
            size_max=SESSIONS, size_min=0, query_wait_timeout_seconds=60,
            server_lifetime_seconds=float("inf"),
            settings=PoolSettings(**settings)))
        self.far: dict[int, tuple[socket.socket, Session]] = {}
        self.clients: list[Client | None] = [None] * CLIENTS
        self.born = 0
        self.cut = 0  # sessions that ended in the middle of a message which a client was being sent
        self.chance = Random(f"{seed}:{mode}:{settings}")

    def client(self, at: int) -> Client:
        """The client of that place, a new one if the last has gone."""
        known = self.clients[at]
        if known is None or known.closed or known.left <= 0:
            if known is not None:
                known.leave()
                self.settle()
            known = self.clients[at] = Client(self)
        known.left -= 1
        return known

    def settle(self) -> None:
        """Move everything until nothing moves any more. Raises Nonsense."""
        turns_max = self.reactor.turns + ROUNDS_MAX
        for _ in range(ROUNDS_MAX):
            self.reactor._turn()
            moved = self._work() + sum(self._serve(pid) for pid in list(self.far))
            self.reactor._turn()
            moved += sum(each.read() + each.send() for each in self.clients if each is not None)
            if not moved:
                break
        if moved or self.reactor.turns > turns_max:
            raise Nonsense("it never comes to rest")
        if self.reactor.faults:
            self.reactor.faults = 0
            raise Nonsense("the reactor met a bug of ours")
        self.pool.core.check()

    def pass_time(self) -> None:
        """What the pooler asks for itself and is never answered ends its session; who is to go does."""
        later = monotonic() + LATER_SECONDS
        if any(server.own for server in self.pool.core.active):
            janitor.end_hung_cleanups(self.pool, later)
            self.settle()
        if any(client.parting_since for client in self.pool.clients):
            janitor.end_late_partings(self.pool, later)
            self.settle()

    def close(self) -> None:
        for each in self.clients:
            if each is not None:
                each.leave()
                each.conn.sock.close()
        self._work()
        for sock, _ in self.far.values():
            sock.close()
        for server in list(self.parts.servers):
            server.sock.close()
        self.reactor._epoll.close()

    def _work(self) -> int:
        """What tasks of the worker would have done."""
        started, self.nursery.started = self.nursery.started, []
        for task, *args in started:
            name = getattr(task, "__name__", "")
            if name == "_open":
                self._open()
            elif name in ("_close", "_end"):
                server = args[0]
                self.cut += server.skip > 0
                server.sock.close()
                self.pool.core.closing -= 1
                self.pool._forget(server)
                self.pool.grow()
        return len(started)

    def _open(self) -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        self.born += 1
        pid = self.born
        session = Session(pid, pid, self._script, tuple, (("", 0), ("", 0)))
        session.is_in = session.asked_startup = True
        session.parameters = {"user": "u0"}
        session.script = self._script(session)
        self.far[pid] = far, session
        conn = self.pool.adopt(OpenSession(
            sock=near, pid=pid, secret_key=b"key!", parameters=dict(_TOLD), db="db/write",
            permit=Permit(Kind.MAIN, 1, pid), epoch=0, backend=Backend("127.0.0.1:1"), backend_start_us=pid,
            facts=SessionFacts(pid, pid, Backend("127.0.0.1:1"), "", 0, "", 0, {}), eof_is_proof=True))
        if not self.pool.core.opened(conn, monotonic()):
            self.pool.retire(conn, "not needed")

    def _script(self, session: Session) -> Script:
        return Script() if self.odd is None else self.odd.script_for(session)

    def _serve(self, pid: int) -> int:
        sock, session = self.far[pid]
        moved = 0
        try:
            data = sock.recv(65_536)
            moved = 1
            if not data:
                session.then = Then.RST
            session.feed(data)
        except BlockingIOError:
            pass
        except OSError:
            session.then = Then.RST
        try:
            while session.out:
                del session.out[: sock.send(session.out)]
                moved = 1
        except BlockingIOError:
            return moved
        except OSError:
            session.then = Then.RST
        if session.then in (Then.FIN, Then.RST):
            sock.close()
            del self.far[pid]
            return 1
        return moved


class Client:
    """A logged-in client's own end."""

    def __init__(self, scene: Scene) -> None:
        self.near, far = socket.socketpair()
        self.near.setblocking(False)
        far.setblocking(False)
        chance = scene.chance
        if chance.random() < SLOW:
            for sock in (self.near, far):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        self._read_bytes = 2_000 if chance.random() < SLOW else 1 << 20
        wanted = scene.tracked.from_statuses(_TOLD.items()).with_startup(chance.choice(STARTS))
        self.conn = ClientConn(scene.reactor, scene.pool, far, "fuzz:0", b"key", wanted, "", Asked())
        scene.pool.clients.add(self.conn)
        self.conn.start(b"")
        self.hearing = Hearing()
        self.sent: list[int] = []
        self.left, self.closed = PER_CLIENT, False
        self._unsent = b""

    def read(self) -> int:
        """Whether anything came. Raises Nonsense."""
        if self.closed:
            return 0
        try:
            data = self.near.recv(self._read_bytes)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if data:
            self.hearing.take(data)
        else:
            self.leave()
        return 1

    def send(self, data: bytes = b"") -> int:
        """As much of it as the pooler takes now; the rest with the next call. Whether anything went."""
        self._unsent += data
        if self.closed or not self._unsent:
            return 0
        try:
            sent = self.near.send(self._unsent)
        except OSError:
            return 0
        self._unsent = self._unsent[sent:]
        return sent

    def leave(self) -> None:
        self.closed = True
        self.near.close()
