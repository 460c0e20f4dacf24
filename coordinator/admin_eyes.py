"""A command's eyes: a Looker that opens no session without an admin permit.

One session at a time: going to another node gives the permit back, with proof, and takes one for there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import trio

from coordinator.admin import AdminPermits, NoAdminPermit, Pass
from coordinator.ledger.proofs import Look, Row
from coordinator.looks import CLOSE_TIMEOUT_SECONDS, Door, Looker, LookFailed

LEAVE_SECONDS = 4 * CLOSE_TIMEOUT_SECONDS

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Stay:
    """Where the session is, and what it stands on."""

    address: str
    door: Door
    taken: Pass
    eof_is_proof: bool = True
    interrupted: bool = False  # its thread was left to itself


class AdminEyes:
    """See coordinator.looks.Eyes. A look shows its own session too: that has a permit like any other."""

    def __init__(
        self, permits: AdminPermits, door: Callable[[str], Door], *, provider_identity: bool
    ) -> None:
        self._permits = permits
        self._door = door
        self._looker = Looker(self._named, provider_identity=provider_identity, reconnects=False)
        self._stay: _Stay | None = None
        self._looked = False
        self._lock = trio.Lock()

    async def look(self, address: str, *, fresh: bool = False) -> Look:
        """See Eyes.look. Raises NoAdminPermit, StoreUnavailable, StoreUnknown if the first one cannot be had.

        Later ones fail as a look fails: what is under way goes on and looks again.
        """
        async with self._lock:
            try:
                stay = await self._at(address, fresh=fresh)
                look = await self._look(stay)
            except NoAdminPermit as none:
                await self._leave()
                if self._looked:
                    raise LookFailed(f"{address}: {none}") from None
                raise
            self._looked = True
            return replace(look, rows=(*look.rows, _own_row(look, stay)))

    async def terminate(self, address: str, pid: int, backend_start_us: int) -> bool:
        """See Eyes.terminate: over the session that looks, under its permit."""
        async with self._lock:
            stay = await self._at(address, fresh=False)
            if not stay.taken.opened:
                await self._look(stay)
            return await self._through(
                stay, lambda: self._looker.terminate(address, pid, backend_start_us))

    async def close(self, *addresses: str) -> None:
        """See Eyes.close."""
        async with self._lock:
            if self._stay is not None and (not addresses or self._stay.address in addresses):
                await self._leave()

    async def _at(self, address: str, *, fresh: bool) -> _Stay:
        if self._stay is not None and (fresh or self._stay.address != address):
            await self._leave()
        if self._stay is None:
            door = self._door(address)  # raises LookFailed where nobody may log in
            taken = await self._permits.take(door.dbname, door.monitor.user, address)
            self._stay = _Stay(address, replace(door, application_name=taken.name), taken)
        return self._stay

    async def _look(self, stay: _Stay) -> Look:
        look = await self._through(stay, lambda: self._looker.look(stay.address))
        stay.eof_is_proof = look.is_node
        if not stay.taken.opened:
            stay.taken = await self._permits.opened(
                stay.taken, look.own_pid, look.own_start_us, look.backend)
        return look

    async def _through(self, stay: _Stay, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """What its session answers; one that failed is over, and its permit given back."""
        try:
            return await ask()
        except LookFailed as failed:
            self._stay = None
            await self._permits.give_back(stay.taken, failed.ended and stay.eof_is_proof)
            raise
        except trio.Cancelled:
            stay.interrupted = True
            raise

    async def _leave(self) -> None:
        stay, self._stay = self._stay, None
        if stay is None:
            return
        with trio.move_on_after(LEAVE_SECONDS, shield=True):
            await self._permits.closing(stay.taken)
            if stay.interrupted:
                await self._permits.give_back(stay.taken, None)
                return
            ended = await self._looker.leave(stay.address)
            await self._permits.give_back(stay.taken, ended and stay.eof_is_proof)

    def _named(self, address: str) -> Door:
        assert self._stay is not None  # nobody connects before that
        return self._stay.door


@asynccontextmanager
async def admin_eyes(
    permits: AdminPermits, door: Callable[[str], Door], *, provider_identity: bool
) -> AsyncIterator[AdminEyes]:
    """Eyes that leave no session behind."""
    eyes = AdminEyes(permits, door, provider_identity=provider_identity)
    try:
        yield eyes
    finally:
        with trio.move_on_after(LEAVE_SECONDS, shield=True):
            await eyes.close()


def _own_row(look: Look, stay: _Stay) -> Row:
    return Row(look.own_pid, look.own_start_us, stay.door.monitor.user, stay.door.dbname, stay.taken.name,
               "active", "client backend")
