"""What the simulation is judged by: every write to the keyspace as it happens, and the whole at each round.

The judge reads the simulated truth (which server processes live), which the product never sees.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from coordinator.ledger.invariants import check_ledger, check_server
from coordinator.ledger.keys import prefix_end
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import Alias, Epoch, EpochState, Permit, Session
from coordinator.ledger.rules import session_of
from coordinator.ledger.snapshot import LedgerSnapshot, snapshot_from, snapshot_txn
from coordinator.ledger.states import SessionState
from coordinator.store.api import Entry, Lost, Txn, Won
from coordinator.store.memory import Keyspace
from tests.ledger.ground import FLEET, KEYS
from tests.model.server_world import Process, Servers

WHOLE = snapshot_txn(KEYS, FLEET)
Move = tuple[SessionState, SessionState]


class Fault(AssertionError):
    """A promise was broken; the message has the seed."""


class Judge:
    """Counts, and raises Fault at the first broken promise."""

    def __init__(self, seed: int, servers: Servers, limits: dict[int, Limits]) -> None:
        self.seed = seed
        self.servers = servers
        self.limits = limits
        self.figures: Counter[str] = Counter()
        self.moves: Counter[Move] = Counter()
        self._over: set[Permit] = set()  # released, or left for another slot
        self._slots_max = max(each.main for each in limits.values())

    def broken(self, what: str) -> Fault:
        return Fault(f"seed {self.seed}: {what}")

    # ---- as it happens

    def granted(self, session: Session, keyspace: Keyspace) -> None:
        """A permit came to be: under what stands now, and under nothing else."""
        epoch = Epoch.decode(keyspace.entries[KEYS.epoch()].value)
        alias = Alias.decode(keyspace.entries[KEYS.alias()].value)
        if session.permit in self._over:
            raise self.broken(f"{session.permit} came back")
        if (session.epoch, EpochState.ACTIVE) != (epoch.number, epoch.state):
            raise self.broken(f"I10: {session.permit} of epoch {session.epoch}, {epoch.number} {epoch.state}")
        slots = self.limits[alias.active].main
        beyond = keyspace.read(KEYS.session(session.kind, slots), prefix_end(KEYS.sessions(session.kind)))
        if session.policy_generation != alias.active or beyond:
            raise self.broken(f"I11: {session.permit} granted, {len(beyond)} slots beyond {slots} are held")
        self.figures["grants"] += 1

    def moved(self, old: Session, new: Session) -> None:
        self.moves[old.state, new.state] += 1

    def relocated(self, old: Session, new: Session) -> None:
        """A session left one slot for another, in one transaction."""
        if new.permit in self._over or old.permit in self._over:
            raise self.broken(f"{old.permit} became {new.permit}, and one of them was over")
        if (old.state, new.state) != (SessionState.OPEN, SessionState.OPEN) or old.pid != new.pid:
            raise self.broken(f"{old.permit} of pid {old.pid} became {new.permit} of pid {new.pid}")
        self._over.add(old.permit)
        self.servers.renamed(old.permit, new.permit)
        self.moves[old.state, new.state] += 1
        self.figures["sessions moved"] += 1

    def released(self, old: Session) -> None:
        if old.permit in self._over:
            raise self.broken(f"I4: {old.permit} was released twice")
        if self.servers.lives(old.permit):
            raise self.broken(f"I2: {old.permit} was released while its session lives")
        self._over.add(old.permit)
        self.moves[old.state, SessionState.RELEASED] += 1
        self.figures["releases"] += 1

    def epoch_moved(self, old: Epoch, new: Epoch) -> None:
        if new.number not in (old.number, old.number + 1):
            raise self.broken(f"epoch {old.number} became {new.number}")
        same = new.backend.address == old.backend.address
        if new.number == old.number and not same:
            raise self.broken(f"epoch {old.number} changed its backend")

    def meets(self, keyspace: Keyspace, process: Process) -> None:
        """A process is about to be terminated: not one whose owner came back to it."""
        self.figures["terminated"] += 1
        entry = keyspace.entries.get(KEYS.session(process.permit.kind, process.permit.slot))
        session = session_of(entry) if entry is not None else None
        if session is not None and session.permit == process.permit and session.state is SessionState.OPEN:
            raise self.broken(f"{process.permit} came back and was terminated")

    # ---- as it stands

    def snapshot(self, keyspace: Keyspace) -> LedgerSnapshot:
        outcome = keyspace.txn(WHOLE)
        assert isinstance(outcome, Lost)
        return snapshot_from(outcome.reads, outcome.revision, self.limits)

    def look(self, keyspace: Keyspace, lost: Iterable[bool] = ()) -> LedgerSnapshot:
        """I1, I2, I4 by the functions of the audit. `lost`: what each coordinator thinks of the ledger."""
        snapshot = self.snapshot(keyspace)
        beside = check_server(snapshot, self.servers.rows())
        if any(lost):
            raise self.broken("a coordinator takes a whole ledger for lost")
        found = [*check_ledger(snapshot, KEYS),  # a session that just ended is not one too few
                 *(each for each in beside if each.what != "permit_without_session")]
        if found:
            raise self.broken("; ".join(map(str, found)))
        if self.servers.count() > self._slots_max:
            raise self.broken(f"{self.servers.count()} sessions on {self._slots_max} slots")
        return snapshot


class JudgedKeyspace(Keyspace):
    """The keyspace of the simulation: the judge hears of every write to a slot or to the epoch."""

    def __init__(self, base: Keyspace, judge: Judge) -> None:
        super().__init__()
        self.__dict__.update(base.__dict__)
        self._judge = judge
        self._keys: list[str] | None = None  # in order, until a key comes or goes

    def read(self, start: str, end: str) -> tuple[Entry, ...]:
        """As of any keyspace, without sorting its keys each time."""
        if end == start + "\0":
            entry = self.entries.get(start)
            return (entry,) if entry else ()
        if self._keys is None:
            self._keys = sorted(self.entries)
        first = bisect_left(self._keys, start)
        return tuple(self.entries[key] for key in self._keys[first:bisect_left(self._keys, end, first)])

    def _write(self, txn: Txn) -> None:
        super()._write(txn)
        if txn.deletes or any(self.entries[put.key].create_revision == self.revision for put in txn.puts):
            self._keys = None

    def txn(self, txn: Txn) -> Won | Lost:
        named = (*txn.deletes, *(put.key for put in txn.puts))
        before = {key: self.entries.get(key) for key in named
                  if "/session/" in key or key == KEYS.epoch()}
        outcome = super().txn(txn)
        if isinstance(outcome, Won):
            moved = self._tell_moves(before)
            for key, old in before.items():
                if key not in moved:
                    self._tell(key, old)
        return outcome

    def _tell_moves(self, before: dict[str, Entry | None]) -> set[str]:
        """The keys of sessions that left one slot for another that was free."""
        gone = {session_of(entry).permit: key for key, entry in before.items()
                if entry is not None and key != KEYS.epoch() and key not in self.entries}
        moved: set[str] = set()
        for key, was in before.items():
            if key == KEYS.epoch() or was is not None or key not in self.entries:
                continue
            new = session_of(self.entries[key])
            source = gone.get(new.former_permits[-1]) if new.former_permits else None
            if source is not None and (old := before[source]) is not None:
                self._judge.relocated(session_of(old), new)
                moved |= {key, source}
        return moved

    def _tell(self, key: str, before: Entry | None) -> None:
        now = self.entries.get(key)
        if key == KEYS.epoch():
            assert before is not None
            assert now is not None
            self._judge.epoch_moved(Epoch.decode(before.value), Epoch.decode(now.value))
            return
        old = session_of(before) if before else None
        new = session_of(now) if now else None
        if old is not None and (new is None or new.permit != old.permit):
            self._judge.released(old)
        elif old is not None and new is not None:
            self._judge.moved(old, new)
        if new is not None and (old is None or new.permit != old.permit):
            self._judge.granted(new, self)
