"""The parts of the demonstration in their order: servers, fleet, HAProxy, load; and their end.

With `keep` the parts outlive the command that started them; a file says which they are, for `--stop`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from coordinator.ledger.keys import FleetKeys
from pooler.demo import schema
from pooler.demo.client import RawClient, ServerSaid
from pooler.demo.faults import environment
from pooler.demo.fleet import Fleet, FleetPlan
from pooler.demo.haproxy import HAProxy, find_program
from pooler.demo.ledgerwatch import LedgerWatch
from pooler.demo.postgres import MONITOR_GRANTS, Limits, Role, Server, newest, temporary_directory
from pooler.demo.process import PartFailed, has_ended, started_at

DBNAME = "shop"
SHOP, BATCH, MONITOR, CONSOLE = "shop_web", "batch_report", "pooler_monitor", "admin"
PASSWORDS = {SHOP: "demo-web", BATCH: "demo-batch", MONITOR: "demo-monitor", CONSOLE: "demo-admin"}
PERMITS, WORKERS = 10, 2
ADMIN_RESERVE = 2
REAPERS = 1  # the coordinator's own session at the server
RESERVED = 3  # for the monitor role where PostgreSQL has reserved_connections


@dataclass(frozen=True, slots=True)
class Process:
    """One process by its number and the time it started, so that a number used anew is not taken for it."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        return bool(self.started) and started_at(self.pid) == self.started


class Parked:
    """Superuser sessions that occupy the slots of the admin reserve while no command uses them, so that the
    server has none to spare for the fleet beyond its permits."""

    def __init__(self, server: Server, count: int, dbname: str) -> None:
        self._server, self._count, self._dbname = server, count, dbname
        self._held: list[psycopg.Connection[Any]] = []

    def park(self) -> None:
        self._held = [psycopg.connect(self._server.dsn(dbname=self._dbname), autocommit=True)
                      for _ in range(self._count)]

    def leave(self) -> None:
        """Give the slots free; their backends are gone when this returns."""
        backends = [os.pidfd_open(each.info.backend_pid) for each in self._held]
        for connection, backend in zip(self._held, backends, strict=True):
            connection.close()
            has_ended(backend, 5)
            os.close(backend)
        self._held = []

    @contextmanager
    def away(self) -> Iterator[None]:
        """While a command of the admin reserve runs."""
        self.leave()
        try:
            yield
        finally:
            self.park()


@dataclass(slots=True)
class Parts:
    """Everything that runs."""

    directory: Path
    primary: Server
    standby: Server
    fleet: Fleet
    watch: LedgerWatch
    parked: list[Parked]
    haproxy: HAProxy | None = None

    @property
    def port(self) -> int:
        """Where clients come in."""
        return self.fleet.ports.haproxy if self.haproxy is not None else self.fleet.ports.listen

    @property
    def ledger(self) -> str:
        return self.fleet.plan.ledger

    def processes(self) -> list[Process]:
        """All of them, the fleet's supervisor first."""
        children = [self.fleet.child, self.haproxy.child if self.haproxy else None,
                    self.standby.child, self.primary.child]
        return [Process(child.pid, started_at(child.pid)) for child in children if child is not None]


@contextmanager
def running(
    say: Callable[[str], None], *, keep: bool = False, fault: str | None = None
) -> Iterator[Parts]:
    """Start everything; at the end stop it, unless it is to be kept and nothing failed."""
    directory = temporary_directory("demo")
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        servers = _start_servers(directory, ends, keep)
        primary, standby = servers
        say(f"PostgreSQL {primary.installation.version}: primary on {primary.port}, streaming standby on "
            f"{standby.port}; {primary.limits.ordinary} ordinary slots: {PERMITS} for the fleet, "
            f"{ADMIN_RESERVE} for its commands, {REAPERS} for its reaper")
        parked = [Parked(server, ADMIN_RESERVE, DBNAME) for server in servers]
        for each in parked:
            each.park()
            ends.callback(each.leave)
        fleet = _start_fleet(directory, servers, ends, keep, fault)
        say(f"fleet: {WORKERS} workers, coordinator and etcd; {PERMITS} session permits")
        parts = Parts(directory, primary, standby, fleet, _watch(fleet), parked)
        parts.haproxy = _start_haproxy(parts, ends, keep)
        say(f"HAProxy on {parts.port}" if parts.haproxy else
            f"no haproxy on PATH: clients come in by the fleet's own port {parts.port}")
        yield parts
        if keep:
            _remember(parts)
            for each in parked:
                each.leave()
            ends.pop_all()


