"""msgpack frames between two processes of one host, both ends.

Either side may call an operation of the other and wait for its answer, or notify it without one. A frame is
a 4-byte big-endian length and a msgpack map: {i, o, a} asks, {o, a} notifies, {r, v} answers, {r, e} refuses.
Whoever sends anything else, or asks and does not read, loses the link.
A call whose answer never came raises LinkLost: whether it happened is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgpack
import trio

FRAME_BYTES_MAX = 16 * 1024 * 1024
WRITE_BYTES = 65_536
QUEUE_FRAMES_MAX = 65_536

Args = dict[str, Any]
Handler = Callable[[Args], Awaitable[Any]]


class LinkLost(Exception):
    """The link broke before the answer came: the outcome of the call is unknown."""


class LinkRefused(Exception):
    """The other side answered with an error: `code` is one word for programs, `message` for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Link:
    """One end of a link. `run()` must be running for anything to move."""

    def __init__(self, stream: trio.abc.Stream, handlers: Mapping[str, Handler]) -> None:
        self._stream = stream
        self._handlers = handlers
        self._next_id = 0
        self._answers: dict[int, _Answer] = {}
        self._send, self._receive = trio.open_memory_channel[bytes](math.inf)
        self._queued = 0
        self.lost = trio.Event()

    async def call(self, op: str, /, **args: Any) -> Any:
        """Ask the other side. Raises LinkRefused with its error, LinkLost if the link ends first."""
        if self.lost.is_set():
            raise LinkLost(op)
        self._next_id += 1
        number = self._next_id
        answer = self._answers[number] = _Answer()
        try:
            self._enqueue({"i": number, "o": op, "a": args})
            await answer.ready.wait()
        finally:
            del self._answers[number]
        return answer.outcome(op)

    def notify(self, op: str, /, **args: Any) -> None:
        """Tell the other side, in order with calls; dropped silently when the link is lost."""
        if not self.lost.is_set():
            self._enqueue({"o": op, "a": args})

    async def run(self) -> None:
        """Move frames until the other side closes or breaks off. Handlers run concurrently."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read(nursery)
                nursery.cancel_scope.cancel()
        finally:
            self.lost.set()
            for answer in self._answers.values():
                answer.lose()
            with trio.move_on_after(1, shield=True):
                await trio.aclose_forcefully(self._stream)

    def _enqueue(self, message: Args) -> None:
        body: bytes = msgpack.packb(message, unicode_errors="surrogateescape")
        if self._queued >= QUEUE_FRAMES_MAX:
            raise LinkLost("the other side does not read")
        self._queued += 1
        self._send.send_nowait(len(body).to_bytes(4, "big") + body)

    async def _write(self) -> None:
        async for frame in self._receive:
            frames = bytearray(frame)
            self._queued -= 1
            while len(frames) < WRITE_BYTES:  # what is to go goes together: each write wakes the other side
                try:
                    frames += self._receive.receive_nowait()
                except trio.WouldBlock:
                    break
                self._queued -= 1
            try:
                await self._stream.send_all(frames)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the reader sees the end too

    async def _read(self, nursery: trio.Nursery) -> None:
        buffer = bytearray()
        while True:
            try:
                data = await self._stream.receive_some(65_536)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            buffer += data
            while len(buffer) >= 4:
                size = int.from_bytes(buffer[:4], "big")
                if size > FRAME_BYTES_MAX:
                    return
                if len(buffer) < 4 + size:
                    break
                frame = bytes(buffer[4 : 4 + size])
                del buffer[: 4 + size]
                try:
                    self._dispatch(_message(frame), nursery)
                except (ValueError, KeyError, TypeError):
                    return  # it does not speak this protocol

    def _dispatch(self, message: Args, nursery: trio.Nursery) -> None:
        if "r" in message:
            answer = self._answers.get(message["r"])
            if answer is not None:  # else the caller was cancelled meanwhile
                answer.settle(message)
        else:
            nursery.start_soon(self._serve, message.get("i"), message["o"], message["a"])

    async def _serve(self, number: int | None, op: str, args: Args) -> None:
        handler = self._handlers.get(op)
        reply: Args
        if handler is None:
            reply = {"r": number, "e": ["unknown_operation", f"no operation {op!r}"]}
        else:
            try:
                reply = {"r": number, "v": await handler(args)}
            except LinkRefused as refused:
                reply = {"r": number, "e": [refused.code, refused.message]}
        if number is not None and not self.lost.is_set():
            try:
                self._enqueue(reply)
            except LinkLost:  # it asks and does not read
                await trio.aclose_forcefully(self._stream)


def _message(frame: bytes) -> Args:
    """Raises ValueError. Texts that came from clients need not be UTF-8: their bytes pass unchanged."""
    message = msgpack.unpackb(frame, strict_map_key=False, unicode_errors="surrogateescape")
    if not isinstance(message, dict):
        raise ValueError("a frame that is no map")
    return message


class _Answer:
    """What a caller waits for."""

    __slots__ = ("_lost", "_message", "ready")

    def __init__(self) -> None:
        self.ready = trio.Event()
        self._message: Args | None = None
        self._lost = False

    def settle(self, message: Args) -> None:
        self._message = message
        self.ready.set()

    def lose(self) -> None:
        self._lost = True
        self.ready.set()

    def outcome(self, op: str) -> Any:
        if self._message is None:
            raise LinkLost(op)
        error = self._message.get("e")
        if error is not None:
            raise LinkRefused(error[0], error[1])
        return self._message["v"]
