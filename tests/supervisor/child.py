"""A small real child for the supervisor's tests: a program of its own on the other end of a real link.

As a worker it accepts on every descriptor it was given and answers each connection with one line, its pid.
As a coordinator it writes what it is told to a file. Faults are switched by files in the fleet's folder, so
that a test can set them while the fleet runs: die-<name>, deaf-<name> (never looks at its link).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import trio

from coordinator.link import Args, Link

FOLDER = Path(sys.argv[1])
ROLE, LINK_FD = sys.argv[2], int(sys.argv[3])


class Child:
    def __init__(self) -> None:
        self.accepting: list[trio.CancelScope] = []
        self.clients = 0
        self.gone = trio.Event()
        self.name = ROLE
        self.link: Link

    async def run(self) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=LINK_FD)))
        handlers = {
            "drain": self.drain,
            "stop": self.stop,
            "reload": self.reload,
            "status": self.status,
            "worker_exited": self.worker_exited,
        }
        self.link = Link(stream, handlers)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.live, nursery)
            await self.link.run()
            nursery.cancel_scope.cancel()

    async def live(self, nursery: trio.Nursery) -> None:
        spec = await self.link.call("spec")
        if ROLE == "worker":
            self.name = f"worker-{spec['index']}"
            self.note("spec", {key: spec[key] for key in ("index", "workers", "boot_id")})
            for number in (*spec["listen"], *spec["services"].values(), *spec["unix"]):
                nursery.start_soon(self.accept, number, nursery)
        self.misbehave()
        self.link.notify("ready")
        self.link.notify("state", text=f"well, as {self.name}")

    def misbehave(self) -> None:
        if (FOLDER / f"die-{self.name}").exists():
            os._exit(7)
        if (FOLDER / f"deaf-{self.name}").exists():
            os.write(2, b'{"event": "deaf"}\n')
            signal.pause()

    async def accept(self, number: int, nursery: trio.Nursery) -> None:
        listener = trio.socket.from_stdlib_socket(socket.socket(fileno=number))
        with trio.CancelScope() as scope:
            self.accepting.append(scope)
            while True:
                await trio.lowlevel.wait_readable(listener)
                try:
                    client, _ = await listener.accept()
                except BlockingIOError:  # another worker was faster
                    continue
                nursery.start_soon(self.serve, trio.SocketStream(client))
        listener.close()

    async def serve(self, client: trio.SocketStream) -> None:
        self.clients += 1
        try:
            await client.send_all(f"{os.getpid()}\n".encode())
            while await client.receive_some():
                pass
        except trio.BrokenResourceError:
            pass
        finally:
            self.clients -= 1
            self.gone.set()
            self.gone = trio.Event()
            await trio.aclose_forcefully(client)

    async def drain(self, args: Args) -> Any:
        for scope in self.accepting:
            scope.cancel()
        with trio.move_on_after(args["timeout_seconds"]):
            while self.clients:
                await self.gone.wait()
        return {}

    async def stop(self, args: Args) -> Any:
        self.note("stop", self.name)
        os._exit(0)

    async def reload(self, args: Args) -> Any:
        spec = await self.link.call("spec")
        self.note("reload", spec["config"]["pool"]["default_pool_size"] if ROLE == "worker" else None)
        warned = ["the policy differs"] if ROLE == "coordinator" else []
        return {"problems": [], "warnings": warned}

    async def status(self, args: Args) -> Any:
        return {"clients": self.clients, "holders": [f"client {number}" for number in range(self.clients)]}

    async def worker_exited(self, args: Args) -> Any:
        self.note("worker_exited", args)
        return {}

    def note(self, what: str, value: Any) -> None:
        with (FOLDER / "told").open("a", encoding="utf-8") as told:
            told.write(json.dumps([what, value]) + "\n")


if __name__ == "__main__":
    trio.run(Child().run)
