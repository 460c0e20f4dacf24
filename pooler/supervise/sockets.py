"""The fleet's listening sockets: opened once, before any child, and inherited by every child by number.

They stay open here while children come and go, so a connection that arrives meanwhile waits in the backlog.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from pooler.errors import PoolerError
from pooler.settings import Address, Settings


class PortRefused(PoolerError):
    """An address of the config cannot be listened on."""


class FleetSockets:
    """All of them. Workers share `listen` and `unix`; each has its own of the others."""

    def __init__(self) -> None:
        self.listen: list[socket.socket] = []
        self.unix: list[socket.socket] = []
        self.services: list[dict[str, socket.socket]] = []
        self.http: list[socket.socket] = []
        self.agent: list[socket.socket] = []
        self.coordinator_http: socket.socket | None = None
        self._paths: list[Path] = []

    @classmethod
    def open(
        cls, settings: Settings, taken_over: tuple[list[socket.socket], list[socket.socket]] | None = None
    ) -> FleetSockets:
        """`taken_over`: the shared ones and the unix ones of a process that hands them over, instead of new
        ones. Raises PortRefused, naming the setting and the address; then nothing stays open."""
        sockets = cls()
        if taken_over is not None:
            sockets.listen, sockets.unix = taken_over
        try:
            sockets._open(settings)
        except BaseException:
            sockets.close()
            raise
        return sockets

    def _open(self, settings: Settings) -> None:
        fleet, http, backlog = settings.fleet, settings.http, settings.fleet.listen_backlog
        if not (self.listen or self.unix):
            self.listen = [_listen_tcp("fleet.listen", address, backlog, shared=fleet.reuse_port)
                           for address in fleet.listen]
        self.coordinator_http = _listen_tcp("http.listen", http.listen, backlog)
        for index in range(fleet.workers):
            host = fleet.host_for_workers
            own: dict[str, socket.socket] = {}
            self.services.append(own)
            for name, service in settings.services.items():
                address = Address(host, service.worker_ports + index)
                own[name] = _listen_tcp(f"services.{name}.worker_ports", address, backlog)
            address = Address(http.listen.host, http.worker_ports + index)
            self.http.append(_listen_tcp("http.worker_ports", address, backlog))
            address = Address(host, http.agent_ports + index)
            self.agent.append(_listen_tcp("http.agent_ports", address, backlog))
        if (path := fleet.unix_socket) is not None:
            group = fleet.unix_socket_group
            if not self.unix:
                self.unix.append(_listen_unix(path, fleet.unix_socket_mode, group, backlog))
            self._paths.append(path)

    def for_worker(self, index: int) -> dict[str, object]:
        """The numbers a worker is told (docs/link.md)."""
        return {
            "listen": [each.fileno() for each in self.listen],
            "services": {name: each.fileno() for name, each in self.services[index].items()},
            "unix": [each.fileno() for each in self.unix],
            "http": self.http[index].fileno(),
            "agent": self.agent[index].fileno(),
        }

    def descriptors_of_worker(self, index: int) -> list[int]:
        """What a worker inherits."""
        own = [*self.listen, *self.unix, *self.services[index].values(), self.http[index], self.agent[index]]
        return [each.fileno() for each in own if each.fileno() >= 0]

    def descriptors_of_coordinator(self) -> list[int]:
        """What the coordinator inherits."""
        own = self.coordinator_http
        return [own.fileno()] if own is not None and own.fileno() >= 0 else []

    def release(self) -> None:
        """Close our copies: a socket is gone when the last child that inherited it lets go. Idempotent."""
        for each in self._all():
            each.close()

    def release_tcp(self) -> None:
        """Close our copies of the shared port alone. Idempotent."""
        for each in self.listen:
            each.close()

    def give_away(self) -> None:
        """Another process has them now: release ours, and leave the paths to it. Idempotent."""
        self._paths.clear()
        self.release()

    def close(self) -> None:
        """Release them and remove the unix sockets' paths. Idempotent."""
        self.release()
        for path in self._paths:
            with contextlib.suppress(OSError):
                path.unlink()
        self._paths.clear()

    def _all(self) -> Iterator[socket.socket]:
        yield from (*self.listen, *self.unix, *self.http, *self.agent)
        for own in self.services:
            yield from own.values()
        if self.coordinator_http is not None:
            yield self.coordinator_http


def _listen_tcp(setting: str, address: Address, backlog: int, *, shared: bool = False) -> socket.socket:
    try:
        stream, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
        found = socket.getaddrinfo(address.host, address.port, type=stream, flags=passive)
    except OSError as fault:
        raise PortRefused(f"{setting} {address}: {fault.strerror}") from None
    family, _, _, _, bound = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(bound)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as fault:
        listener.close()
        raise PortRefused(f"{setting} {address}: {_why(fault)}") from None
    return listener


def _listen_unix(path: Path, mode: int, group: str | None, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        if group is not None:
            shutil.chown(path, group=group)
        os.chmod(path, mode)
        listener.listen(backlog)
        listener.setblocking(False)
    except LookupError:
        listener.close()
        path.unlink()
        raise PortRefused(f"fleet.unix_socket_group {group}: there is no such group") from None
    except OSError as fault:
        listener.close()
        raise PortRefused(f"fleet.unix_socket_dir {path}: {_why(fault)}") from None
    return listener


def _remove_stale(path: Path) -> None:
    """A socket nobody answers at is what a killed process left. Raises OSError(EADDRINUSE) if one answers."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(str(path)) if is_socket else errno.EADDRINUSE
    if answer != errno.ECONNREFUSED:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    path.unlink()


def _why(fault: OSError) -> str:
    if fault.errno == errno.EADDRINUSE:
        return "already in use by another process: stop it, or name another port"
    return fault.strerror or str(fault)
