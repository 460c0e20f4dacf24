"""The same bytes to the worker's relay alone, in this process, over socket pairs and moved by hand.

Nothing here waits, so that each input is seen through to its end before the next, whatever the machine does:
both halves of the fuzz in great number. Real are reactor, pool, clients, sessions and what they are made of;
the ledger, the logins and the tasks of a worker are not here.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from time import monotonic
from typing import Any, cast

import structlog

from chaos.fuzz_client import ends_whole, made
from chaos.fuzz_run import GROWTH_BYTES_MAX, WARM_PART, no_wrong, resident
from chaos.fuzz_server import OddServer, asking
from chaos.fuzz_words import Hearing, Nonsense
from chaos.outcome import Outcome
from chaos.script import GREETED, Script, Session, Then
from coordinator.ledger.record import Backend, Kind, Permit
from pooler.demo.judge import Verdict
from pooler.net.facts import SessionFacts
from pooler.pool import janitor
from pooler.pool.opener import OpenSession
from pooler.pool.plan import PoolPlan
from pooler.pool.pool import Parts, Pool
from pooler.relay import reactor
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
MIXES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("transaction", {}), ("session", {}), ("statement", {}), ("transaction", {"session_state": "pin"}),
    ("transaction", {"session_state": "reject"}), ("transaction", {"session_state": "warn"}),
    ("transaction", {"max_prepared_statements": 3}), ("transaction", {"max_prepared_statements": 0}))
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

    def __init__(self, mode: str, settings: dict[str, Any], odd: OddServer | None) -> None:
        self.mode, self.odd = mode, odd
        self.nursery, self.reactor = _Nursery(), Reactor()
        self.tracked, look = TrackedParameters(("IntervalStyle",)), TextLook()
        self.parts = Parts(
            nursery=cast(Any, self.nursery), reactor=self.reactor, permits=cast(Any, _NoLedger()), table=None,
            random=Random(0), statements=Statements(look.residue), look=look,
            parameters_of=lambda told: self.tracked.from_statuses(told.items()),
            client_closed=lambda client: None)
        self.pool = Pool(self.parts, PoolPlan(
            name="db", ledger="db/write", dbname="db", user="u0", secret=ServerSecret(), mode=cast(Any, mode),
            size_max=SESSIONS, size_min=0, query_wait_timeout_seconds=60, server_lifetime_seconds=0,
            settings=PoolSettings(**settings)))
        self.far: dict[int, tuple[socket.socket, Session]] = {}
        self.clients: list[Client | None] = [None] * CLIENTS
        self.born = 0
        self.chance = Random(f"{mode}:{settings}")

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
        for _ in range(ROUNDS_MAX):
            self.reactor._turn()
            moved = self._work() + sum(self._serve(pid) for pid in list(self.far))
            self.reactor._turn()
            moved += sum(each.read() + each.send() for each in self.clients if each is not None)
            if not moved:
                break
        else:
            raise Nonsense("it never comes to rest")
        if self.reactor.faults:
            self.reactor.faults = 0
            raise Nonsense("the reactor met a bug of ours")
        self.pool.core.check()

    def pass_time(self) -> None:
        """What the pooler asks for itself and is never answered ends its session."""
        if any(server.own for server in self.pool.core.active):
            janitor.end_hung_cleanups(self.pool, monotonic() + LATER_SECONDS)
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
        self.conn = ClientConn(scene.reactor, scene.pool, far, "fuzz:0", b"key", wanted, b"", "")
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


class Fuzz:
    """Inputs to scenes; `wrong` should stay empty."""

    def __init__(self, seed: int, scenes: list[Scene]) -> None:
        self._seed, self._scenes = seed, scenes
        self.heard: Counter[str] = Counter()
        self.wrong: list[str] = []

    def said_by_server(self, number: int) -> None:
        """A client asks, and the server answers oddly."""
        scene = self._scenes[number % len(self._scenes)]
        client = scene.client(number // len(self._scenes) % CLIENTS)
        data, readies = asking(self._seed, number)
        client.hearing.asked.add(number)
        wanted = client.hearing.readies + readies
        self._see_through(number, scene, client, (data,), "server")
        if strange := client.hearing.strange - {0}:
            self.wrong.append(f"server {number}: heard what others were said: {sorted(strange)}")
            client.leave()
        if not client.closed and client.hearing.readies < wanted:
            client.left = 0  # it waits for what will never come

    def sent_by_client(self, number: int) -> None:
        """A client sends hostile bytes."""
        scene = self._scenes[number % len(self._scenes)]
        client = scene.client(number // len(self._scenes) % CLIENTS)
        writes = made(self._seed, number, "session").writes
        self._see_through(number, scene, client, writes, "client")
        client.hearing.strange.clear()
        if not all(map(ends_whole, writes)):
            client.left = min(client.left, 1)  # what follows would be taken for the rest of it
        if client.closed and not client.hearing.is_fatal:
            left = any(b"X" in each for n in client.sent for each in made(self._seed, n, "session").writes)
            if not left:
                self.wrong.append(f"client {client.sent}: closed without a word")

    def _see_through(
        self, number: int, scene: Scene, client: Client, writes: tuple[bytes, ...], who: str
    ) -> None:
        client.sent.append(number)
        before = len(client.sent), client.hearing.readies
        try:
            for data in writes:
                client.send(data)
                scene.settle()
            scene.pass_time()
        except (Nonsense, AssertionError) as heard:
            self.wrong.append(f"{who} {client.sent}: {heard!r}")
            client.leave()
        said = "closed" if client.closed else "answered" if client.hearing.readies > before[1] else "nothing"
        self.heard[f"{who} {said}"] += 1


@contextmanager
def scenes(seed: int, *, odd: bool) -> Iterator[tuple[list[Scene], OddServer]]:
    """One of each of MIXES. What they log of sessions that come and go is not shown."""
    server = OddServer(seed)
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    made_ones = [Scene(mode, settings, server if odd else None) for mode, settings in MIXES]
    linger, reactor.LINGER_SECONDS = reactor.LINGER_SECONDS, 0.0  # here nothing comes by itself
    try:
        yield made_ones, server
    finally:
        reactor.LINGER_SECONDS = linger
        structlog.configure(**before)
        for each in made_ones:
            each.close()


def fuzz_relay(seed: int, from_clients: int, from_server: int, say: Callable[[str], None]) -> Outcome:
    """So many inputs of each kind."""
    heard: Counter[str] = Counter()
    wrong: list[str] = []
    growth, said = 0, 0
    for odd, inputs in ((False, from_clients), (True, from_server)):
        with scenes(seed, odd=odd) as (stage, server):
            fuzz = Fuzz(seed, stage)
            start = 0
            for number in range(inputs):
                if number == inputs // WARM_PART:
                    start = resident({os.getpid()})
                (fuzz.said_by_server if odd else fuzz.sent_by_client)(number)
            growth = max(growth, resident({os.getpid()}) - start)
            heard += fuzz.heard
            wrong += fuzz.wrong
            said += sum(server.said.values())
    say(f"relay: {heard.total()} inputs ({said} answers of the server); heard: {dict(heard)}")
    return Outcome([
        no_wrong("relay", wrong),
        Verdict("memory", growth <= GROWTH_BYTES_MAX, f"relay: the process grew by {growth / 2**20:.1f} MiB"),
    ], {"relay": {"inputs": heard.total(), "said": said, "heard": dict(heard), "growth_bytes": growth}})
