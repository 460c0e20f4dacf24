"""Fencing a backend that was left: the operator's command is run once for it; what it confirms frees permits.

Once for each node as it ran (cluster, address, start of its postmaster), however many ledgers were served
there: what was asked and what came of it is kept under `operator/`, written before the command is begun.
Only the leader begins it, once no ledger of the fleet is served there any more, and by a look of just before:
nobody fences a backend that serves, nor a standby. What was begun goes on when the leadership moves, and its
end is written down: the next leader waits for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote

import structlog
import trio

from coordinator.events import Event
from coordinator.fence_command import COMMAND_SECONDS_MAX, Run, environment_for, outcome_of, run_command
from coordinator.following import wants_fencing
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.fence import Fenced, proof_of_fence, what_goes_off
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.proofs import Proven
from coordinator.ledger.record import Backend, Epoch, Session, UnknownSchema, backend_from
from coordinator.ledger.rules import Release
from coordinator.ledger.states import Actor
from coordinator.reach import hosts_present
from coordinator.reaping import unknown_cases
from coordinator.store.api import (
    TXN_OPERATIONS_MAX,
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

AGAIN_SECONDS = 0.5
ELSEWHERE_SECONDS_MAX = COMMAND_SECONDS_MAX + 5.0  # for what another coordinator has begun
BEGUN, CONFIRMED, FAILED = "begun", "confirmed", "failed"

_log = structlog.get_logger("coordinator.fencing")


@dataclass(frozen=True, slots=True)
class _Fence:
    """What is kept of one: of which node, by whose coordinator, and by ledger its epoch and what goes off."""

    state: str
    backend: Backend
    host: str
    ledgers: Mapping[str, tuple[int, Fenced]]

    def record(self, evidence: str, at_us: int) -> Attestation:
        """As it is stored, and shown by the audit."""
        of = ", ".join(f"{db} epoch {number}" for db, (number, _) in self.ledgers.items())
        parts = {db: {"epoch": number, "fenced": fenced.plain()}
                 for db, (number, fenced) in self.ledgers.items()}
        return Attestation(
            f"leader {self.host}", f"fence_command for {self.backend.address}, {of}", evidence, at_us,
            next(iter(self.ledgers)) if len(self.ledgers) == 1 else "",
            extra={"state": self.state, "backend": asdict(self.backend), "host": self.host, "ledgers": parts})

    @classmethod
    def parse(cls, raw: bytes) -> _Fence:
        """Raises UnknownSchema, ValueError, KeyError, TypeError, AttributeError for what is none."""
        stored: Mapping[str, Any] = Attestation.decode(raw).extra
        backend = backend_from(stored["backend"])
        if backend is None:
            raise ValueError("a fence of no backend")
        ledgers = {str(db): (int(part["epoch"]), Fenced.parse(part["fenced"]))
                   for db, part in stored["ledgers"].items()}
        return cls(str(stored["state"]), backend, str(stored["host"]), ledgers)


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
        self._confirmed: dict[str, _Fence] = {}  # by key; what was confirmed once is so for ever
        self._left: dict[str, dict[str, int]] = {}  # by key: which epochs of which ledgers left the node
        self._under_way: set[str] = set()  # keys that somebody of this term is at
        self._running: dict[str, trio.Event] = {}  # keys whose command runs here: until it is written down
        self._told: set[str] = set()
        self._jobs: trio.Nursery | None = None
        self._stirred = trio.Event()
        self.on_released: list[Callable[[str, Session], None]] = []

    def stir(self) -> None:
        """A permit became unknown."""
        self._stirred.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """For ever, whoever leads: what was begun goes on."""
        async with trio.open_nursery() as nursery:
            self._jobs = nursery
            task_status.started()
            await trio.sleep_forever()

    async def lead(self, fence: Compare, pace_seconds: float) -> None:
        """What an earlier leader began comes to its end; what was confirmed frees permits as they turn up."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_over, fence, nursery)
            while True:
                self._stirred = trio.Event()
                for db in self._ledgers:
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
        """Once for this node; whether it is confirmed off. What etcd does not answer is asked again."""
        key = self._key(backend)
        self._left.setdefault(key, {})[db] = number
        if key in self._under_way:
            return False  # whoever is at it sees that this ledger left, too
        self._under_way.add(key)
        began = trio.current_time()
        try:
            while True:
                why = ""
                try:
                    is_off = await self._step(db, backend, key, fence, began)
                    if is_off is not None:
                        return is_off
                except (UnknownSchema, ValueError, KeyError, TypeError, AttributeError) as fault:
                    why = repr(fault)
                except (StoreUnavailable, StoreUnknown):
                    pass
                self._tell(key, Event.SOMETHING_FAILED, why)
                await trio.sleep(AGAIN_SECONDS)  # noqa: TID251 - other processes' facts: read again
        finally:
            self._under_way.discard(key)

    async def _step(
        self, db: str, backend: Backend, key: str, fence: Compare, began: float
    ) -> bool | None:
        """Whether it is confirmed off; None: it cannot be told yet, or nobody may begin yet."""
        if key in self._running:
            await self._running[key].wait()
        entries = (await self._store.read(key)).entries
        found = _Fence.parse(entries[0].value) if entries else None
        if found is not None and found.state != BEGUN:
            return self._remember(key, found)
        if found is not None and await self._is_at_it(found, began):
            return None
        epochs = await self._epochs()
        if db not in epochs or _serves_there(epochs[db][0], backend):
            return False  # it serves again
        served = [each for each, (epoch, _) in epochs.items() if _serves_there(epoch, backend)]
        if served:
            self._tell(key, Event.FENCE_WAITS, f"{backend.address} is the backend of {', '.join(served)}")
            return None
        ledgers = await self._what_goes_off(db, backend, key, found)
        if not wants_fencing("write", backend, await self._look(backend.address)):
            return False
        stands = [unchanged(self._keys.db(each).epoch(), at) for each, (epoch, at) in epochs.items()
                  if each == db or epoch.backend.system_identifier == backend.system_identifier]
        begins = _Fence(BEGUN, backend, self._host, ledgers)
        begun = await self._put(key, begins.record("", self._now_us()),
                                entries[0].mod_revision if entries else 0, fence,
                                *stands[:TXN_OPERATIONS_MAX - 2])
        if not begun:
            return None if await self._leads(fence) else False
        return await self._begin(db, key, begins, begun)

    async def _is_at_it(self, found: _Fence, began: float) -> bool:
        """Whether the coordinator of another host may still be running the command."""
        if found.host == self._host or trio.current_time() - began >= ELSEWHERE_SECONDS_MAX:
            return False  # ours would be known, unless it was that of a process before
        return found.host in await hosts_present(self._store, self._keys)

    async def _begin(self, db: str, key: str, begins: _Fence, begun: int) -> bool:
        """The command and its end, beside whoever asked: the leadership may move meanwhile."""
        assert self._jobs is not None  # `run` runs
        ended = self._running[key] = trio.Event()
        self._jobs.start_soon(self._carry_out, db, key, begins, begun)
        await ended.wait()
        return key in self._confirmed

    async def _carry_out(self, db: str, key: str, begins: _Fence, begun: int) -> None:
        backend = begins.backend
        try:
            _log.warning(Event.FENCE_BEGUN, database=db, backend=backend.address)
            ended = await outcome_of(self._run, self._command, environment_for(db, backend))
            log = _log.warning if ended.is_off else _log.error
            log(Event.FENCE_CONFIRMED if ended.is_off else Event.FENCE_FAILED, database=db,
                backend=backend.address, outcome=ended.how)
            came_of_it = replace(begins, state=CONFIRMED if ended.is_off else FAILED)
            await self._conclude(key, came_of_it, ended.how, begun)
        finally:
            self._running.pop(key).set()

    async def _conclude(self, key: str, came_of_it: _Fence, how: str, begun: int) -> None:
        """Written over what this very run began, whoever leads now; nothing else is written over."""
        record = came_of_it.record(how, self._now_us())
        while True:
            try:
                if not await self._put(key, record, begun):
                    entries = (await self._store.read(key)).entries
                    if not entries or entries[0].value != record.encode():
                        return  # somebody began it anew since
                break
            except (StoreUnavailable, StoreUnknown):
                await trio.sleep(AGAIN_SECONDS)  # noqa: TID251 - back-off towards the store
        self._remember(key, came_of_it)

    def _remember(self, key: str, found: _Fence) -> bool:
        """Whether it was confirmed; what that frees is freed."""
        if found.state == CONFIRMED and key not in self._confirmed:
            self._confirmed[key] = found
            self.stir()
        return found.state == CONFIRMED

    async def free(self, db: str) -> int:
        """Frees what is proven by what was confirmed; how many. Raises StoreUnavailable, StoreUnknown."""
        known = [each.ledgers[db][1] for each in self._confirmed.values() if db in each.ledgers]
        if not known:
            return 0
        snapshot, freed = await self._ledgers[db].snapshot(), 0
        for case in unknown_cases(snapshot):
            for fenced in known:
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

    async def _what_goes_off(
        self, db: str, backend: Backend, key: str, found: _Fence | None
    ) -> dict[str, tuple[int, Fenced]]:
        """By ledger: the epoch that left the node (0: not known), and what ends with it; the one that asks
        first. Raises StoreUnavailable, StoreUnknown, UnknownSchema, ValueError."""
        known = {each: number for each, (number, _) in found.ledgers.items()} if found is not None else {}
        numbers, parts = {**known, **self._left.get(key, {})}, dict[str, tuple[int, Fenced]]()
        for each in (db, *(name for name in self._ledgers if name != db)):
            snapshot, number = await self._ledgers[each].snapshot(), numbers.get(each, 0)
            fenced = what_goes_off(
                backend, [held.session for held in snapshot.sessions], snapshot.exits, number)
            if number or fenced != Fenced(backend.address, frozenset({backend})):
                parts[each] = number, fenced
        return parts

    async def _epochs(self) -> dict[str, tuple[Epoch, int]]:
        """Every ledger of the fleet: its epoch and the revision of that, also where it is none of ours."""
        entries = (await self._store.range(self._keys.epochs())).entries
        return {self._keys.database_of(each.key): (Epoch.decode(each.value), each.mod_revision)
                for each in entries}

    async def _leads(self, fence: Compare) -> bool:
        """Whether this leader is the one still: else somebody else goes on."""
        entries = (await self._store.read(fence.key)).entries
        return [each.create_revision for each in entries] == [fence.revision]

    async def _put(self, key: str, record: Attestation, before: int, *compares: Compare) -> int:
        """The revision it was written at; 0: somebody else wrote there, or a compare does not hold."""
        old = unchanged(key, before) if before else absent(key)
        outcome = await self._store.txn(Txn((old, *compares), (Put(key, record.encode()),)))
        return outcome.revision if isinstance(outcome, Won) else 0

    async def _take_over(self, fence: Compare, nursery: trio.Nursery) -> None:
        while True:
            try:
                entries = (await self._store.range(self._prefix())).entries
                break
            except (StoreUnavailable, StoreUnknown):
                await trio.sleep(AGAIN_SECONDS)  # noqa: TID251 - back-off towards the store
        for entry in entries:
            self._take(entry, fence, nursery)

    def _take(self, entry: Entry, fence: Compare, nursery: trio.Nursery) -> None:
        try:
            found = _Fence.parse(entry.value)
        except (UnknownSchema, ValueError, KeyError, TypeError, AttributeError) as fault:
            _log.error(Event.SOMETHING_FAILED, why=f"{entry.key}: {fault!r}")
            return
        self._remember(entry.key, found)
        asks = next((db for db in found.ledgers if db in self._ledgers), None)
        if found.state == BEGUN and asks is not None and entry.key == self._key(found.backend):
            nursery.start_soon(self.fence, asks, found.ledgers[asks][0], found.backend, fence)

    def _tell(self, key: str, event: Event, why: str) -> None:
        """Once, until it is another."""
        said = f"{key} {why}"
        if why and said not in self._told:
            self._told.add(said)
            _log.warning(event, why=why)

    def _prefix(self) -> str:
        return self._keys.operator("fence-of:")

    def _key(self, backend: Backend) -> str:
        """One for each node as it ran."""
        names = (backend.system_identifier, backend.address, str(backend.postmaster_start_us))
        return self._prefix() + ":".join(quote(each, safe="") for each in names)


def _serves_there(epoch: Epoch, node: Backend) -> bool:
    """Whether a ledger is served at that node, or is about to be."""
    return _is_there(epoch.backend, node) or (epoch.target is not None and _is_there(epoch.target, node))


def _is_there(serves: Backend, node: Backend) -> bool:
    """Whether it is that node, by its address or under another name."""
    same_server = (serves.system_identifier, serves.postmaster_start_us) == (
        node.system_identifier, node.postmaster_start_us)
    return serves.address == node.address or (
        same_server and bool(node.system_identifier) and bool(node.postmaster_start_us))
