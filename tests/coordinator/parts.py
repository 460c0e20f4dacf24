"""A coordinator process with a stand-in supervisor and stand-in workers, for tests with real parts."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import trio

from coordinator.ledger.record import Permit
from coordinator.link import Args, Link
from coordinator.link_values import parse_permit, permit_list

DB = "shop/write"
WAIT_SECONDS = 30.0


def policy_text(slots: int = 4, admin: int = 1, db: str = DB) -> str:
    """A valid policy document."""
    return f"""
schema: dbAdmissionPolicy.v1
database: {db}
generation: 1
serverSessionPermits: {slots}
adminReserve: {admin}
executionClasses:
  interactive: {{permits: {slots}, maxQueue: 100}}
fairness: weighted-deficit-v2
"""


def make_spec(
    run_dir: Path, *, hosts: list[str], endpoints: list[str] | None = None, prefix: str = "test",
    dbname: str = "postgres", monitor: dict[str, str] | None = None, slots: int = 4, ttl_seconds: float = 2.0,
) -> dict[str, Any]:
    """The answer to `spec`; without endpoints: embedded etcd."""
    return {
        "fleet": "fleet", "prefix": prefix, "host": "host-a", "machine_id": "machine",
        "run_dir": str(run_dir), "socket": str(run_dir / "coordinator.sock"),
        "lease_ttl_seconds": ttl_seconds,
        "etcd": {"embedded": endpoints is None, "endpoints": endpoints or []},
        "http_fd": None, "reconcile": "observe", "unknown_terminate_after_seconds": 60.0,
        "databases": [{"db": DB, "name": "shop", "dbname": dbname, "hosts": hosts, "role": "write",
                       "policy": policy_text(slots), "monitor": monitor}],
    }


@dataclass
class Supervisor:
    """The stand-in supervisor's end of one coordinator process."""

    process: subprocess.Popen[bytes]
    link: Link
    socket_path: str
    ready: trio.Event

    async def serving(self) -> None:
        with trio.fail_after(WAIT_SECONDS):
            await self.ready.wait()


def _start(spec: dict[str, Any], link: socket.socket) -> subprocess.Popen[bytes]:
    inherited = [link.fileno(), *([spec["http_fd"]] if spec["http_fd"] else [])]
    with open(Path(spec["run_dir"]) / "coordinator.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "coordinator.service", "--link-fd", str(link.fileno())],
            pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


@asynccontextmanager
async def coordinator(spec: dict[str, Any]) -> AsyncIterator[Supervisor]:
    """A running `python -m coordinator.service`; ended by the end of its supervisor's link."""
    ours, theirs = socket.socketpair()
    process = _start(spec, theirs)
    theirs.close()
    ready = trio.Event()

    async def on_spec(args: Args) -> Any:
        return spec

    async def on_ready(args: Args) -> Any:
        ready.set()

    link = Link(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), {"spec": on_spec, "ready": on_ready})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        try:
            yield Supervisor(process, link, spec["socket"], ready)
        finally:
            nursery.cancel_scope.cancel()
            with trio.move_on_after(WAIT_SECONDS, shield=True):
                await trio.to_thread.run_sync(process.wait)
            if process.poll() is None:
                process.kill()
                raise AssertionError("the coordinator outlived its supervisor's link")


