"""The raw protocol client for tests: blocking (`RawClient`) and for trio (`TrioRawClient`).

`raw` is a fixture that opens blocking clients and closes them at the end of the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Self

import pytest
import trio

from pooler.demo.client import (
    Disconnected,
    Inbox,
    Login,
    Message,
    RawClient,
    ServerSaid,
    Session,
    query,
    rows_of,
    startup,
)

__all__ = ["Disconnected", "Message", "OpenRaw", "RawClient", "ServerSaid", "TrioRawClient"]

OpenRaw = Callable[..., RawClient]


class TrioRawClient:
    """The same over any trio stream; time-outs are the caller's cancel scopes."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.session = Session()
        self._inbox = Inbox()

    @classmethod
    async def connect(cls, port: int, host: str = "127.0.0.1") -> Self:
        """Over TCP."""
        return cls(await trio.open_tcp_stream(host, port))

    async def login(
        self, user: str, password: str = "", dbname: str | None = None, **parameters: str
    ) -> Self:
        """Startup and authentication until ReadyForQuery. Raises ServerSaid."""
        await self.send(startup({"user": user, "database": dbname or user, **parameters}))
        login = Login(user, password)
        while True:
            said = await self.receive()
            if said.type == "R":
                await self.send(login.answer(said.body))
            elif said.type == "E":
                raise said.error()
            elif said.type == "Z":
                return self

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive(self) -> Message:
        """The next message. Raises Disconnected at the end."""
        while (said := self._inbox.next()) is None:
            data = await self.stream.receive_some(65_536)
            if not data:
                raise Disconnected
            self._inbox.feed(data)
        self.session.take(said)
        return said

    async def until_ready(self) -> list[Message]:
        """Every message up to and with the next ReadyForQuery."""
        found = [await self.receive()]
        while found[-1].type != "Z":
            found.append(await self.receive())
        return found

    async def query(self, text: str) -> list[list[str | None]]:
        """A simple query's rows. Raises ServerSaid, after ReadyForQuery."""
        await self.send(query(text))
        return rows_of(await self.until_ready())


@pytest.fixture
def raw() -> Iterator[OpenRaw]:
    """raw(port, host="127.0.0.1") → a connected RawClient, closed at the end."""
    with ExitStack() as opened:

        def connect(port: int, host: str = "127.0.0.1", timeout_seconds: float = 20) -> RawClient:
            client = RawClient(host, port, timeout_seconds)
            opened.callback(client.close)
            return client

        yield connect
