"""HAProxy's agent-check: one line per connection, then the end.

`up 100%` while this worker takes clients, `drain` while it does not. Source: HAProxy configuration manual,
agent-check.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import trio

from pooler.serve.registry import Registry

ANSWER_SECONDS_MAX = 2.0


async def serve_agent(listening: socket.socket, registry: Registry) -> None:
    """Answer until cancelled."""
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))

    async def answer(stream: trio.SocketStream) -> None:
        with trio.move_on_after(ANSWER_SECONDS_MAX):
            with suppress(trio.BrokenResourceError):
                await stream.send_all(b"drain\n" if registry.draining else b"up ready 100%\n")
        await trio.aclose_forcefully(stream)

    await trio.serve_listeners(answer, [listener])
