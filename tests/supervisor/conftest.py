"""A running fleet of small children, watched through its log, its control socket and its ports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml

from pooler.demo.process import free_ports
from pooler.supervise.control import reach_fleet

RUN_FLEET = Path(__file__).with_name("run_fleet.py")
SOURCES = RUN_FLEET.parents[2]
FACT_SECONDS_MAX = 20


class SmallFleet:
    """Its folder, its config, and a process of the supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.services, self.http = free_ports(1), free_ports(4), free_ports(9)
        self.config = folder / "pooler.yaml"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.log: list[dict[str, Any]] = []
        (folder / "policy.yaml").write_text("schema: dbAdmissionPolicy.v1\ndatabase: d/write\n")
        self.write()

    def write(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "fleet": {
                "name": "small",
                "workers": 2,
                "listen": f"127.0.0.1:{self.port}",
                "drain_timeout": "5s",
                "run_dir": str(self.folder / "run"),
                "unix_socket_dir": str(self.folder),
            },
            "services": {"primary": {"worker_ports": self.services, "database_role": "write"}},
            "etcd": "embedded",
            "databases": {"d": {"hosts": ["127.0.0.1:1"], "policy": "policy.yaml"}},
            "auth": {"type": "trust"},
            "http": {
                "listen": f"127.0.0.1:{self.http}",
                "worker_ports": self.http + 1,
                "agent_ports": self.http + 5,
            },
        }
        for section, entries in changes.items():
            values.setdefault(section, {}).update(entries)
        self.config.write_text(yaml.safe_dump(values))

    @property
    def pid(self) -> int:
        return self.processes[-1].pid

    def start(self, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, str(RUN_FLEET), str(self.config)],
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": str(SOURCES), **env},
        )
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self.processes.append(process)
        self._rest = b""
        return process

    async def saw(self, event: str, **matching: Any) -> dict[str, Any]:
        """The next log line with this event and these values; lines before it are kept in `log`."""
        with trio.fail_after(FACT_SECONDS_MAX):
            while True:
                line = await self.read_line()
                assert line is not None, f"the fleet ended without {event} {matching}: {self.log}"
                if line.get("event") == event and all(line.get(k) == v for k, v in matching.items()):
                    return line

    async def read_line(self) -> dict[str, Any] | None:
        """None once every process that holds the log has ended."""
        stderr = self.processes[-1].stderr
        assert stderr is not None
        while b"\n" not in self._rest:
            await trio.lowlevel.wait_readable(stderr)
            data = os.read(stderr.fileno(), 65_536)
            if not data:
                return None
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\n")
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError:
            line = {"text": text.decode()}
        self.log.append(line)
        return line

    async def ended(self) -> int:
        """Wait until the supervisor and all that inherited its log have ended; its exit code."""
        with trio.fail_after(FACT_SECONDS_MAX):
            while await self.read_line() is not None:
                pass
        return self.processes[-1].wait(timeout=FACT_SECONDS_MAX)

    async def up(self, **env: str) -> None:
        self.start(**env)
        await self.saw("fleet_started")

    async def command(self, op: str, **args: Any) -> Any:
        """Over the control socket."""
        with trio.fail_after(FACT_SECONDS_MAX):
            async with reach_fleet(self.folder / "run/control.sock") as link:
                return await link.call(op, **args)

    async def rows(self) -> dict[str, dict[str, Any]]:
        """The serving process of each place, by name."""
        found = (await self.command("status"))["processes"]
        return {row["name"]: row for row in found if row["state"] != "retiring"}

    async def pid_of(self, name: str) -> int:
        return int((await self.rows())[name]["pid"])

    @asynccontextmanager
    async def client(self, port: int | None = None) -> AsyncIterator[int]:
        """A connected client; the pid of the worker that answered."""
        with trio.fail_after(FACT_SECONDS_MAX):
            stream = await trio.open_tcp_stream("127.0.0.1", port or self.port)
            answer = await stream.receive_some(100)
        async with stream:
            yield int(answer)

    def told(self, what: str) -> list[Any]:
        """What the children wrote down."""
        file = self.folder / "told"
        lines = file.read_text().splitlines() if file.exists() else []
        return [value for kind, value in map(json.loads, lines) if kind == what]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(timeout=FACT_SECONDS_MAX)
            if process.stderr is not None:
                process.stderr.close()


MakeSmallFleet = Callable[[], SmallFleet]


@pytest.fixture
def small_fleet() -> Iterator[SmallFleet]:
    folder = Path(tempfile.mkdtemp(prefix="pf"))  # short: unix sockets have 107 bytes
    fleet = SmallFleet(folder)
    yield fleet
    fleet.close()
    shutil.rmtree(folder)


@pytest.fixture
def notified() -> Iterator[tuple[str, socket.socket]]:
    """Where systemd would listen: (address, socket)."""
    folder = tempfile.mkdtemp(prefix="pn")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"{folder}/notify")
        listener.settimeout(FACT_SECONDS_MAX)
        yield f"{folder}/notify", listener
    shutil.rmtree(folder)
