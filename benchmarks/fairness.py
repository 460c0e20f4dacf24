"""Shares of real clients where more is wanted than there is: by weight, wherever the clients are.

Two tenants want all permits of a class for the whole run. Their transactions sleep at the server, half to
one and a half times as long as is said of them, so that what is shared out is permits and not this machine's
processors, and no two keep step. Counted is what they finished, and in how many permits a transaction was
under way meanwhile.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Target, Void, finished, logged, now, started
from pooler.demo.client import RawClient
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import Fleet, FleetPlan
from pooler.demo.postgres import MONITOR_GRANTS, Limits, Role, Server, newest, temporary_directory
from pooler.demo.process import free_ports

DBNAME, USER, MONITOR, PASSWORD = "bench", "bench_app", "bench_monitor", "bench-password"
PERMITS = 12  # of the class
WORKERS = 2
HOSTS = ("127.0.0.1", "127.0.0.2")
SECONDS = 28
SETTLED_SECONDS = 3.0  # from when on it is looked at how many are busy
LIGHT, FLOOD_CLIENTS, FLOOD_MS = "light", 2_000, 40.0
HEAVY = "heavy"
_PAUSE = threading.Event()  # never set

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients of one tenant at one port of one host, with transactions of so many milliseconds.
    `worker`: at this one's port, else at the fleet's. `even`: each as long as the other."""

    tenant: str
    clients: int
    ms: float = 10.0
    host: int = 0
    worker: int | None = None
    even: bool = False

    @property
    def script(self) -> str:
        """For pgbench."""
        shortest, longest = (1_000, 1_000) if self.even else (500, 1_500)
        return (f"\\set us random({self.ms * shortest:.0f}, {self.ms * longest:.0f})\n"
                "select pg_sleep(:us / 1000000.0);\n")


@dataclass(frozen=True, slots=True)
class Case:
    """Two tenants with their weights, and where their clients are."""

    name: str
    weights: tuple[int, int]
    loads: Sequence[Load]
    hosts: int = 1
    seconds: int = SECONDS

    @property
    def wanted(self) -> float:
        """The first one's part of what is finished."""
        return self.weights[0] / sum(self.weights)


CASES = (
    Case("a worker each", (3, 1), (Load(HEAVY, 40, worker=0), Load(LIGHT, 40, worker=1))),
    Case("a host each", (3, 1), (Load(HEAVY, 40), Load(LIGHT, 40, host=1)), hosts=2),
    Case("transactions 20 times longer", (3, 1), (Load(HEAVY, 60, ms=40.0), Load(LIGHT, 60, ms=2.0)),
         seconds=75),
    Case("9 clients to 1", (1, 1), (Load(HEAVY, 180), Load(LIGHT, 20))),
)


def shares(say: Say) -> dict[str, Any]:
    """The result document. Raises PartFailed when a part is missing, Void when a client failed."""
    began = now()
    found: dict[str, Any] = {}
    with _server() as server:
        for case in CASES:
            found[case.name] = one = _run(case, server)
            say(f"{case.name}: {one['finished']} finished, {one['part']:.4f} of them {HEAVY} "
                f"(weights {case.weights[0]}:{case.weights[1]}), {one['busy']:.1%} of permits busy")
        found["flood"] = flood = _flood(server)
        say(f"a flood of {FLOOD_CLIENTS}: p99 wait of {LIGHT} {flood['quiet_p99_ms']:.1f} ms before, "
            f"{flood['p99_ms']:.1f} ms in it; a transaction takes {FLOOD_MS:g} ms")
    cases = [found[case.name] for case in CASES]
    return {"cases": found, "permits": PERMITS,
            "worst_off": max(each["off"] for each in cases),
            "least_finished": min(each["finished"] for each in cases),
            "most_busy": max(each["busy"] for each in cases),
            "least_busy": min(each["busy"] for each in cases),
            "flood_moves": round(flood["moved_ms"] / FLOOD_MS, 3), "seconds": round(now() - began, 1)}


def _run(case: Case, server: Server) -> dict[str, Any]:
    done = {HEAVY: 0, LIGHT: 0}
    with (_fleets(server, case.hosts, dict(zip(done, case.weights, strict=True))) as here,
          ExitStack() as ends):
        runs = [ends.enter_context(here.started(load, case.seconds, log=f"load{at}"))
                for at, load in enumerate(case.loads)]
        busy = here.busy(case.seconds)
        for run in runs:
            finished(run)
        logs = [(load.tenant, logged(here.directory / f"load{at}")) for at, load in enumerate(case.loads)]
    # pgbench is a while about its connects, and what the last of them finish they have to themselves
    first = max(min(each.at for each in log) for _, log in logs) + SETTLED_SECONDS
    last = min(max(each.at for each in log) for _, log in logs) - SETTLED_SECONDS
    for tenant, log in logs:
        done[tenant] += sum(first <= each.at <= last for each in log)
    total = sum(done.values())
    part = done[HEAVY] / total
    return {"finished": total, "by_tenant": done, "part": round(part, 4),
            "off": round(abs(part / case.wanted - 1), 4), "busy": round(busy, 4)}