@dataclass
class Worker:
    """A stand-in worker: says hello and keeps what it is told."""

    boot_id: str = field(default_factory=lambda: secrets.token_hex(16))
    index: int = 0
    link: Link | None = None
    permits: dict[tuple[str, Permit], str] = field(default_factory=dict)
    told: list[tuple[str, Args]] = field(default_factory=list)
    ledgers: dict[str, Any] = field(default_factory=dict)
    news: trio.Event = field(default_factory=trio.Event)
    answers: dict[str, Any] = field(default_factory=dict)

    async def hello(self, **more: Any) -> Args:
        answer: Args = await self.call(
            "hello", boot_id=self.boot_id, index=self.index, pid=os.getpid(), pid_start=1,
            cancel_address="", schemas=[1], requests=[], **more,
            permits=[{"db": db, "permit": permit_list(permit), "state": state}
                     for (db, permit), state in self.permits.items()])
        self.ledgers = answer["ledgers"]
        return answer

    async def call(self, op: str, /, **args: Any) -> Any:
        assert self.link is not None
        return await self.link.call(op, **args)

    async def reserve(
        self, wait_seconds: float = 0.0, *, db: str = DB, seats: int = 10, user: str = "app",
        request_id: str = "",
    ) -> Args:
        answer: Args = await self.call(
            "reserve", db=db, request_id=request_id or secrets.token_hex(8), kind="main", dbname="app",
            user=user, seats=seats, wait_seconds=wait_seconds)
        self.permits[db, parse_permit(answer["permit"])] = "SESSION_RESERVED"
        return answer

    async def release(self, permit: list[Any], proof: str = "unused", *, db: str = DB) -> bool:
        answer = await self.call("release", db=db, permit=permit, proof=proof)
        self.permits.pop((db, parse_permit(permit)), None)
        return bool(answer["released"])

    def told_of(self, op: str) -> list[Args]:
        """The arguments of every `op` it was told."""
        return [args for each, args in self.told if each == op]

    async def until(self, holds: Callable[[Worker], bool]) -> None:
        """Waits until what was told makes it so."""
        with trio.fail_after(WAIT_SECONDS):
            while not holds(self):
                await self.news.wait()
                self.news = trio.Event()

    def _handler(self, op: str) -> Callable[[Args], Any]:
        async def handler(args: Args) -> Any:
            self.told.append((op, args))
            if op == "ledger":
                self.ledgers[args["db"]] = args["ledger"]
            self.news.set()
            answer = self.answers.get(op, {})
            return answer(args) if callable(answer) else answer
        return handler

    @asynccontextmanager
    async def linked(self, stream: trio.abc.Stream) -> AsyncIterator[Worker]:
        """Linked over `stream` within the block."""
        ops = ("ledger", "permit_unknown", "permit_gone", "shed", "spare", "cancel", "show", "command",
               "recover", "moved", "retire", "share")
        self.link = Link(stream, {op: self._handler(op) for op in ops})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.link.run)
            try:
                yield self
            finally:
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def at(self, path: str) -> AsyncIterator[Worker]:
        """Linked to the coordinator's socket, and greeted."""
        async with self.linked(await trio.open_unix_socket(path)):
            with trio.fail_after(WAIT_SECONDS):
                await self.hello()
            await self.until(lambda w: serves(w.ledgers.get(DB)))
            yield self


def serves(ledger: Any) -> bool:
    """A ledger that can grant."""
    return bool(ledger and ledger["reachable"] and ledger["epoch"] and ledger["policy"]
                and ledger["state"] == "ACTIVE")


def open_session(dsn: str, tag: str) -> tuple[psycopg.Connection[Any], int, int, dict[str, Any]]:
    """A real session with a birth tag: (connection, pid, backend_start µs, backend)."""
    connection = psycopg.connect(dsn, application_name=tag, autocommit=True)
    row = connection.execute("""
        SELECT pg_backend_pid(), round(extract(epoch FROM backend_start) * 1000000)::bigint,
               (SELECT system_identifier::text FROM pg_control_system()),
               (SELECT timeline_id FROM pg_control_checkpoint()),
               round(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint, pg_is_in_recovery()
          FROM pg_stat_activity WHERE pid = pg_backend_pid()""").fetchone()
    assert row is not None
    backend = {"address": f"{connection.info.host}:{connection.info.port}", "system_identifier": row[2],
               "timeline": row[3], "postmaster_start_us": row[4], "in_recovery": row[5]}
    return connection, row[0], row[1], backend


def log_events(run_dir: Path) -> list[dict[str, Any]]:
    """The coordinator's log lines so far."""
    text = (run_dir / "coordinator.log").read_text()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


async def until_logged(run_dir: Path, event: str, **values: Any) -> dict[str, Any]:
    """Waits for a log line with this event and these values."""
    with trio.fail_after(WAIT_SECONDS):
        while True:
            for line in log_events(run_dir):
                if line["event"] == event and values.items() <= line.items():
                    return line
            await trio.sleep(0.02)  # noqa: TID251 - another process's log: nothing tells when it grows
