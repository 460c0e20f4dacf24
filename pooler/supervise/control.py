"""The fleet's control socket: what `pooler fleet …` says to the supervisor of this host.

A unix socket in the run directory that only this user can open. Ops: status, reload, stop {drain},
restart_rolling {timeout_seconds} (tells its progress by `progress` {text}).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
import trio

from coordinator.link import Args, Handler, Link
from pooler.errors import FleetUnreachable
from pooler.observe.events import Event

log = structlog.get_logger()

Say = Callable[[str], None]
ControlHandler = Callable[[Args, Say], Awaitable[Any]]


async def serve_control(path: Path, handlers: Mapping[str, ControlHandler]) -> None:
    """Answer commands until cancelled. Raises OSError if the socket cannot be made."""
    listener = _listen(path)

    async def serve(stream: trio.SocketStream) -> None:
        await _serve(stream, handlers)

    try:
        await trio.serve_listeners(serve, [listener])
    finally:
        _remove(path)


def _listen(path: Path) -> trio.SocketListener:
    _remove(path)  # the run directory is ours alone, so what is there is a dead fleet's
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(16)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


async def _serve(stream: trio.SocketStream, handlers: Mapping[str, ControlHandler]) -> None:
    own: dict[str, Handler] = {}
    link = Link(stream, own)

    def say(text: str) -> None:
        link.notify("progress", text=text)

    for op, handler in handlers.items():
        own[op] = _bound(handler, say)
    try:
        await link.run()
    except* Exception as broken:  # one bad command must not take the fleet along
        log.error(Event.SOMETHING_FAILED, what="a control connection", exc_info=broken)


def _bound(handler: ControlHandler, say: Say) -> Handler:
    async def answer(args: Args) -> Any:
        return await handler(args, say)

    return answer


@asynccontextmanager
async def reach_fleet(path: Path, say: Say = lambda text: None) -> AsyncIterator[Link]:
    """A link to the running fleet of this run directory. Raises FleetUnreachable in one line."""

    async def on_progress(args: Args) -> None:
        say(str(args.get("text", "")))

    try:
        stream = await trio.open_unix_socket(str(path))
    except OSError as fault:
        raise FleetUnreachable(
            f"no fleet answers at {path} ({fault.strerror or 'not running'}): "
            f"is `pooler fleet run` running with this config, as this user?") from None
    link = Link(stream, {"progress": on_progress})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        yield link
        nursery.cancel_scope.cancel()
