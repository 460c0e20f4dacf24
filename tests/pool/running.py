"""A pool whose reactor runs, with scripted sessions that tasks serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.pool import growth
from pooler.pool.opener import OpenSession
from pooler.pool.pool import Pool
from tests.relay.miniserver import MiniServer
from tests.relay.world import World, world


@dataclass
class Running:
    """A pool whose reactor runs and whose sessions are served by tasks."""

    world: World
    nursery: trio.Nursery
    minis: list[MiniServer] = field(default_factory=list)

    @property
    def pool(self) -> Pool:
        return self.world.pool

    async def open_session(self, *_: Any) -> OpenSession:
        """As the opener, with a session of our own."""
        await trio.lowlevel.checkpoint()
        opened, far = self.world.dial()
        mini = MiniServer(pid=opened.pid)
        self.minis.append(mini)
        self.nursery.start_soon(self.serve, mini, trio.SocketStream(trio.socket.from_stdlib_socket(far)))
        return opened

    async def serve(self, mini: MiniServer, stream: trio.SocketStream) -> None:
        async with stream:
            while not mini.ended:
                try:
                    data = await stream.receive_some(65_536)
                    if not data:
                        mini.leave()
                    elif answer := mini.feed(data):
                        await stream.send_all(answer)
                except trio.BrokenResourceError:
                    mini.leave()

    async def check_whole(self) -> None:
        """Nobody holds or awaits anything, nothing is half done, and another is served."""
        await wait_all_tasks_blocked()
        core = self.pool.core
        core.check()
        assert (len(core.active), core.opening, core.closing, len(core.waiting)) == (0, 0, 0, 0)
        assert len(core.idle) == len(self.pool.parts.servers) == sum(not mini.ended for mini in self.minis)
        assert all(mini.status == "I" and not mini.pending for mini in self.minis if not mini.ended)
        async with self.pool.checkout() as client:
            assert await client.query("select 7") == [[b"7"]]
        await wait_all_tasks_blocked()
        assert len(core.active) == 0


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, size: int = 2) -> AsyncIterator[Running]:
    """A pool of `size`, nothing opened yet."""
    with world(0) as made:
        made.pool.core.size_max = size
        async with trio.open_nursery() as nursery:
            run = Running(made, nursery)
            monkeypatch.setattr(growth, "open_session", run.open_session)
            made.parts.nursery = nursery
            nursery.start_soon(made.reactor.run)
            yield run
            nursery.cancel_scope.cancel()
        for server in made.parts.servers:
            server.sock.close()
