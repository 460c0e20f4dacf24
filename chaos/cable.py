"""A TCP relay on loopback whose link can be cut or fall silent, so that a partition needs no root.

Cut: connections end and new ones are refused. Silent: nothing passes either way, but nobody is told; what
was sent meanwhile arrives late, once the link is whole again.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

_RECV_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)


class Cable:
    """In front of `port`; `close` ends it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flows = threading.Event()
        self._flows.set()
        self._far_may_end = threading.Event()
        self._far_may_end.set()
        self._is_cut = False
        self._open: set[socket.socket] = set()
        self._near: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="cable", daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End what is connected, and whoever comes until `heal`."""
        self._is_cut = True
        self._end()

    def reset_callers(self) -> None:
        """Reset the near side of each connection, as a firewall does that has forgotten it; the far side
        hears nothing of it until `heal`."""
        self._far_may_end.clear()
        with self._lock:
            for each in self._near:
                with suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    each.shutdown(socket.SHUT_RD)

    def silence(self) -> None:
        """Let nothing pass until `heal`."""
        self._flows.clear()

    def heal(self) -> None:
        self._is_cut = False
        self._flows.set()
        self._far_may_end.set()

    def close(self) -> None:
        self._listener.close()
        self._flows.set()
        self._far_may_end.set()
        self._end()

    def _end(self) -> None:
        with self._lock:
            for each in self._open:
                with suppress(OSError):  # closed already
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                self._flows.wait()
                try:
                    if self._is_cut:
                        raise ConnectionRefusedError
                    far = socket.create_connection(("127.0.0.1", self._target), 5)
                    far.settimeout(None)
                except OSError:
                    near.close()
                    continue
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """One connection, until either side has ended it."""
        with self._lock:
            self._open |= {near, far}
            self._near.add(near)
        if self._is_cut:  # since it was let in
            self._end()
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        with self._lock:
            self._open -= {near, far}
            self._near.discard(near)
        near.close()
        far.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_RECV_BYTES):
                self._flows.wait()
                target.sendall(data)
        self._flows.wait()  # an end is news, too
        if not self._far_may_end.is_set():
            if source in self._near:
                source.close()
            self._far_may_end.wait()  # also where the far side had an answer for who was reset
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