def stop_kept() -> list[str]:
    """End what an earlier `--keep` left running. Returns what was said about it; empty: there was nothing."""
    path = _kept_file()
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    how = {0: signal.SIGTERM}
    for number, (pid, started) in enumerate(kept["processes"]):
        process = Process(pid, started)
        if process.is_alive():
            _end(process, how.get(number, signal.SIGINT))
    shutil.rmtree(kept["directory"], ignore_errors=True)
    path.unlink()
    return [f"stopped the demonstration of {kept['directory']}"]


def is_kept() -> bool:
    """Is one still running?"""
    return _kept_file().exists()


def _start_servers(directory: Path, ends: ExitStack, keep: bool) -> tuple[Server, Server]:
    installation = newest()
    limits = Limits.exact(PERMITS, ADMIN_RESERVE + REAPERS,
                          reserved=RESERVED if installation.version >= 16 else 0)
    die = None if keep else signal.SIGQUIT
    primary = Server.create(installation, directory / "primary", limits=limits, settings=schema.SETTINGS,
                            die_signal=die)
    ends.callback(primary.stop, immediate=True)
    primary.start()
    for role in (Role(SHOP, PASSWORDS[SHOP]), Role(BATCH, PASSWORDS[BATCH]),
                 Role(MONITOR, PASSWORDS[MONITOR], MONITOR_GRANTS)):
        primary.create_role(role)
    primary.create_database(DBNAME, SHOP)
    schema.create_schema(primary, DBNAME)
    standby = primary.standby(directory / "standby")
    ends.callback(standby.stop, immediate=True)
    standby.start()
    return primary, standby


def _start_fleet(
    directory: Path, servers: Sequence[Server], ends: ExitStack, keep: bool, fault: str | None
) -> Fleet:
    fleet = Fleet(FleetPlan(
        directory / "fleet", tuple(f"127.0.0.1:{server.port}" for server in servers), DBNAME,
        {name: PASSWORDS[name] for name in (SHOP, BATCH, CONSOLE)},
        monitor=(MONITOR, PASSWORDS[MONITOR]), workers=WORKERS, permits=PERMITS,
        admin_reserve=ADMIN_RESERVE,
        more={"etcd": {"lease_ttl": "2s"}, "failover": {"drain_timeout": "10s"}},
        tenants=({"match": {"user": "batch_*"}, "tenant": "batch", "class": "batch"},
                 {"match": {"user": "shop_*"}, "tenant": "shop", "class": "interactive"}),
    ))
    fleet.write()
    ends.callback(fleet.stop)
    fleet.start(env=environment(fault, directory), die_signal=None if keep else signal.SIGKILL)
    return fleet


def _watch(fleet: Fleet) -> LedgerWatch:
    """On the embedded etcd, whose port the coordinator writes down in its run directory."""
    [ports] = fleet.run_dir.rglob("etcd-ports.json")
    endpoint = f"127.0.0.1:{json.loads(ports.read_text())['client']}"
    watch = LedgerWatch(endpoint, FleetKeys("pooler", fleet.plan.name), fleet.plan.ledger)
    watch.start()
    return watch


def _start_haproxy(parts: Parts, ends: ExitStack, keep: bool) -> HAProxy | None:
    if find_program("haproxy") is None:
        return None
    rendered = parts.fleet.command("haproxy", "render")
    if rendered.returncode != 0:
        raise PartFailed(f"pooler haproxy render: {rendered.stderr.strip()}")
    haproxy = HAProxy(parts.directory, rendered.stdout, [parts.fleet.ports.haproxy])
    ends.callback(haproxy.stop)
    haproxy.start(die_signal=None if keep else signal.SIGKILL)
    assert haproxy.child is not None
    haproxy.child.wait_until(lambda: _lets_in(parts.fleet.ports.haproxy), "a client logs in through HAProxy")
    return haproxy


def _lets_in(port: int) -> bool:
    try:
        with RawClient("127.0.0.1", port, 5) as client:
            return client.login(SHOP, PASSWORDS[SHOP], DBNAME).query("SELECT 1") == [["1"]]
    except (OSError, ServerSaid, EOFError):
        return False


def _remember(parts: Parts) -> None:
    path = _kept_file()
    path.write_text(json.dumps({
        "directory": str(parts.directory),
        "processes": [[each.pid, each.started] for each in parts.processes()]}))
    path.chmod(0o600)


def _kept_file() -> Path:
    return Path(tempfile.gettempdir()) / f"pooler-demo-{os.getuid()}.json"


def _end(process: Process, how: signal.Signals) -> None:
    """Ask it, wait up to a minute, kill it. It is not our child."""
    watched = os.pidfd_open(process.pid)
    try:
        signal.pidfd_send_signal(watched, how)
        if not has_ended(watched, 60):
            signal.pidfd_send_signal(watched, signal.SIGKILL)
    finally:
        os.close(watched)
