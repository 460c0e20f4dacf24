"""What the ledger costs: a session's reservation beside the plain connect, many at once beside plain puts of
etcd in the same run, and each operation of a session's life in requests, bytes and CPU.

The absolute figures are this machine's (etcd's fsync above all): what is judged are differences and ratios.
"""

from __future__ import annotations

import shutil
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from benchmarks.comparison import etcd_requests
from benchmarks.ledger_host import DB, BenchWorker, coordinator, make_spec
from benchmarks.measure import cpu_seconds, now
from benchmarks.sides import both_sides
from coordinator.ledger.keys import FleetKeys
from coordinator.link import Args
from coordinator.store.api import Put, Txn
from coordinator.store.etcd import EtcdStore, open_etcd
from pooler.demo.etcd import Etcd
from pooler.demo.postgres import MONITOR_GRANTS, Limits, Role, Server, newest, temporary_directory
from pooler.net.dial import Target, dial
from pooler.wire.auth import ServerSecret

WORKERS = 8
AT_ONCE = 64
EACH = 8  # one after another, by each of those
PERMITS = (EACH + 1) * AT_ONCE
SESSIONS = 150  # opened one after another, with and without a reservation
ROUNDS = 6
BURSTS = 20
STEADY_SECONDS = 5.0
LIVES = 4  # of AT_ONCE permits, for the costs of each operation
DBNAME, USER, MONITOR, PASSWORD = "bench", "bench_app", "bench_monitor", "bench-password"

Say = Callable[[str], None]
Timed = Callable[[], Awaitable[Any]]


@dataclass(slots=True)
class Scene:
    """What runs."""

    server: Server
    etcd: Etcd
    store: EtcdStore
    coordinator: int
    workers: list[BenchWorker]

    @property
    def target(self) -> Target:
        return Target("127.0.0.1", self.server.port, USER, DBNAME, "bench", ServerSecret(PASSWORD.encode()))


def weigh_ledger(say: Say) -> dict[str, Any]:
    """The result document. Raises PartFailed when a part is missing."""
    began = now()
    with both_sides(1) as sides:
        etcd_requests(sides, STEADY_SECONDS)  # until the pool has its sessions
        steady = etcd_requests(sides, STEADY_SECONDS)
    say(f"{steady['per_transaction']:g} requests to etcd per transaction, of {steady['transactions']}")
    return {"steady": steady, **trio.run(_weigh, say), "workers": WORKERS, "seconds": round(now() - began, 1)}


async def _weigh(say: Say) -> dict[str, Any]:
    async with _scene() as scene:
        return {
            "session": await _sessions(scene, say),
            "at_once": await _at_once(scene, say),
            "operations": await _operations(scene, say),
        }


# ---- one after another, and many at once

async def _sessions(scene: Scene, say: Say) -> dict[str, float]:
    """Milliseconds of a session with its permit, beside one without: reserve, connect, record, in turns."""
    worker, plain, whole, reserved = scene.workers[0], [], [], []
    for _ in range(SESSIONS):
        begun = now()
        dialled = await dial(scene.target, connect_timeout_seconds=5)
        plain.append(now() - begun)
        dialled.sock.close()
        begun = now()
        granted = await worker.reserve()
        reserved.append(now() - begun)
        dialled = await dial(scene.target, connect_timeout_seconds=5)
        whole.append(now() - begun)
        dialled.sock.close()
        await worker.release(granted)
    found = {f"{name}_{part}_ms": round(1000 * _part(times, share), 3)
             for name, times in (("connect", plain), ("reserve", reserved), ("both", whole))
             for part, share in (("p50", 0.5), ("p99", 0.99))}
    more = [after - before for before, after in zip(plain, whole, strict=True)]  # of neighbours in time
    found["more_p50_ms"] = round(1000 * _part(more, 0.5), 3)
    found["more_p99_ms"] = round(1000 * _part(more, 0.99), 3)
    say(f"connect p50 {found['connect_p50_ms']:.2f} ms, with a reservation {found['both_p50_ms']:.2f} ms; "
        f"p99 {found['connect_p99_ms']:.2f} and {found['both_p99_ms']:.2f} ms")
    return found


