"""The HTTP side over a real socket."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h11
import pytest
import trio

from pooler.observe.http import Parts, serve_http

REASONS = {"": "", "write": "no backend in the write role", "read": ""}


@asynccontextmanager
async def served(parts: Parts) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_http, listening.detach(), parts)
        yield port
        nursery.cancel_scope.cancel()


async def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    with trio.fail_after(10):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            connection = h11.Connection(h11.CLIENT)
            request = h11.Request(method=method, target=path,
                                  headers=[(name.encode(), value.encode()) for name, value in
                                           (("host", "x"), ("connection", "close"), *headers.items())])
            await stream.send_all(connection.send(request) + connection.send(h11.EndOfMessage()))
            status, body = 0, b""
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some(65536))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return status, body.decode()


def parts(token: str | None = None) -> Parts:
    return Parts(ready=lambda role: REASONS[role], metrics=lambda: b"pooler_x 1\n", token=token)


async def test_health_readiness_and_metrics_are_answered() -> None:
    async with served(parts()) as port:
        assert await ask(port, "/healthz") == (200, "alive\n")
        assert await ask(port, "/readyz") == (200, "ready\n")
        assert await ask(port, "/readyz/read") == (200, "ready\n")
        assert await ask(port, "/metrics") == (200, "pooler_x 1\n")


async def test_not_ready_says_why() -> None:
    async with served(parts()) as port:
        assert await ask(port, "/readyz/write") == (503, "no backend in the write role\n")
        assert (await ask(port, "/readyz/other"))[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_nothing_but_reading_is_allowed(method: str) -> None:
    async with served(parts()) as port:
        assert (await ask(port, "/metrics", method))[0] == 405


async def test_a_token_guards_the_metrics_but_not_the_health_pages() -> None:
    async with served(parts("s3cret")) as port:
        assert (await ask(port, "/metrics"))[0] == 401
        assert (await ask(port, "/metrics", authorization="Bearer wrong"))[0] == 401
        assert (await ask(port, "/metrics", authorization="Basic s3cret"))[0] == 401
        assert (await ask(port, "/metrics", authorization="bearer s3cret"))[0] == 200
        assert (await ask(port, "/readyz"))[0] == 200


async def test_requests_are_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    async with served(parts()) as port:
        await ask(port, "/healthz")
        await ask(port, "/nowhere")
    assert capfd.readouterr() == ("", "")


async def test_a_silent_client_does_not_keep_others_waiting() -> None:
    async with served(parts()) as port, await trio.open_tcp_stream("127.0.0.1", port) as silent:
        await silent.send_all(b"GET /heal")
        assert await ask(port, "/healthz") == (200, "alive\n")


async def test_a_token_need_not_be_ascii() -> None:
    async with served(parts("s3cret-ü")) as port:
        assert (await ask(port, "/metrics", authorization="Bearer s3cret-ü"))[0] == 200
        assert (await ask(port, "/metrics", authorization="Bearer s3cret-u"))[0] == 401


def test_the_token_is_not_shown() -> None:
    assert "s3cret" not in repr(parts("s3cret"))
