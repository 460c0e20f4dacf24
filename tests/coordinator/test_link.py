"""The link between two processes: what it carries, and what ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import memory_stream_pair

from coordinator import link as link_module
from coordinator.link import Args, Link, LinkLost


@asynccontextmanager
async def linked(handler: Any = None) -> AsyncIterator[tuple[Link, trio.abc.Stream]]:
    """A running link whose other end is a bare stream; `op` is what it serves."""
    near, far = memory_stream_pair()
    link = Link(near, {"op": handler} if handler is not None else {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        yield link, far
        nursery.cancel_scope.cancel()


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def test_a_text_that_is_not_utf_8_arrives_as_it_was() -> None:
    near, far = memory_stream_pair()

    async def echo(args: Args) -> Any:
        return args["name"]

    one, other = Link(near, {}), Link(far, {"op": echo})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        nursery.start_soon(other.run)
        assert await one.call("op", name="caf\udce9") == "caf\udce9"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "body", [b"\xc1", msgpack.packb(7), msgpack.packb({"x": 1}), msgpack.packb([1, 2]), b""])
async def test_what_is_no_message_ends_the_link_and_nothing_else(body: bytes) -> None:
    async with linked() as (link, far):
        await far.send_all(frame(body))
        await link.lost.wait()
        with pytest.raises(LinkLost):
            await link.call("op")


async def test_who_asks_and_does_not_read_loses_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "QUEUE_FRAMES_MAX", 0)

    async def answer(args: Args) -> Any:
        return 1

    async with linked(answer) as (link, far):
        await far.send_all(frame(msgpack.packb({"i": 1, "o": "op", "a": {}})))
        await link.lost.wait()