async def _at_once(scene: Scene, say: Say) -> dict[str, float]:
    """Rates of reservations and of plain puts, in turns: with AT_ONCE in flight all the time, and of AT_ONCE
    alone (`burst`)."""
    rates: dict[str, list[float]] = {}
    cpu: dict[str, float] = {}
    requests = 0.0
    for count in [EACH] * ROUNDS + [1] * BURSTS:
        kind = "burst_" if count == 1 else ""
        round_ = _Round(scene)
        before = scene.etcd.requests()
        for what, work in (("reservations", round_.reserve), ("puts", round_.put)):
            spent = _cpu_us(scene)
            rates.setdefault(kind + what, []).append(await _rate(work, count))
            cpu[kind + what] = cpu.get(kind + what, 0) + _cpu_us(scene) - spent
            requests += (scene.etcd.requests() - before) if kind + what == "reservations" else 0
        await _rate(round_.release, count)
    found: dict[str, float] = {
        f"{name}_per_s": round(statistics.median(each)) for name, each in rates.items()}
    found |= {"etcd_requests_each": round(requests / (ROUNDS * EACH * AT_ONCE), 3),
              "ratio": round(found["reservations_per_s"] / found["puts_per_s"], 3),
              "burst_ratio": round(found["burst_reservations_per_s"] / found["burst_puts_per_s"], 3),
              "reservation_cpu_us": round(cpu["reservations"] / (ROUNDS * EACH * AT_ONCE)),
              "put_cpu_us": round(cpu["puts"] / (ROUNDS * EACH * AT_ONCE))}
    say(f"{AT_ONCE} in flight: {found['reservations_per_s']} reservations/s, {found['puts_per_s']} plain "
        f"puts/s, {found['etcd_requests_each']:.2f} requests to etcd for each; a burst of {AT_ONCE}: "
        f"{found['burst_reservations_per_s']}/s beside {found['burst_puts_per_s']}/s; CPU of each "
        f"{found['reservation_cpu_us']} and {found['put_cpu_us']} us")
    return found


def _cpu_us(scene: Scene) -> float:
    """Of everybody who takes part: coordinator, etcd, and this process."""
    child = scene.etcd.members[0].child
    assert child is not None
    return 1e6 * (cpu_seconds(scene.coordinator) + cpu_seconds(child.pid) + time.process_time())


async def _rate(work: Callable[[int], Awaitable[None]], each: int) -> float:
    """Per second, of AT_ONCE tasks that do it so many times each."""
    async def some(first: int) -> None:
        for number in range(first, first + each):
            await work(number)

    begun = now()
    async with trio.open_nursery() as nursery:
        for task in range(AT_ONCE):
            nursery.start_soon(some, task * each)
    return AT_ONCE * each / (now() - begun)


