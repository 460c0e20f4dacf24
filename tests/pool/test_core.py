"""Who gets which session: nothing lost, nothing doubled, first come first served."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pooler.admission.ticket import ENDS, Ticket, TicketState
from pooler.pool.core import PoolCore
from tests.pool.fake_session import FakeSession

T = TicketState
SIZE_MAX, OPENING_MAX = 4, 2


@dataclass(eq=False)
class Waiter:
    """One client and its one ticket."""

    number: int
    granted: list[FakeSession] = field(default_factory=list)
    ticket: Ticket = field(init=False)

    def __post_init__(self) -> None:
        self.ticket = Ticket(self.granted.append, lambda error: None, self)


def core_with(sessions: int) -> tuple[PoolCore[FakeSession], list[FakeSession]]:
    core: PoolCore[FakeSession] = PoolCore(max(sessions, 1), OPENING_MAX)
    made = [FakeSession() for _ in range(sessions)]
    for session in made:
        core.opening += 1
        assert core.opened(session, 0.0)
    return core, made


def started(now: float = 0.0, deadline: float = 1e9) -> Waiter:
    waiter = Waiter(0)
    waiter.ticket.start(now, deadline)
    return waiter


def test_a_client_that_cancels_and_asks_again_goes_to_the_end_of_the_queue() -> None:
    core, (session,) = core_with(1)
    holder, first, second = started(), started(), started()
    assert core.request(holder.ticket) is session
    core.request(first.ticket)
    core.request(second.ticket)
    assert core.withdraw(first.ticket, T.CANCELLED)
    first.ticket.start(1.0, 1e9)
    core.request(first.ticket)
    assert core.count_waiting() == 2
    holder.ticket.release()
    core.give(session, 1.0)
    assert (second.granted, first.granted) == ([session], [])


def test_an_ended_wait_does_not_stand_in_the_way_of_an_idle_session() -> None:
    core, (session,) = core_with(1)
    core.paused = True
    gone, next_one = started(), started()
    core.request(gone.ticket)
    core.withdraw(gone.ticket, T.CANCELLED)
    core.paused = False
    assert core.request(next_one.ticket) is session


def test_waiters_that_left_ask_for_no_session() -> None:
    core: PoolCore[FakeSession] = PoolCore(10, 10)
    waiters = [started() for _ in range(5)]
    for waiter in waiters:
        core.request(waiter.ticket)
    for waiter in waiters[1:]:
        core.withdraw(waiter.ticket, T.CANCELLED)
    assert core.openings_wanted() == 1


def test_two_of_two_held_the_third_waits_until_its_time_is_over_and_one_end_serves_the_next() -> None:
    core, _ = core_with(2)
    one, two, three, four = started(), started(), started(0.0, 5.0), started(0.0, 99.0)
    held = core.request(one.ticket)
    assert held is not None
    assert core.request(two.ticket) is not None
    assert core.request(three.ticket) is None
    assert core.request(four.ticket) is None
    assert core.openings_wanted() == 0
    assert core.expired(4.9) == []
    assert core.expired(5.0) == [three.ticket]
    assert three.ticket.state is T.QUEUE_EXPIRED
    one.ticket.release()
    assert core.give(held, 6.0)
    assert four.granted == [held]
    assert core.total == 2


def test_shed_sessions_leave_as_they_come_back_and_the_rest_is_kept() -> None:
    core, sessions = core_with(3)
    waiters = [started() for _ in sessions]
    held = [core.request(waiter.ticket) for waiter in waiters]
    core.shed = 2
    kept = [core.give(session, 0.0) for session in held if session is not None]
    assert kept == [False, False, True]
    assert len(core.idle) == 1


def test_a_session_of_another_epoch_or_generation_or_past_its_time_serves_nobody() -> None:
    for change in ({"epoch": 1}, {"generation": 1}, {"expires_at": 5.0}):
        core, _ = core_with(0)
        waiter = started()
        core.request(waiter.ticket)
        assert not core.give(FakeSession(**change), 5.0)
        assert waiter.granted == []
        assert waiter.ticket.waiting


def test_no_session_ends_by_age_while_no_successor_could_be_had() -> None:
    core, (session,) = core_with(1)
    session.expires_at = 5.0
    core.ages = False
    holder = started()
    assert core.request(holder.ticket) is session
    holder.ticket.release()
    assert core.give(session, 6.0)
    core.ages = True
    assert core.request(started().ticket) is session
    assert not core.give(session, 6.0)


def test_100_000_cancels_at_the_very_instant_of_the_grant_lose_and_double_nothing() -> None:
    random = Random(20_261_130)
    core, sessions = core_with(2)
    waiters = [Waiter(n) for n in range(6)]
    outcomes: Counter[str] = Counter()
    holding: dict[Waiter, FakeSession] = {}
    starts = 0
    for now in range(100_000):
        for waiter in waiters:
            if waiter.ticket.state in ENDS and random.random() < 0.7:
                waiter.ticket.start(float(now), now + random.choice([0.0, 1.0, 1e9]))
                starts += 1
                session = core.request(waiter.ticket)
                if session is not None:
                    holding[waiter] = session
                    outcomes["granted"] += 1
        moves: list[tuple[str, Any]] = [("end", w) for w in list(holding) if random.random() < 0.6]
        moves += [("cancel", w) for w in waiters if random.random() < 0.5]
        moves += [("expire", None)] if random.random() < 0.3 else []
        random.shuffle(moves)
        for move, waiter in moves:
            if move == "end":
                waiter.ticket.release()
                assert core.give(holding.pop(waiter), float(now))
            elif move == "cancel" and core.withdraw(waiter.ticket, T.CANCELLED):
                outcomes["cancelled"] += 1
            elif move == "expire":
                outcomes["expired"] += len(core.expired(float(now)))
            for other in waiters:
                for session in other.granted:
                    holding[other] = session
                    outcomes["granted"] += 1
                other.granted.clear()
        core.check()
        assert len(core.idle) + len(core.active) == 2
        assert sorted(map(id, holding.values())) == sorted(map(id, core.active))
        assert sum(outcomes.values()) == starts - core.count_waiting()
    assert set(sessions) == core.active | set(core.idle)
    assert min(outcomes.values()) > 1_000, outcomes


class Core(RuleBasedStateMachine):
    """A model beside it: every session is in one place, every start has one outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.core: PoolCore[FakeSession] = PoolCore(SIZE_MAX, OPENING_MAX)
        self.now = 0.0
        self.waiters = [Waiter(n) for n in range(8)]
        self.queue: list[Waiter] = []
        self.holding: dict[Waiter, FakeSession] = {}
        self.idle: set[FakeSession] = set()
        self.closing = 0
        self.starts = self.outcomes = 0

    def take_grants(self) -> None:
        granted = [w for w in self.waiters if w.granted]
        in_order = [w for w in self.queue if w in granted]
        assert in_order == self.queue[: len(in_order)], "first come, first served"
        for waiter in granted:
            (session,) = waiter.granted
            waiter.granted.clear()
            self.queue.remove(waiter)
            self.holding[waiter] = session
            self.idle.discard(session)
            self.outcomes += 1
            assert session.epoch == self.core.epoch

    def closed(self, session: FakeSession) -> None:
        self.idle.discard(session)
        self.core.closing += 1
        self.closing += 1

    def free_waiters(self) -> list[Waiter]:
        return [w for w in self.waiters if w.ticket.state in ENDS]

    @precondition(lambda self: self.free_waiters())
    @rule(data=st.data(), patience=st.sampled_from([0.0, 1.0, 5.0, 1e9]))
    def request(self, data: st.DataObject, patience: float) -> None:
        waiter = data.draw(st.sampled_from(self.free_waiters()))
        promised = waiter.ticket.promised
        waiter.ticket.start(self.now, self.now + patience)
        self.starts += 1
        session = self.core.request(waiter.ticket)
        assert session is None or promised not in self.idle or session is promised
        if session is None:
            self.queue.append(waiter)
        else:
            assert not self.queue
            self.idle.remove(session)
            self.holding[waiter] = session
            self.outcomes += 1

    @precondition(lambda self: self.free_waiters())
    @rule(data=st.data())
    def promise(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.free_waiters()))
        if waiter.ticket.promised is None:
            waiter.ticket.promised = self.core.promise()
            promised = [each.ticket.promised for each in self.waiters if each.ticket.promised is not None]
            assert len(promised) == len(set(promised)), "no two are told of one"

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(list(self.holding)))
        session = self.holding.pop(waiter)
        waiter.ticket.release()
        self.idle.add(session)
        if not self.core.give(session, self.now):
            self.closed(session)
        self.take_grants()

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def lost(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(list(self.holding)))
        session = self.holding.pop(waiter)
        waiter.ticket.release()
        assert self.core.remove(session)
        assert not self.core.remove(session)
        self.closed(session)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def lost_idle(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.idle, key=id)))
        assert self.core.remove(session)
        self.closed(session)

    @rule()
    def grow(self) -> None:
        wanted = self.core.openings_wanted()
        assert wanted <= max(0, SIZE_MAX - self.core.total)
        assert wanted <= len(self.queue)
        self.core.opening += wanted
        assert self.core.opening <= OPENING_MAX

    @precondition(lambda self: self.core.opening)
    @rule(lifetime=st.sampled_from([2.0, 1e9]))
    def opened(self, lifetime: float) -> None:
        session = FakeSession(self.core.epoch, self.core.generation, self.now + lifetime)
        self.idle.add(session)
        if not self.core.opened(session, self.now):
            self.closed(session)
        self.take_grants()

    @precondition(lambda self: self.core.opening)
    @rule()
    def open_failed(self) -> None:
        self.core.open_failed()

    @precondition(lambda self: self.closing)
    @rule()
    def close_done(self) -> None:
        self.core.closing -= 1
        self.closing -= 1

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiters))
        waited = waiter in self.queue
        assert self.core.withdraw(waiter.ticket, T.CANCELLED) is waited
        if waited:
            self.queue.remove(waiter)
            self.outcomes += 1

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = self.core.expired(self.now)
        assert {t.holder for t in late} == {w for w in self.queue if w.ticket.deadline <= self.now}
        self.outcomes += len(late)
        self.queue = [w for w in self.queue if w.ticket.deadline > self.now]

    @rule()
    def reject_all(self) -> None:
        assert [t.holder for t in self.core.reject_all()] == self.queue
        self.outcomes += len(self.queue)
        self.queue.clear()

    @rule(paused=st.booleans(), serving=st.booleans())
    def block(self, paused: bool, serving: bool) -> None:
        self.core.paused, self.core.serving = paused, serving
        self.wake()

    @rule()
    def epoch_advances(self) -> None:
        self.core.epoch += 1
        self.wake()

    @rule()
    def reconnect(self) -> None:
        self.core.generation += 1
        self.wake()

    def wake(self) -> None:
        for session in self.core.retire_idle(self.now, float("-inf"), 0):
            self.closed(session)
        for session in self.core.wake(self.now):
            self.closed(session)
        self.take_grants()

    @rule(count=st.integers(1, 3))
    def shed(self, count: int) -> None:
        self.core.shed = min(len(self.core.active), count)

    @rule(wanted=st.integers(1, 3))
    def close_idle(self, wanted: int) -> None:
        longest = min((s.idle_since for s in self.idle), default=0.0)
        taken = self.core.take_idle(wanted)
        assert len(taken) == min(wanted, len(self.idle))
        assert not taken or taken[0].idle_since == longest
        for session in taken:
            self.closed(session)

    @rule(idle_before=st.sampled_from([0.0, 1.0, 3.0]), keep=st.integers(0, 2))
    def retire_idle(self, idle_before: float, keep: int) -> None:
        for session in self.core.retire_idle(self.now, idle_before, keep):
            assert not self.core.usable(session, self.now) or session.idle_since < idle_before
            self.closed(session)

    @invariant()
    def it_holds_together(self) -> None:
        core = self.core
        core.check()
        assert set(core.idle) == self.idle
        assert core.active == set(self.holding.values())
        assert len(self.holding) == len(set(self.holding.values()))
        assert core.total == len(self.idle) + len(self.holding) + core.opening + self.closing
        assert core.total <= SIZE_MAX
        assert self.outcomes == self.starts - len(self.queue)
        assert [t.holder for t in core.waiting] == self.queue
        assert core.count().waiting == len(self.queue)

    @invariant()
    def nobody_waits_beside_an_idle_session(self) -> None:
        assert self.core.blocked or not (self.idle and self.queue)


TestCore = Core.TestCase
TestCore.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_session_that_broke_does_for_one_that_was_to_be_given_up() -> None:
    core, (one, two) = core_with(2)
    for _ in range(2):
        core.request(started().ticket)
    core.shed = 2
    core.remove(one)
    assert core.shed == 1
    core.remove(two)
    core.opening += 1
    assert core.opened(FakeSession(), 0.0)
