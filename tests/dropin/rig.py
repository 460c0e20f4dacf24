"""One ini played on the drop-in or on Debian's PgBouncer: the same files, the same psql."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pooler.demo.fleet import import_path
from pooler.demo.process import free_ports, process_ids
from tests.dropin.oracle import PGBOUNCER, as_ordinary_user

READY_SECONDS_MAX = 60.0  # of a loaded machine; the bound of a quiet one has a test of its own
OURS, THEIRS = "pooler", "pgbouncer"


@dataclass
class Played:
    """`side` is OURS or THEIRS. The ini's own lines go before `[pgbouncer]`'s that every test needs."""

    side: str
    folder: Path
    databases: str
    settings: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)  # of the userlist
    more: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_ports)
    child: subprocess.Popen[str] | None = None

    @property
    def ini(self) -> Path:
        return self.folder / "test.ini"

    @property
    def log(self) -> str:
        path = self.folder / "test.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def socket(self) -> Path:
        return self.folder / f".s.PGSQL.{self.port}"

    def write(self, **changed: str) -> None:
        """The ini, with settings changed, and the userlist."""
        values = {
            "listen_addr": "127.0.0.1", "listen_port": str(self.port), "unix_socket_dir": str(self.folder),
            "auth_type": "trust", "auth_file": "userlist.txt", "logfile": "test.log", "pidfile": "test.pid",
            **self.settings, **changed,
        }
        lines = ["[databases]", self.databases, self.more, "[pgbouncer]"]
        lines += [f"{key} = {value}" for key, value in values.items()]
        self.ini.write_text("\n".join(lines) + "\n")
        (self.folder / "userlist.txt").write_text(
            "".join(f'"{name}" "{secret}"\n' for name, secret in self.users.items()))
        if self.side == THEIRS:
            as_ordinary_user(self.folder)
            for path in (self.folder, *self.folder.iterdir()):
                if not path.is_socket():
                    path.chmod(0o777 if path.is_dir() else 0o666)

    def argv(self, *options: str) -> list[str]:
        if self.side == THEIRS:
            return [str(PGBOUNCER), *options, self.ini.name]
        return [sys.executable, "-m", "pooler.cli.main", "pgbouncer", *options, self.ini.name]

    def account(self) -> dict[str, Any]:
        return as_ordinary_user() if self.side == THEIRS else {}

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("POOLER_", "PG"))}
        return {**kept, "PYTHONPATH": import_path(), **self.environ}

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            self.argv(*options), cwd=self.folder, capture_output=True, text=True, check=False, timeout=60,
            env=self.environment(), **self.account())

    def launch(self, *options: str) -> None:
        self.child = subprocess.Popen(
            self.argv("-q", *options), cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment(), **self.account())

    def start(self, *options: str) -> None:
        """Run it until the console answers."""
        self.write()
        self.launch(*options)
        self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while self.console("show version").returncode:
            ended = self.child is not None and self.child.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{self.side} is not ready\n{self.log[-3000:]}\n{self.output()}")
            time.sleep(0.05)  # noqa: TID251 - another process starts

    def output(self) -> str:
        if self.child is None or self.child.stdout is None or self.child.poll() is None:
            return ""
        return self.child.stdout.read()

    def psql(
        self, dbname: str, user: str, *commands: str, host: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """The real psql, over TCP unless `host` is a directory; VERBOSITY verbose shows SQLSTATEs."""
        argv = ["psql", "-X", "-At", "-F", "|", "-v", "VERBOSITY=verbose", "-h", host or "127.0.0.1",
                "-p", str(self.port), "-U", user, "-d", dbname]
        for command in commands:
            argv += ["-c", command]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60,
                              stdin=subprocess.DEVNULL, env={**self.environment(), **environment},
                              **self.account())

    def console(self, *commands: str, user: str = "pgbouncer") -> subprocess.CompletedProcess[str]:
        """The console over the unix socket, as the user whom the pooler runs as."""
        return self.psql("pgbouncer", user, *commands, host=str(self.folder))

    def signal(self, number: signal.Signals) -> None:
        assert self.child is not None
        self.child.send_signal(number)

    def wait_end(self, seconds: float = 30) -> int:
        assert self.child is not None
        try:
            return self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.side} has not ended\n{self.log[-6000:]}") from None

    def stop(self) -> None:
        """Kill what is left of it."""
        if self.child is None:
            return
        below = process_ids(self.child.pid)
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGQUIT)
            if self.side == THEIRS:
                self.child.send_signal(signal.SIGTERM)  # before 1.23 that is the one that ends it at once
            try:
                self.child.wait(20)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()
        for pid in below:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def settled(path: Path) -> None:
    """Remove what a test left in a folder that another user owns."""
    shutil.rmtree(path, ignore_errors=True)