def _flood(server: Server) -> dict[str, Any]:
    """What a light tenant waits, alone and beside a flood of another's."""
    seconds = 15
    with _fleets(server, 1, {HEAVY: 1, LIGHT: 1}) as here:
        rate = ("-R", "20")
        with here.started(Load(LIGHT, 16, FLOOD_MS, even=True), seconds, *rate, log="quiet") as run:
            finished(run)
        with here.started(Load(HEAVY, FLOOD_CLIENTS, FLOOD_MS), 10 * seconds):  # it is killed at the end
            here.await_waiting(FLOOD_CLIENTS // 2)
            with here.started(Load(LIGHT, 16, FLOOD_MS, even=True), seconds, *rate, log="flooded") as run:
                finished(run)
            here.await_waiting(FLOOD_CLIENTS // 2)
        before, meanwhile = (here.wait_p99_ms(name) for name in ("quiet", "flooded"))
    return {"quiet_p99_ms": before, "p99_ms": meanwhile, "moved_ms": round(meanwhile - before, 2)}


@dataclass(slots=True)
class _Fleets:
    """One fleet's hosts, and what is asked of them."""

    directory: Path
    fleets: list[Fleet]
    addresses: Sequence[str] = HOSTS
    _scripts: dict[float, Path] = field(default_factory=dict)

    def started(
        self, load: Load, seconds: int, *more: str, log: str = ""
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        """pgbench; `log`: the name of its log of latencies."""
        fleet = self.fleets[load.host]
        port = fleet.ports.listen if load.worker is None else fleet.ports.primary + load.worker
        address = self.addresses[load.host] if load.worker is None else "127.0.0.1"
        script = self.directory / f"{load.tenant}-{load.ms:g}.sql"
        script.write_text(load.script)
        arguments = ["-f", str(script), "-c", str(load.clients), "-j", "1", "-T", str(seconds), *more]
        if log:
            arguments += ["-l", "--log-prefix", str(self.directory / log)]
        return started(Target("pooler", port, USER, PASSWORD, DBNAME), arguments, PGHOST=address,
                       PGAPPNAME=load.tenant)

    def _executing(self, column: str) -> int:
        found = 0
        for fleet, address in zip(self.fleets, self.addresses, strict=False):
            with RawClient(address, fleet.ports.listen).login("stats", PASSWORD, "pooler") as console:
                names, rows = console.table("SHOW CLASSES")
            found += sum(int(row[names.index(column)] or 0) for row in rows)
        return found

    def busy(self, seconds: int) -> float:
        """The part of permits that a transaction was under way in, over a run of so many seconds."""
        began, looks = now(), list[int]()
        while (at := now() - began) < seconds - 1:
            if at > SETTLED_SECONDS:
                looks.append(self._executing("executing"))
            _PAUSE.wait(0.1)
        return statistics.mean(looks) / PERMITS

    def await_waiting(self, count: int) -> None:
        """Raises Void if they never wait."""
        deadline = now() + 30
        while self._executing("waiting") < count:
            if now() > deadline:
                raise Void(f"not {count} of the flood came to wait")
            _PAUSE.wait(0.1)

    def wait_p99_ms(self, log: str) -> float:
        """Of a log of latencies: what was waited beside the transaction itself."""
        latencies = sorted(each.latency_ms for each in logged(self.directory / log))
        if len(latencies) < 100:
            raise Void(f"only {len(latencies)} transactions")
        return round(latencies[int(len(latencies) * 0.99)] - FLOOD_MS, 2)


@contextmanager
def _server() -> Iterator[Server]:
    directory = temporary_directory("fairness")
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        server = Server.create(newest(), directory / "server", limits=Limits(120))
        ends.callback(server.stop, immediate=True)
        server.start()
        for role in (Role(USER, PASSWORD), Role(MONITOR, PASSWORD, MONITOR_GRANTS)):
            server.create_role(role)
        server.create_database(DBNAME, USER)
        yield server


@contextmanager
def _fleets(server: Server, hosts: int, weights: dict[str, int]) -> Iterator[_Fleets]:
    """A fleet on so many hosts. As many sessions as any worker may need: it is permits that are short."""
    directory = temporary_directory("fairness-fleet")
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        (directory / "etcd").mkdir()
        etcd = Etcd(directory / "etcd")
        ends.callback(etcd.kill)
        etcd.start()
        fleets = []
        for at, address in enumerate(HOSTS[:hosts]):
            port = free_ports()
            fleet = Fleet(FleetPlan(
                directory / f"host{at}", (f"127.0.0.1:{server.port}",), DBNAME,
                {USER: PASSWORD, "stats": PASSWORD}, tuple(etcd.endpoints), (MONITOR, PASSWORD), name="fair",
                workers=WORKERS, permits=4 * PERMITS, admin_reserve=2,
                more={"fleet": {"listen": f"{address}:{port}", "host_name": f"host{at}",
                                "proxy_protocol_from": []},
                      "pool": {"default_pool_size": 4 * PERMITS, "query_wait_timeout": "0s"}},
                tenants=tuple({"match": {"application_name": name}, "tenant": name} for name in weights),
                policy={"executionClasses": {"interactive": {
                            "permits": PERMITS, "maxQueue": 10_000, "queueDeadline": "10m"}},
                        "tenants": {name: {"weight": weight} for name, weight in weights.items()}}))
            object.__setattr__(fleet.ports, "listen", port)
            fleet.write()
            ends.callback(fleet.stop)
            fleet.start()
            fleets.append(fleet)
        yield _Fleets(directory, fleets)