class _Round:
    """What is done, by its number: whose number it is, asks for one and gives it back."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._granted: dict[int, tuple[BenchWorker, Args]] = {}

    async def put(self, number: int) -> None:
        key = f"{FleetKeys('plain', 'bench').root}{number:06d}"
        await self._scene.store.txn(Txn(puts=(Put(key, bytes(200)),)))

    async def reserve(self, number: int) -> None:
        worker = self._scene.workers[number // EACH % WORKERS]
        self._granted[number] = worker, await worker.reserve()

    async def release(self, number: int) -> None:
        worker, granted = self._granted[number]
        await worker.release(granted)


# ---- each operation

async def _operations(scene: Scene, say: Say) -> dict[str, dict[str, float]]:
    """Costs of each operation, one at a time; `life`: of all those of one session; `watch`: of one watcher
    of the sessions meanwhile."""
    lives = _Lives(scene)
    costs: dict[str, list[dict[str, float]]] = {}
    for _ in range(LIVES):
        for op, work in lives.moves.items():
            costs.setdefault(op, []).append(await _cost(scene, work))
    found = {op: {key: sum(cost[key] for cost in of_op) / (LIVES * AT_ONCE) for key in of_op[0]}
             for op, of_op in costs.items()}
    alone = await _cost(scene, lives.all_of_them)
    prefix = FleetKeys("pooler", "bench").every_session()
    after = (await scene.store.read(prefix)).revision
    async with scene.store.watch(prefix, after=after) as changes, trio.open_nursery() as nursery:
        nursery.start_soon(_drain, changes)
        watched = await _cost(scene, lives.all_of_them)
        nursery.cancel_scope.cancel()
    found["life"] = {key: value / (LIVES * AT_ONCE) for key, value in alone.items()}
    found["watch"] = {key: max(0.0, watched[key] - alone[key]) / (LIVES * AT_ONCE) for key in alone}
    found = {op: {key: round(value, 3) for key, value in cost.items()} for op, cost in found.items()}
    for op, cost in found.items():
        say(f"{op:10} " + "  ".join(f"{key} {value:9.2f}" for key, value in cost.items()))
    return found


class _Lives:
    """AT_ONCE permits at a time, each of whose moves is made for all of them, one after another."""

    def __init__(self, scene: Scene) -> None:
        self._worker = scene.workers[0]
        self._held: list[Args] = []
        self._backend = {"address": f"127.0.0.1:{scene.server.port}", "system_identifier": "1",
                         "timeline": 1, "postmaster_start_us": 1, "in_recovery": False}
        self.moves: dict[str, Timed] = {
            "reserve": self._reserve, "connecting": self._move("connecting"),
            "open": self._move("open", pid=1, backend_start_us=1, backend=self._backend),
            "closing": self._move("closing"), "release": self._move("release", proof="eof"),
            "heartbeat": self._beat}

    async def all_of_them(self) -> None:
        """Whole lives, LIVES of AT_ONCE."""
        for _ in range(LIVES):
            for op, move in self.moves.items():
                if op != "heartbeat":
                    await move()

    async def _reserve(self) -> None:
        self._held = [await self._worker.reserve() for _ in range(AT_ONCE)]

    async def _beat(self) -> None:
        for _ in range(AT_ONCE):
            await self._worker.call("heartbeat")

    def _move(self, op: str, **more: Any) -> Timed:
        async def move() -> None:
            for granted in self._held:
                await self._worker.call(op, db=DB, permit=granted["permit"], **more)
        return move


async def _drain(changes: trio.MemoryReceiveChannel[Any]) -> None:
    async for _ in changes:
        pass


async def _cost(scene: Scene, work: Timed) -> dict[str, float]:
    """What `work` cost in all: requests of etcd and its bytes, CPU of coordinator and etcd, and time."""
    before, begun = _meters(scene), now()
    await work()
    took, after = now() - begun, _meters(scene)
    return {**{key: after[key] - before[key] for key in before}, "ms": 1000 * took}


def _meters(scene: Scene) -> dict[str, float]:
    child = scene.etcd.members[0].child
    assert child is not None
    text = _metrics(scene.etcd)
    return {
        "requests": scene.etcd.requests() + _counter(
            text, "grpc_server_msg_received_total", "LeaseKeepAlive"),
        "bytes_in": _counter(text, "etcd_network_client_grpc_received_bytes_total"),
        "bytes_out": _counter(text, "etcd_network_client_grpc_sent_bytes_total"),
        "coordinator_cpu_us": 1e6 * cpu_seconds(scene.coordinator),
        "etcd_cpu_us": 1e6 * cpu_seconds(child.pid),
    }


def _metrics(etcd: Etcd) -> str:
    with urllib.request.urlopen(f"{etcd.members[0].url}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def _counter(text: str, name: str, label: str = "") -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines()
               if line.startswith(name) and label in line)


def _part(times: list[float], part: float) -> float:
    return sorted(times)[int(len(times) * part)]


# ---- what runs

@asynccontextmanager
async def _scene() -> AsyncIterator[Scene]:
    directory = temporary_directory("bench-ledger")
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        server = _server(directory, ends)
        (directory / "etcd").mkdir()
        etcd = Etcd(directory / "etcd")
        ends.callback(etcd.kill)
        etcd.start()
        spec = make_spec(
            directory, address=f"127.0.0.1:{server.port}", endpoints=etcd.endpoints, dbname=DBNAME,
            monitor={"user": MONITOR, "password": PASSWORD}, permits=PERMITS)
        async with AsyncExitStack() as stack:
            pid = await stack.enter_async_context(coordinator(spec))
            workers = [await stack.enter_async_context(BenchWorker(index).at(spec["socket"]))
                       for index in range(WORKERS)]
            store = await stack.enter_async_context(open_etcd(etcd.endpoints))
            yield Scene(server, etcd, store, pid, workers)


def _server(directory: Path, ends: ExitStack) -> Server:
    server = Server.create(newest(), directory / "server", limits=Limits(PERMITS + 20))
    ends.callback(server.stop, immediate=True)
    server.start()
    for role in (Role(USER, PASSWORD), Role(MONITOR, PASSWORD, MONITOR_GRANTS)):
        server.create_role(role)
    server.create_database(DBNAME, USER)
    return server
