"""The admin permits of one command: `session/<db>/admin/<n>`, n < adminReserve, on the command's own lease.

A command that looks at a server of a ledger takes one before it connects and gives it back with proof. It has
a worker key of its own (index -1, no ordinal), so that a command that dies leaves what a dead worker leaves:
a permit that the reapers mark, look up and free.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from coordinator import commands
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Applied, Granted, Ledger
from coordinator.ledger.record import COMMAND_INDEX, Backend, Kind, Permit, Worker
from coordinator.ledger.reservation import Reserve
from coordinator.ledger.rules import Closing, Code, Command, Open, Refused, Release, Unknown
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Lease, Put, Store, StoreUnavailable, StoreUnknown, Txn, Won, absent

GIVE_BACK_SECONDS = 5.0
REPEAT_SECONDS = 0.2
PASSING = frozenset({Code.LEDGER_UNAVAILABLE, Code.CHANGED})


class NoAdminPermit(Exception):
    """A server may not be looked at now: which permits there are, and who holds them."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A permit to open one session. `name` is its application_name."""

    permit: Permit
    name: str
    opened: bool = False


class AdminPermits:
    """What one command takes and gives back. Made by `admin_permits`."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledger: Ledger, *, host: str, machine_id: str,
        run_dir: Path | None, ttl_seconds: float, now_us: Callable[[], int], nursery: trio.Nursery,
    ) -> None:
        self.boot_id = f"command-{secrets.token_hex(12)}"
        self._store = store
        self._keys = keys
        self._ledger = ledger
        self._host = host
        self._machine_id = machine_id
        self._run_dir = run_dir
        self._ttl = ttl_seconds
        self._now_us = now_us
        self._nursery = nursery
        self._lease: Lease | None = None
        self._held: set[Permit] = set()

    async def take(self, dbname: str, user: str, address: str) -> Pass:
        """A permit for one session at `address`. Raises NoAdminPermit, StoreUnavailable, StoreUnknown."""
        if self._lease is None:
            self._lease = await self._register()
        ask = Reserve(
            request_id=secrets.token_hex(12), kind=Kind.ADMIN, dbname=dbname, user=user, seats=0,
            owner=self.boot_id, host=self._host, address=address)
        outcome = await self._ledger.reserve(ask)
        if isinstance(outcome, Granted):
            self._held.add(outcome.permit)
            return Pass(outcome.permit, outcome.permit.birth_tag(outcome.tag))
        if not outcome.settled:
            await self._void(ask.request_id)
        if outcome.code is Code.FULL:
            raise NoAdminPermit(await self._who_holds())
        if outcome.code is Code.LEDGER_UNAVAILABLE:
            raise StoreUnavailable(outcome.detail or "no answer to a reservation")
        raise NoAdminPermit(
            f"no admin permit of {self._database} can be had: {outcome.code} {outcome.detail}".rstrip())

    async def opened(self, taken: Pass, pid: int, start_us: int, backend: Backend) -> Pass:
        """Records the session. Raises NoAdminPermit if the permit is gone: close the session at once."""
        answer = await self._apply(Open(taken.permit, pid, start_us, backend))
        if isinstance(answer, Refused) and answer.code is not Code.LEDGER_UNAVAILABLE:
            raise NoAdminPermit(f"{taken.permit} of {self._database} was lost meanwhile: {answer.code}")
        return Pass(taken.permit, taken.name, opened=not isinstance(answer, Refused))

    async def closing(self, taken: Pass) -> None:
        """Terminate is about to be sent; for those who look."""
        if taken.opened:
            await self._ledger.apply(Closing(taken.permit))

    async def give_back(self, taken: Pass, ended: bool | None) -> None:
        """Frees it if the session certainly `ended`; else it is SESSION_UNKNOWN until a look proves it gone.

        None: a thread of this process may still be opening it, so that it is not called abandoned either,
        and nothing is proven before the process is gone.
        """
        if ended:
            answer = await self._apply(Release(taken.permit, Proof.EOF, Actor.OWNER, observer=self.boot_id))
        else:
            abandoned = ended is not None and not taken.opened
            answer = await self._apply(Unknown(taken.permit, abandoned))
        told = not isinstance(answer, Refused) or answer.code is Code.GONE
        if told and (taken.opened or ended is not None):
            self._held.discard(taken.permit)

    async def close(self) -> None:
        """The registration goes; what could not be given back is then the reapers' to free."""
        if self._lease is None:
            return
        try:
            await self._lease.revoke()
        except (StoreUnavailable, StoreUnknown):
            return  # it ends by itself, and the note of this process stays
        if self._run_dir is not None and not self._held:
            commands.forget(self._run_dir, self.boot_id)

    # ---- the command's own registration

    async def _register(self) -> Lease:
        process = commands.Process.this()
        if self._run_dir is not None:
            commands.note(self._run_dir, self.boot_id, process)
        record = Worker(
            boot_id=self.boot_id, index=COMMAND_INDEX, ordinal=COMMAND_INDEX, host=self._host,
            machine_id=self._machine_id, kernel_boot_id=process.kernel_boot_id, pid=process.pid,
            pid_start=process.pid_start)
        lease = await self._store.lease(self._ttl)
        key = self._keys.worker(self.boot_id)
        outcome = await self._store.txn(Txn((absent(key),), (Put(key, record.encode(), lease.id),)))
        if not isinstance(outcome, Won):
            raise StoreUnavailable("the command could not be registered")
        self._nursery.start_soon(self._keep, lease)
        return lease

    async def _keep(self, lease: Lease) -> None:
        while True:
            await trio.sleep(self._ttl / 3)  # noqa: TID251 - the pace of keep-alives
            try:
                if not await lease.keep_alive():
                    return  # the reapers mark what it holds; its own proof frees it all the same
            except (StoreUnavailable, StoreUnknown):
                continue

    # ---- the ledger

    @property
    def _database(self) -> str:
        return self._ledger.keys.database

    async def _apply(self, command: Command) -> Applied | Refused:
        """Repeated for a while, as long as etcd does not answer."""
        answer = await self._ledger.apply(command)
        with trio.move_on_after(GIVE_BACK_SECONDS):
            while isinstance(answer, Refused) and answer.code in PASSING:
                await trio.sleep(REPEAT_SECONDS)  # noqa: TID251 - back-off towards the store
                answer = await self._ledger.apply(command)
        return answer

    async def _void(self, request_id: str) -> None:
        """Until etcd has it, for a while: after that it goes with the registration."""
        with trio.move_on_after(GIVE_BACK_SECONDS):
            while True:
                if not isinstance(await self._ledger.void(request_id, self.boot_id, Kind.ADMIN), Refused):
                    return
                await trio.sleep(REPEAT_SECONDS)  # noqa: TID251 - back-off towards the store

    async def _who_holds(self) -> str:
        """For people: which permits there are, and who has them."""
        snapshot = await self._ledger.snapshot()
        limits = snapshot.active_limits
        held = [each.session for each in snapshot.held(Kind.ADMIN)]
        holders = ", ".join(
            f"{s.permit} ({s.state}, owner {s.owner} on {s.host}, user {s.user}, pid {s.pid or 'not known'}, "
            f"for {max(0, self._now_us() - s.state_since_us) / 1_000_000:.0f} s)" for s in held)
        return (f"no admin permit of {self._database} is free: adminReserve is "
                f"{limits.admin if limits else 0}; held: {holders or 'none'}")


@asynccontextmanager
async def admin_permits(
    store: Store, keys: FleetKeys, ledger: Ledger, *, host: str, machine_id: str, run_dir: Path | None,
    ttl_seconds: float, now_us: Callable[[], int],
) -> AsyncIterator[AdminPermits]:
    """The permits of this command, registered when the first is taken."""
    async with trio.open_nursery() as nursery:
        permits = AdminPermits(
            store, keys, ledger, host=host, machine_id=machine_id, run_dir=run_dir, ttl_seconds=ttl_seconds,
            now_us=now_us, nursery=nursery)
        try:
            yield permits
        finally:
            with trio.move_on_after(GIVE_BACK_SECONDS, shield=True):
                await permits.close()
            nursery.cancel_scope.cancel()
