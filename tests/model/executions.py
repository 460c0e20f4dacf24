"""Execution permits, explored: one permit, two workers, a leader that is succeeded, a write that comes late.

Every write is the product's own transaction, applied to a map of keys. Worker A does everything: it opens and
closes a session, executes, gives back, is cut off, returns, dies; B is only raised, executes and is done.
Revisions are renumbered by rank, which keeps the states finite and their compares what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from coordinator.ledger.execution import (
    Gift,
    HeldShare,
    Seat,
    Share,
    Shares,
    lower_txn,
    raise_txn,
    registering,
    take_back_txn,
    taken_back,
)
from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.record import Kind, Session, WorkerExit
from coordinator.ledger.snapshot import Died, Held, LedgerSnapshot, Registered
from coordinator.ledger.states import SessionState
from coordinator.store.api import Compare, Entry, Field, Put, Txn, absent
from tests.model.explorer import Step

KEYS: DbKeys = FleetKeys("p", "f").db("d")
A, B = Seat("x", "A"), Seat("x", "B")
PERMITS = 1
SHARE_A, SHARE_B, RAISE = KEYS.share("x", "A"), KEYS.share("x", "B"), KEYS.raised("x")
WORKER_A, WORKER_B, LEADER = KEYS.worker("A"), KEYS.worker("B"), "leader"
NEW, STALE = 20, 30  # a revision that was just written; one that its key has no more
_NONE = Share()


class Value(NamedTuple):
    """What stands under a key."""

    raw: bytes
    create: int
    mod: int


class Seen(NamedTuple):
    """What a leader remembers of its last reading."""

    keys: tuple[tuple[str, Value], ...]
    sessions: int
    is_dead: bool


class State(NamedTuple):
    keys: tuple[tuple[str, Value], ...]
    alive: bool
    sessions: int
    executing: int
    limit: int
    lowering: int  # to which it gives back, -1: nothing; it uses no more than that
    known: int  # the revision of its share that it heard of last
    entry: tuple[Value, bool] | None  # the share as its coordinator read it; is a write on it in doubt
    told: tuple[int, int] | None  # an event on its way: permits, revision
    other: int  # what B executes
    leader: int
    memory: tuple[Seen | None, Seen | None]
    late: tuple[Txn, ...]


@dataclass(frozen=True)
class Rules:
    """Each safeguard; without it the model must find a way to execute too much."""

    compares_share: bool = True
    bumps_raise: bool = True
    registering_rewrites: bool = True
    settles_unknown: bool = True
    ignores_stale_events: bool = True
    stops_before_it_writes: bool = True
    keeps_with_sessions: bool = True
    late_max: int = field(default=1)


@cache
def _share(raw: bytes) -> Share:
    return Share.decode(raw)


@cache
def _snapshot(sessions: int, has_key: bool, is_dead: bool) -> LedgerSnapshot:
    held = tuple(Held(Session(
        Kind.MAIN, slot, 1, SessionState.OPEN, "A", "h", "d", "u", slot, "r", 1, 1), 1)
                 for slot in range(sessions))
    return LedgerSnapshot(
        1, sessions=held, workers={"A": Registered(None, 1, 1)} if has_key else {},  # type: ignore[arg-type]
        exits={"A": Died(WorkerExit("A", "", "h", 1), 1)} if is_dead else {})


def _shares(seen: Seen) -> Shares:
    keys = dict(seen.keys)
    held = {seat: HeldShare(_share(value.raw), value.mod)
            for seat, key in ((A, SHARE_A), (B, SHARE_B)) if (value := keys.get(key)) is not None}
    raised = {"x": (0, keys[RAISE].mod)} if RAISE in keys else {}
    workers = {name: keys[key].create for name, key in (("A", WORKER_A), ("B", WORKER_B)) if key in keys}
    return Shares(1, held=held, raised=raised, workers=workers)


class Executions:
    """The model."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()

    def initial(self) -> State:
        keys = {WORKER_A: Value(b"w", 1, 1), WORKER_B: Value(b"w", 1, 1), LEADER: Value(b"0", 1, 1)}
        return State(tuple(sorted(keys.items())), True, 0, 0, 0, -1, 0, None, None, 0, 0, (None, None), ())

    # ---- the store

    def _apply(self, state: State, txn: Txn) -> State | None:
        keys = dict(state.keys)
        for each in txn.compares:
            value = keys.get(each.key)
            found = 0 if value is None else value.create if each.field is Field.CREATE else value.mod
            if found != each.revision and not self._is_left_out(each):
                return None
        revision = NEW
        for put in txn.puts:
            before = keys.get(put.key)
            raw = b"" if put.key == RAISE else put.value
            is_counted = put.key in (WORKER_A, WORKER_B, LEADER)  # by their first revision
            keys[put.key] = Value(raw, before.create if before and is_counted else revision, revision)
        for key in txn.deletes:
            keys.pop(key, None)
        return state._replace(keys=tuple(sorted(keys.items())))

    def _is_left_out(self, compare: Compare) -> bool:
        if compare.key == RAISE:
            return not self.rules.bumps_raise
        return compare.key in (SHARE_A, SHARE_B) and not self.rules.compares_share

    def _normal(self, state: State) -> State:
        """Of a revision it matters whether its key still has it; of those that A knows also their order."""
        now, mine = dict(state.keys), {state.known}
        if SHARE_A in now:
            mine.add(now[SHARE_A].mod)
        if state.told:
            mine.add(state.told[1])
        rank = {number: at + 1 for at, number in enumerate(sorted(mine))}

        def current(key: str) -> int:
            return rank[now[key].mod] if key == SHARE_A else 1

        def renumbered(key: str, found: int, field: Field) -> int:
            value = now.get(key)
            if found == 0 or value is None:
                return found and STALE
            return current(key) if found == (value.create if field is Field.CREATE else value.mod) else STALE

        late = []
        for txn in state.late:
            compares = tuple(Compare(each.key, each.field, renumbered(each.key, each.revision, each.field))
                             for each in txn.compares)
            if all(each.revision != STALE or self._is_left_out(each) for each in compares):
                late.append(Txn(compares, txn.puts, txn.deletes))
        first, second = (self._seen(each, renumbered) for each in state.memory)
        entry = state.entry and (Value(state.entry[0].raw, 1, renumbered(
            SHARE_A, state.entry[0].mod, Field.MOD)), state.entry[1])
        return state._replace(
            keys=tuple((key, Value(value.raw, current(key), current(key))) for key, value in state.keys),
            known=rank[state.known], entry=entry, memory=(first, second), late=tuple(late),
            told=state.told and (state.told[0], rank[state.told[1]]))

    def _seen(self, seen: Seen | None, renumbered: Callable[[str, int, Field], int]) -> Seen | None:
        """What a leader remembers, as far as a write could still stand on it."""
        if seen is None:
            return None
        keys = {key: Value(value.raw, renumbered(key, value.create, Field.CREATE),
                           renumbered(key, value.mod, Field.MOD)) for key, value in seen.keys}
        if keys[LEADER].create == STALE:
            return None
        return seen._replace(keys=tuple(keys.items()))

    # ---- steps

    def steps(self, state: State) -> Iterator[Step[State]]:
        for label, after, heals in self._all(state):
            yield label, self._normal(after), heals, None

    def _all(self, state: State) -> Iterator[tuple[str, State, bool]]:
        keys = dict(state.keys)
        yield from self._others(state, keys)
        if WORKER_A in keys:
            yield "A's lease ends", self._without(state, WORKER_A), not state.alive
        if not state.alive:
            if WORKER_A not in keys and state.sessions:
                left = state.sessions - 1
                yield ("a session of the dead A is proven gone",
                       state._replace(sessions=left, executing=min(state.executing, left)), True)
        else:
            yield "A dies", state._replace(alive=False, lowering=-1, entry=None, told=None, limit=0), False
            yield from self._worker(state, keys)
        yield from self._leaders(state)
        for txn in state.late:
            rest = state._replace(late=tuple(each for each in state.late if each is not txn))
            landed = self._apply(rest, txn)
            if landed is not None:
                yield "the late write lands", landed, True
            yield "the late write is lost", rest, True

    def _without(self, state: State, key: str) -> State:
        return state._replace(keys=tuple(each for each in state.keys if each[0] != key))

    def _others(self, state: State, keys: Mapping[str, Value]) -> Iterator[tuple[str, State, bool]]:
        """B hears at once and has a session."""
        limit = _share(keys[SHARE_B].raw).permits if SHARE_B in keys else 0
        if state.other < limit:
            yield "B executes", state._replace(other=state.other + 1), False
        if state.other:
            yield "B is done", state._replace(other=state.other - 1), True

    def _worker(self, state: State, keys: Mapping[str, Value]) -> Iterator[tuple[str, State, bool]]:
        registered = WORKER_A in keys
        if registered and not state.sessions:
            yield "A opens a session", state._replace(sessions=1), False
        if state.sessions > state.executing:
            yield "A closes a session", state._replace(sessions=0), False
        if state.executing < min(state.limit, state.sessions):
            yield "A executes", state._replace(executing=1), False
        if state.executing:
            yield "A is done", state._replace(executing=0), True
        if not registered:
            yield "A registers again", self._register(state, keys), True
        else:
            yield from self._hearing(state, keys)
            yield from self._giving_back(state, keys)

    def _register(self, state: State, keys: Mapping[str, Value]) -> State:
        entries = [Entry(SHARE_A, keys[SHARE_A].raw, keys[SHARE_A].create, keys[SHARE_A].mod)
                   ] if SHARE_A in keys else []
        compares, puts = registering(entries, {("d", "x"): state.executing}, KEYS)
        if not self.rules.registering_rewrites:
            compares, puts = [], []
        after = self._apply(state, Txn((absent(WORKER_A), *compares), (Put(WORKER_A, b"w"), *puts)))
        assert after is not None
        now = dict(after.keys)
        share = _share(now[SHARE_A].raw) if SHARE_A in now else _NONE
        revision = now[WORKER_A].mod if self.rules.registering_rewrites else state.known
        limit = min(share.permits, state.executing) if self.rules.registering_rewrites else state.limit
        return after._replace(limit=limit, lowering=-1, entry=None, known=revision)

    def _hearing(self, state: State, keys: Mapping[str, Value]) -> Iterator[tuple[str, State, bool]]:
        if state.told is None and SHARE_A in keys:
            told = _share(keys[SHARE_A].raw).permits, keys[SHARE_A].mod
            yield "A's share is told", state._replace(told=told), True
        if state.told is not None:
            permits, revision = state.told
            heard = state._replace(told=None)
            if not self.rules.ignores_stale_events or (state.lowering < 0 and revision > state.known):
                heard = heard._replace(limit=permits, known=max(revision, state.known))
            yield "A hears of its share", heard, True

    def _giving_back(self, state: State, keys: Mapping[str, Value]) -> Iterator[tuple[str, State, bool]]:
        if state.lowering < 0:
            if state.limit > 0 and (not state.executing or not self.rules.stops_before_it_writes):
                limit = 0 if self.rules.stops_before_it_writes else state.limit
                yield "A stops, to give back", state._replace(lowering=0, limit=limit), False
            return
        if state.entry is None:
            entry = keys.get(SHARE_A)
            if entry is None or _share(entry.raw).permits <= state.lowering:
                settled = max((each.mod for each in (entry,) if each), default=state.known)
                yield "it is given back", state._replace(lowering=-1, limit=0, known=settled), True
            else:
                yield "A's share is read", state._replace(entry=(entry, False)), True
            return
        read, in_doubt = state.entry
        txn = lower_txn(A, Entry(SHARE_A, read.raw, read.create, read.mod), state.lowering, KEYS)
        assert txn is not None
        after = self._apply(state, txn)
        if in_doubt and not self.rules.settles_unknown and keys.get(SHARE_A) == read:
            lost = state._replace(entry=None, lowering=-1, limit=_share(read.raw).permits)
            yield "A takes the unknown write for lost", lost, True
            return
        yield "A gives back", (after or state)._replace(entry=None), True
        if len(state.late) < self.rules.late_max:
            late = replace(txn, reads=())
            yield "A gives back=unknown", state._replace(entry=(read, True), late=(*state.late, late)), False

    def _leaders(self, state: State) -> Iterator[tuple[str, State, bool]]:
        for number in (0, 1):
            seen = state.memory[number]
            fresh = Seen(state.keys, state.sessions, not state.alive)
            if state.leader == number and seen != fresh:
                yield f"leader{number} reads", self._remember(state, number, fresh), True
            if seen is not None:
                yield from self._leading(state, number, seen)
        if state.leader == 0:
            after = self._apply(self._without(state, LEADER), Txn((), (Put(LEADER, b"1"),)))
            assert after is not None
            yield "leader1 is elected", after._replace(leader=1), False

    def _leading(self, state: State, number: int, seen: Seen) -> Iterator[tuple[str, State, bool]]:
        shares, keys = _shares(seen), dict(seen.keys)
        fence = Compare(LEADER, Field.CREATE, keys[LEADER].create)
        writes = []
        if shares.given("x") < PERMITS:
            writes += [(f"raises {seat.boot_id}", raise_txn(fence, shares, {seat: Gift(1)}, "x", KEYS))
                       for seat in (A, B) if seat.boot_id in shares.workers]
        sessions = seen.sessions if self.rules.keeps_with_sessions else 0
        left = taken_back(_snapshot(sessions, WORKER_A in keys, seen.is_dead),
                          {A: shares.held[A]} if A in shares.held else {})
        if left:
            writes.append(("takes back A's", take_back_txn(fence, shares.held, left, KEYS)))
        for what, txn in writes:
            after = self._apply(state, txn)
            heals = "takes" in what
            yield f"leader{number} {what}", self._remember(after or state, number, None), heals
            if len(state.late) < self.rules.late_max:
                late = state._replace(late=(*state.late, txn))
                yield f"leader{number} {what}=unknown", self._remember(late, number, None), False

    def _remember(self, state: State, number: int, seen: Seen | None) -> State:
        memory = (seen, state.memory[1]) if number == 0 else (state.memory[0], seen)
        return state._replace(memory=memory)

    # ---- what must hold

    def violation(self, state: State) -> str | None:
        if state.executing + state.other > PERMITS:
            return "I7: more execute than there are permits"
        keys = dict(state.keys)
        if sum(_share(keys[key].raw).permits for key in (SHARE_A, SHARE_B) if key in keys) > PERMITS:
            return "more is given than there is"
        return None

    def is_good(self, state: State) -> bool:
        """Nothing is on its way; the dead have nothing, the living use what the ledger says."""
        keys = dict(state.keys)
        has = _share(keys[SHARE_A].raw).permits if SHARE_A in keys else 0
        if state.late or state.lowering >= 0:
            return False
        return state.limit == has if state.alive else not (has or state.sessions)
