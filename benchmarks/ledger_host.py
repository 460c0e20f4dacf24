"""One host's coordinator as the ledger's benchmark drives it: a real process, with stand-ins for its
supervisor and for its workers, so that what is measured is the coordinator and nothing of a pool."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from coordinator.link import Args, Link
from pooler.demo.fleet import import_path
from pooler.demo.process import PartFailed

WAIT_SECONDS = 30.0
DB = "bench/write"


def policy_text(permits: int) -> str:
    """A policy with so many session permits."""
    return f"""
schema: dbAdmissionPolicy.v1
database: {DB}
generation: 1
serverSessionPermits: {permits}
adminReserve: 2
executionClasses:
  interactive: {{permits: {permits}, maxQueue: 1000}}
fairness: weighted-deficit-v2
"""


def make_spec(
    directory: Path, *, address: str, endpoints: list[str], dbname: str, monitor: Mapping[str, str],
    permits: int,
) -> dict[str, Any]:
    """The answer to `spec`. A lease is long, so that what is measured are the operations."""
    return {
        "fleet": "bench", "prefix": "pooler", "host": "host-a", "machine_id": "machine",
        "run_dir": str(directory), "socket": str(directory / "coordinator.sock"), "lease_ttl_seconds": 60.0,
        "etcd": {"embedded": False, "endpoints": endpoints}, "http_fd": None,
        "databases": [{"db": DB, "name": "bench", "dbname": dbname, "hosts": [address], "role": "write",
                       "policy": policy_text(permits), "monitor": dict(monitor)}],
    }


@asynccontextmanager
async def coordinator(spec: Mapping[str, Any]) -> AsyncIterator[int]:
    """A running coordinator's process id. Raises PartFailed when it does not come up."""
    ours, theirs = socket.socketpair()
    ready = trio.Event()

    async def on_spec(args: Args) -> Any:
        return dict(spec)

    async def on_ready(args: Args) -> Any:
        ready.set()

    log = Path(spec["run_dir"]) / "coordinator.log"
    process = _start(theirs, log)
    theirs.close()
    link = Link(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), {"spec": on_spec, "ready": on_ready})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        try:
            with trio.move_on_after(WAIT_SECONDS):
                await ready.wait()
            if not ready.is_set():
                raise PartFailed(f"the coordinator does not serve: {log.read_text()[-2000:]}")
            yield process.pid
        finally:
            nursery.cancel_scope.cancel()
            await _end(process)


def _start(link: socket.socket, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "coordinator.service", "--link-fd", str(link.fileno())],
            pass_fds=[link.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={**os.environ, "PYTHONPATH": import_path()})


async def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends with its link; it is killed when it does not."""
    with trio.move_on_after(WAIT_SECONDS, shield=True):
        await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    if process.poll() is None:
        process.kill()
        process.wait()


class BenchWorker:
    """A worker's end of the link: it asks, and hears nothing out."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.boot_id = secrets.token_hex(16)
        self._link: Link | None = None
        self._serves = trio.Event()

    @asynccontextmanager
    async def at(self, path: str) -> AsyncIterator[BenchWorker]:
        """Greeted, and its ledger can grant. Raises PartFailed when that does not come."""
        async def on_ledger(args: Args) -> Any:
            self._heard(args["ledger"])
            return {}

        self._link = Link(await trio.open_unix_socket(path), {"ledger": on_ledger})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._link.run)
            hello = await self.call(
                "hello", boot_id=self.boot_id, index=self.index, pid=os.getpid(), pid_start=1,
                cancel_address="", schemas=[1], requests=[], permits=[])
            self._heard(hello["ledgers"].get(DB))
            with trio.move_on_after(WAIT_SECONDS):
                await self._serves.wait()
            if not self._serves.is_set():
                raise PartFailed("the ledger is not founded")
            yield self
            nursery.cancel_scope.cancel()

    async def call(self, op: str, /, **args: Any) -> Any:
        """One operation of docs/link.md. Raises LinkRefused, LinkLost."""
        assert self._link is not None
        return await self._link.call(op, **args)

    async def reserve(self, wait_seconds: float = 10.0) -> Args:
        """One permit of a pool with more seats than there are permits."""
        answer: Args = await self.call(
            "reserve", db=DB, request_id=secrets.token_hex(8), kind="main", dbname="bench", user="bench_app",
            seats=10_000, wait_seconds=wait_seconds)
        return answer

    async def release(self, granted: Args, proof: str = "unused") -> None:
        await self.call("release", db=DB, permit=granted["permit"], proof=proof)

    def _heard(self, ledger: Any) -> None:
        if ledger and ledger["epoch"] and ledger["policy"] and ledger["state"] == "ACTIVE":
            self._serves.set()
