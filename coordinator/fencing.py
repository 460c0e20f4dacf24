"""Fencing a backend that was left: the operator's command is run once for it; what it confirms frees permits.

Run by the leader, in a process group of its own, for a limited time; only its exit code is read: 0 says that
the node is off. What was asked and what came of it is kept under `operator/`, written before the command is
begun: a second leader does not run again what has ended, nor forget what was confirmed. Nobody fences the
backend that serves now, nor a standby.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import structlog
import trio

from coordinator.epoch import NoEpoch, read_epoch
from coordinator.events import Event
from coordinator.following import wants_fencing
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.fence import Fenced, proof_of_fence, what_goes_off
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.proofs import Proven
from coordinator.ledger.record import Backend, Epoch, Session, UnknownSchema
from coordinator.ledger.rules import Release
from coordinator.ledger.states import Actor
from coordinator.reaping import unknown_cases
from coordinator.store.api import (
    Compare,
    Entry,
    Put,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
    absent,
    unchanged,
)
from coordinator.topology import Seen

COMMAND_SECONDS_MAX = 60.0
AGAIN_SECONDS = 0.5
BEGUN, CONFIRMED, FAILED = "begun", "confirmed", "failed"
# of the environment, what a shell and its tools need; the fleet's secrets may be in the rest
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSH_AUTH_SOCK")

_log = structlog.get_logger("coordinator.fencing")

Run = Callable[[str, Mapping[str, str]], Awaitable[int | None]]
"""(command line, environment) → its exit code; None: it did not end in time."""


async def run_command(command: str, environment: Mapping[str, str]) -> int | None:
    """Runs it in a shell, without input and with nobody to hear what it says."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    process = await trio.lowlevel.open_process(
        ["/bin/sh", "-c", command], env={**kept, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    code: int | None = None
    try:
        with trio.move_on_after(COMMAND_SECONDS_MAX):
            code = await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with trio.move_on_after(1.0, shield=True):
                await process.wait()
    return code


class Fencer:
    """Fences for all ledgers of this coordinator while it leads. `on_released` hears of each permit freed."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledgers: Mapping[str, Ledger], *, command: str, host: str,
        roles: Mapping[str, str], look: Callable[[str], Awaitable[Seen]], now_us: Callable[[], int],
        run: Run = run_command,
    ) -> None:
        self._store = store
        self._keys = keys
        self._ledgers = ledgers
        self._command = command
        self._host = host
        self._roles = roles
        self._look = look
        self._now_us = now_us
        self._run = run
        self._confirmed: dict[str, list[Fenced]] = {}
        self._stirred = trio.Event()
        self.on_released: list[Callable[[str, Session], None]] = []

    def stir(self) -> None:
        """A permit became unknown."""
        self._stirred.set()

    async def lead(self, fence: Compare, pace_seconds: float) -> None:
        """What an earlier leader began is done again; what was confirmed frees permits as they turn up."""
        async with trio.open_nursery() as nursery:
            for db in self._ledgers:
                nursery.start_soon(self._take_over, db, fence)
            while True:
                self._stirred = trio.Event()
                for db in tuple(self._confirmed):
                    try:
                        await self.free(db)
                    except (StoreUnavailable, StoreUnknown, UnknownSchema, ValueError):
                        continue
                with trio.move_on_after(pace_seconds):
                    await self._stirred.wait()

    async def left(self, db: str, epoch: Epoch, seen: Seen | None, fence: Compare) -> None:
        """The ledger left this epoch's backend without a drain: it is fenced where it may still do harm."""
        if wants_fencing(self._roles[db], epoch.backend, seen):
            await self.fence(db, epoch.number, epoch.backend, fence)

    async def fence(self, db: str, number: int, backend: Backend, fence: Compare) -> bool:
        """Once for this backend; whether it is confirmed off. What etcd does not answer is asked again."""
        key = self._key(db, backend)
        while True:
            try:
                return await self._fence(db, number, backend, key, fence)
            except NoEpoch:
                return False
            except (StoreUnavailable, StoreUnknown):
                await trio.sleep(AGAIN_SECONDS)  # noqa: TID251 - back-off towards the store

    async def _fence(self, db: str, number: int, backend: Backend, key: str, fence: Compare) -> bool:
        found = (await self._store.read(key)).entries
        if found and _state(found[0]) != BEGUN:
            return _state(found[0]) == CONFIRMED
        now = await read_epoch(self._store, self._keys.db(db))
        if now.epoch.backend.address == backend.address:
            return False  # it serves again
        stands = unchanged(self._keys.db(db).epoch(), now.mod_revision)
        fenced = await self._what_goes_off(db, number, backend)
        record = self._record(db, number, backend, fenced, BEGUN)
        begun = await self._put(key, record, found[0].mod_revision if found else 0, fence, stands)
        if not begun:
            return await self._fence(db, number, backend, key, fence) if await self._leads(fence) else False
        _log.warning(Event.FENCE_BEGUN, database=db, backend=backend.address)
        code = await self._run(self._command, _environment(db, backend))
        return await self._conclude(db, key, replace(
            record, evidence=f"exit code {code}" if code is not None else
            f"not ended within {COMMAND_SECONDS_MAX:g} s"), begun, fence, is_off=code == 0)

    async def _leads(self, fence: Compare) -> bool:
        """Whether this leader is the one still: else somebody else goes on."""
        entries = (await self._store.read(fence.key)).entries
        return [each.create_revision for each in entries] == [fence.revision]

    async def _conclude(
        self, db: str, key: str, record: Attestation, begun: int, fence: Compare, *, is_off: bool
    ) -> bool:
        state = CONFIRMED if is_off else FAILED
        record = replace(record, at_us=self._now_us(), extra={**record.extra, "state": state})
        while True:
            try:
                await self._put(key, record, begun, fence)
                stands = (await self._store.read(key)).entries
                break
            except (StoreUnavailable, StoreUnknown):
                await trio.sleep(AGAIN_SECONDS)  # noqa: TID251 - back-off towards the store
        log = _log.warning if is_off else _log.error
        log(Event.FENCE_CONFIRMED if is_off else Event.FENCE_FAILED, database=db,
            backend=record.extra["fenced"]["address"], outcome=record.evidence)
        if stands and _state(stands[0]) == CONFIRMED:
            self._confirmed.setdefault(db, []).append(Fenced.parse(record.extra["fenced"]))
            self.stir()
        return is_off

    async def free(self, db: str) -> int:
        """Frees what is proven by what was confirmed; how many. Raises StoreUnavailable, StoreUnknown."""
        snapshot, freed = await self._ledgers[db].snapshot(), 0
        for case in unknown_cases(snapshot):
            for fenced in self._confirmed.get(db, ()):
                verdict = proof_of_fence(case.session, fenced)
                if isinstance(verdict, Proven):
                    freed += await self._release(db, Release(
                        case.session.permit, verdict.proof, Actor.FENCER, observer=self._host,
                        seen_revision=case.held.mod_revision, exit_revision=case.exit_revision), verdict,
                        case.session)
                    break
        return freed

    async def _release(self, db: str, release: Release, verdict: Proven, session: Session) -> bool:
        outcome = await self._ledgers[db].apply(release)
        if not isinstance(outcome, Applied):
            return False
        _log.warning(Event.PERMIT_RELEASED, database=db, permit=str(session.permit), proof=str(verdict.proof),
                     evidence=verdict.evidence, owner=session.owner, observer=self._host, pid=session.pid)
        for listener in self.on_released:
            listener(db, session)
        return True

    async def _what_goes_off(self, db: str, number: int, backend: Backend) -> Fenced:
        while True:
            try:
                snapshot = await self._ledgers[db].snapshot()
                return what_goes_off(
                    backend, [held.session for held in snapshot.sessions], snapshot.exits, number)
            except (UnknownSchema, ValueError) as fault:
                _log.error(Event.SOMETHING_FAILED, database=db, why=str(fault))
                return Fenced(backend.address, frozenset({backend}))

    def _record(self, db: str, number: int, backend: Backend, fenced: Fenced, state: str) -> Attestation:
        return Attestation(
            who=f"leader {self._host}", what=f"fence_command for {backend.address}, {db} epoch {number}",
            evidence="", at_us=self._now_us(), database=db,
            extra={"state": state, "epoch": number, "fenced": fenced.plain()})

    async def _put(self, key: str, record: Attestation, before: int, *compares: Compare) -> int:
        """The revision it was written at; 0: somebody else wrote there, or a compare does not hold."""
        old = unchanged(key, before) if before else absent(key)
        outcome = await self._store.txn(Txn((old, *compares), (Put(key, record.encode()),)))
        return outcome.revision if isinstance(outcome, Won) else 0

    async def _take_over(self, db: str, fence: Compare) -> None:
        while True:
            try:
                entries = (await self._store.range(self._prefix(db))).entries
                break
            except (StoreUnavailable, StoreUnknown):
                await trio.sleep(AGAIN_SECONDS)  # noqa: TID251 - back-off towards the store
        self._confirmed[db] = []
        for entry in entries:
            try:
                record = Attestation.decode(entry.value)
                fenced, number = Fenced.parse(record.extra["fenced"]), int(record.extra["epoch"])
            except (UnknownSchema, ValueError, KeyError, TypeError) as fault:
                _log.error(Event.SOMETHING_FAILED, database=db, why=f"{entry.key}: {fault}")
                continue
            if _state(entry) == CONFIRMED:
                self._confirmed[db].append(fenced)
            elif _state(entry) == BEGUN:
                await self._begin_again(db, number, entry.key, fenced, fence)
        self.stir()

    async def _begin_again(self, db: str, number: int, key: str, fenced: Fenced, fence: Compare) -> None:
        """Its command may not have come to an end: unless the node is seen to do no harm by now."""
        backend = next(each for each in fenced.servers if self._key(db, each) == key)
        if wants_fencing(self._roles[db], backend, await self._look(backend.address)):
            await self.fence(db, number, backend, fence)

    def _prefix(self, db: str) -> str:
        return self._keys.operator(f"fence:{quote(db, safe='')}:")

    def _key(self, db: str, backend: Backend) -> str:
        """One for each backend's identity."""
        return f"{self._prefix(db)}{quote(backend.address, safe='')}:{backend.postmaster_start_us}"


def _state(entry: Entry) -> str:
    try:
        return str(Attestation.decode(entry.value).extra.get("state", ""))
    except (UnknownSchema, ValueError):
        return ""


def _environment(db: str, backend: Backend) -> dict[str, str]:
    """What the command is told."""
    host, _, port = backend.address.rpartition(":")
    told: dict[str, Any] = {
        "DATABASE": db, "ADDRESS": backend.address, "HOST": host.strip("[]"), "PORT": port,
        "SYSTEM_IDENTIFIER": backend.system_identifier,
    }
    return {f"POOLER_FENCE_{name}": value for name, value in told.items()}
