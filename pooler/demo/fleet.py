"""A fleet on loopback: its files, its processes, and how one waits for it, kills parts of it and ends it.

The fleet itself is `pooler fleet run -c FILE` in a process of its own, as anybody would start it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pooler.demo.process import Child, free_ports, process_ids, started_at

_PORTS_PER_KIND = 8  # room for so many workers


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to write. `more` is merged into the sections of pooler.yaml, `policy` into the policy."""

    directory: Path
    hosts: tuple[str, ...]
    dbname: str
    users: Mapping[str, str]  # name: password, as clients and as server roles
    etcd: tuple[str, ...] = ()  # endpoints; none: embedded
    monitor: tuple[str, str] | None = None
    name: str = "demo"
    workers: int = 2
    permits: int = 10
    admin_reserve: int = 1
    service_mode: str = "transaction"
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    tenants: tuple[Mapping[str, Any], ...] = ()

    @property
    def ledger(self) -> str:
        """The ledger's `db`."""
        return f"{self.dbname}-primary/write"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where this fleet listens."""

    listen: int = field(default_factory=free_ports)
    primary: int = field(default_factory=lambda: free_ports(_PORTS_PER_KIND))
    http: int = field(default_factory=free_ports)
    worker_http: int = field(default_factory=lambda: free_ports(_PORTS_PER_KIND))
    agent: int = field(default_factory=lambda: free_ports(_PORTS_PER_KIND))
    haproxy: int = field(default_factory=free_ports)


class Fleet:
    """One fleet. `write` makes its files, `start` runs it until it is ready."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.ports = Ports()
        self.config = plan.directory / "pooler.yaml"
        self.log = plan.directory / "fleet.log"
        self.run_dir = plan.directory / "run"
        self.child: Child | None = None

    def write(self) -> None:
        """pooler.yaml, the policy and the userlist."""
        directory = self.plan.directory
        (directory / "policies").mkdir(parents=True, exist_ok=True)
        self.run_dir.mkdir(mode=0o700, exist_ok=True)
        userlist = directory / "userlist.txt"
        userlist.write_text("".join(f'"{name}" "{word}"\n' for name, word in self.plan.users.items()))
        userlist.chmod(0o600)
        policy = directory / "policies" / f"{self.plan.dbname}.yaml"
        policy.write_text(yaml.safe_dump(self._policy(), sort_keys=False))
        self.config.write_text(yaml.safe_dump(self.settings(), sort_keys=False))
        self.config.chmod(0o600)

    def settings(self) -> dict[str, Any]:
        """The content of pooler.yaml."""
        plan, ports = self.plan, self.ports
        database: dict[str, Any] = {
            "hosts": list(plan.hosts), "dbname": plan.dbname, "role": "write",
            "policy": f"policies/{plan.dbname}.yaml",
        }
        if plan.monitor is not None:
            database["monitor"] = {"user": plan.monitor[0], "password": plan.monitor[1]}
        values: dict[str, Any] = {
            "fleet": {"name": plan.name, "workers": plan.workers, "listen": f"127.0.0.1:{ports.listen}",
                      "run_dir": str(self.run_dir), "proxy_protocol_from": ["127.0.0.1"]},
            "services": {"primary": {"worker_ports": ports.primary, "database_role": "write",
                                     "pool_mode": plan.service_mode, "haproxy_port": ports.haproxy}},
            "etcd": {"endpoints": list(plan.etcd)} if plan.etcd else {"embedded": True},
            "databases": {plan.dbname: database},
            "auth": {"type": "scram-sha-256", "file": "userlist.txt"},
            "pool": {"default_pool_size": plan.permits, "max_client_conn": 5000},
            "admin": {"users": ["admin"], "stats_users": ["stats"]},
            "http": {"listen": f"127.0.0.1:{ports.http}", "worker_ports": ports.worker_http,
                     "agent_ports": ports.agent},
        }
        if plan.tenants:
            values["tenants"] = [dict(entry) for entry in plan.tenants]
        for section, entries in plan.more.items():
            values.setdefault(section, {}).update(entries)
        return values

    def start(
        self, *, env: Mapping[str, str] | None = None, die_signal: signal.Signals | None = signal.SIGKILL,
        timeout_seconds: float = 60, by: Sequence[str] = (),
    ) -> None:
        """Run it and wait until the coordinator and each worker say they serve. Raises PartFailed."""
        self.launch(env=env, die_signal=die_signal, by=by)
        assert self.child is not None
        self.child.wait_until(self.is_ready, "the fleet is ready", timeout_seconds)

    def launch(
        self, *, env: Mapping[str, str] | None = None, die_signal: signal.Signals | None = signal.SIGKILL,
        by: Sequence[str] = (),
    ) -> None:
        """Run it, ready or not; `by` a command that becomes the one behind it."""
        argv: list[str | Path] = [
            *by, sys.executable, "-m", "pooler.cli.main", "fleet", "run", "-c", self.config]
        self.child = Child(argv, self.log, die_signal=die_signal,
                           env={"PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1", **(env or {})})

    def command(self, *words: str | Path, timeout_seconds: float = 90) -> subprocess.CompletedProcess[str]:
        """A `pooler` command about this fleet, as anybody would type it."""
        argv = [sys.executable, "-m", "pooler.cli.main", *map(str, words), "-c", str(self.config)]
        return subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
                              timeout=timeout_seconds, env={**os.environ, "PYTHONPATH": import_path()})

    def is_ready(self) -> bool:
        """Coordinator and all workers."""
        ports = [self.ports.http, *(self.ports.worker_http + n for n in range(self.plan.workers))]
        return all(http_status(port, "/readyz") == 200 for port in ports)

    def processes(self) -> set[int]:
        """Supervisor, coordinator, workers, and what they started."""
        return {self.child.pid} | process_ids(self.child.pid) if self.child is not None else set()

    def worker_pids(self) -> dict[int, int]:
        """Worker index: pid, as the workers themselves say on /healthz; a worker that is away is left out."""
        found = {}
        assert self.child is not None
        children = self.processes() - {self.child.pid}  # the supervisor holds every socket, but serves none
        for index in range(self.plan.workers):
            pid = listener_pid(self.ports.worker_http + index, children)
            if pid is not None:
                found[index] = pid
        return found

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_seconds: float = 60) -> set[int]:
        """End it; returns the processes that were left over (and kills them): must be none."""
        if self.child is None:
            return set()
        before = {pid: started_at(pid) for pid in self.processes()}
        self.child.stop(how, timeout_seconds)
        left = {pid for pid, started in before.items() if started and started_at(pid) == started}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left

    def _policy(self) -> dict[str, Any]:
        permits = self.plan.permits
        batch = max(1, permits // 4) if self.plan.tenants else 0
        return {
            "schema": "dbAdmissionPolicy.v1", "database": self.plan.ledger, "generation": 1,
            "serverSessionPermits": permits, "adminReserve": self.plan.admin_reserve,
            "executionClasses": {
                "interactive": {"permits": permits - batch, "maxQueue": 5000, "queueDeadline": "2m"},
            } | ({"batch": {"permits": batch, "maxQueue": 5000, "queueDeadline": "2m"}} if batch else {}),
            "fairness": "weighted-deficit-v2", **self.plan.policy,
        }


def http_get(port: int, path: str, timeout_seconds: float = 2) -> tuple[int, str]:
    """Status and body; status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_seconds) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode(errors="replace")
    except OSError:
        return 0, ""


def http_status(port: int, path: str) -> int:
    return http_get(port, path)[0]


def listener_pid(port: int, among: set[int]) -> int | None:
    """Which of these processes accepts on a loopback port: the youngest, for the others only hand it on."""
    inodes = {
        f"socket:[{words[9]}]"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if (words := line.split())[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port
    }
    holders = [pid for pid in among if inodes & _open_files(pid)]
    return max(holders, key=lambda pid: int(started_at(pid) or 0), default=None)


def _open_files(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):  # the process has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since it was listed, as connections are all the time
                found.add(os.readlink(entry))
    return found


def import_path() -> str:
    """A PYTHONPATH under which a child runs the same code as we do."""
    sources = str(Path(__file__).parent.parent.parent)
    return os.pathsep.join(place for place in (sources, os.environ.get("PYTHONPATH")) if place)
