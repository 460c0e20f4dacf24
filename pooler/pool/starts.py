"""Start-up parameters of clients, proved on a server before the client is greeted.

What one server of a pool has taken is remembered with the values that it reports (`ISO` is `ISO, MDY`), so
that the next client that starts with the same costs nothing. Forgotten when another backend serves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from pooler.errors import BackendLost, LoginRefused
from pooler.relay.task import QueryFailed, TaskClient
from pooler.wire.messages import read_fields
from pooler.wire.parameters import ParameterSet, literal

if TYPE_CHECKING:
    from pooler.pool.pool import Pool

KEPT_MAX: Final = 256  # of one pool
KEPT_BYTES_MAX: Final = 2048  # of the names and values of one; a longer one is proved each time
TRIES_MAX: Final = 3  # sessions that went away while they were asked
_STYLE: Final = b"DateStyle"

Start = tuple[tuple[bytes, bytes], ...]


class StartRefused(LoginRefused):
    """The server does not take a parameter; `server_error` is its own word, as it would end a login."""

    def __init__(self, refused: QueryFailed) -> None:
        super().__init__(str(refused), refused.code)
        self.server_error = _as_fatal(refused.fields) if refused.fields else b""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a server made of them: the values that clients are told at login, by the server's names."""

    told: tuple[tuple[bytes, bytes], ...] = ()

    def onto(self, wanted: ParameterSet) -> ParameterSet:
        """What was asked for, in the server's words where they are known."""
        for name, value in self.told:
            wanted = wanted.with_status(name, value)
        return wanted


NOTHING: Final = Taken()


class Starts:
    """The starts that servers of one pool have taken."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: OrderedDict[Start, Taken] = OrderedDict()
        self._asking: dict[Start, trio.Event] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Another server may take other values."""
        self._kept.clear()

    async def proved(
        self, base: ParameterSet, start: Mapping[bytes, bytes], greeted: Iterable[bytes], seconds: float
    ) -> Taken:
        """What a server makes of `start`, where `base` is the default. `greeted`: names that it reports.

        Takes a session only for what none has taken yet, and only one at a time for the same. Raises
        StartRefused, ValueError for what can name no parameter, and what checkout raises.
        """
        key = tuple(sorted((name.lower(), value) for name, value in start.items()))
        wanted = base.with_startup(start)
        if base.difference(wanted) is None:
            return NOTHING
        while key not in self._kept:
            others = self._asking.get(key)
            if others is None:
                return await self._prove(key, base, wanted, greeted, seconds)
            await others.wait()
        self._kept.move_to_end(key)
        return self._kept[key]

    async def _prove(
        self, key: Start, base: ParameterSet, wanted: ParameterSet, greeted: Iterable[bytes], seconds: float
    ) -> Taken:
        asking = self._asking[key] = trio.Event()
        try:
            taken = await self._ask(base, wanted, greeted, seconds)
        except QueryFailed as refused:
            raise StartRefused(refused) from None
        finally:
            del self._asking[key]
            asking.set()
        if sum(len(name) + len(value) for name, value in key) <= KEPT_BYTES_MAX:
            self._kept[key] = taken
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return taken

    async def _ask(
        self, base: ParameterSet, wanted: ParameterSet, greeted: Iterable[bytes], seconds: float
    ) -> Taken:
        for left in reversed(range(TRIES_MAX)):
            try:
                async with self._pool.checkout(seconds) as session:
                    self._pool.assignments -= 1  # no client has it
                    return await _ask_one(session, base, wanted, greeted)
            except BackendLost:
                if not left:
                    raise
        raise AssertionError


async def _ask_one(
    session: TaskClient, base: ParameterSet, wanted: ParameterSet, greeted: Iterable[bytes]
) -> Taken:
    if session.server is not None and session.server.parameters.get(_STYLE) != base.get(_STYLE):
        await session.fit(base)  # one half of a DateStyle leaves the other as it is
    fitted = await session.fit(wanted)
    told = list(fitted.items())
    own = {name for name, _ in wanted.extra}
    rest = [name for name in greeted if name.lower() in own]
    if rest:  # reported, but not among those that follow a client
        asked = ",".join(f"current_setting({literal(name).decode()})" for name in rest)
        row = (await session.query(f"select {asked}"))[0]
        told += [(name, value) for name, value in zip(rest, row, strict=True) if value is not None]
    session.leaves_nothing()
    return Taken(tuple((name, value) for name, value in told if name != b"application_name"))


def _as_fatal(fields: bytes) -> bytes:
    """The fields of an ErrorResponse as those of one that ends the session."""
    said = read_fields(fields) | {b"S": b"FATAL", b"V": b"FATAL"}
    return b"".join(name + value + b"\0" for name, value in said.items()) + b"\0"
