"""Permits of classes and tenants under any sequence: none is lost, none doubled, nobody waits in vain."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pooler.admission.ticket import ENDS, TicketState
from tests.admission.yard import Client, Yard, policy
from tests.pool.fake_session import FakeSession

T = TicketState
TENANTS = {"a": {"weight": 3}, "b": {"inflight": 1}, "c": {"weight": 2, "inflight": 2}}
INTERACTIVE: dict[str, Any] = {
    "permits": 3, "maxQueue": 5, "agingLimitSeconds": 4.0, "queueDeadlineSeconds": 20.0}
CLASSES: dict[str, dict[str, Any]] = {"interactive": INTERACTIVE, "batch": {"permits": 2}}


def yard_of_all() -> Yard:
    yard = Yard(policy(CLASSES, TENANTS), 3, 2)
    for pool in (0, 1):
        for tenant in (*TENANTS, "d"):
            for klass in CLASSES:
                for _ in range(2):
                    yard.client(tenant, klass, pool)
    return yard


def test_100_000_cancels_exactly_at_the_grant_conserve_every_permit() -> None:
    random = Random(20_261_201)
    yard = yard_of_all()
    cancels = 0
    outcomes: Counter[str] = Counter()
    at = 0
    while cancels < 100_000:
        at += 1
        yard.now += 0.01
        for client in random.sample(yard.clients, 12):
            if client.ticket.state in ENDS:
                yard.ask(client)
        waiting = [client for client in yard.clients if client.ticket.waiting]
        for client in random.sample(list(yard.using), min(len(yard.using), 3)):
            if waiting and random.random() < 0.5:  # before the session is given, and just after
                outcomes["cancelled"] += yard.cancel(random.choice(waiting))
                cancels += 1
            yard.end(client, settle=random.random() < 0.5)
            if waiting:
                victim = random.choice(waiting)
                cancels += 1
                if yard.cancel(victim):
                    outcomes["cancelled"] += 1
                elif victim in yard.using:
                    outcomes["granted"] += 1
        if random.random() < 0.1:
            outcomes["expired"] += sum(len(core.expired(yard.now)) for core in yard.pools)
        if at % 5 == 0:
            yard.settle()
        if at % 500 == 0:
            yard.settle()
            yard.check()
            yard.check_none_waits_in_vain()
    yard.settle()
    for client in list(yard.using):
        yard.end(client)
    while yard.using:
        yard.end(next(iter(yard.using)))
    yard.check()
    assert all(klass.executing == 0 for klass in yard.book.classes.values())
    assert not any(client.ticket.waiting for client in yard.clients)
    assert min(outcomes["cancelled"], outcomes["granted"]) > 1_000, outcomes


class Admission(RuleBasedStateMachine):
    """Two pools, two classes, four tenants: whatever happens, the sums are right and nobody waits in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.yard = yard_of_all()
        self.generation = 1

    def pick(self, data: st.DataObject, clients: list[Client]) -> Client:
        return data.draw(st.sampled_from(clients))

    @rule(data=st.data(), seconds=st.sampled_from([1.0, 1e9]))
    def ask(self, data: st.DataObject, seconds: float) -> None:
        client = self.pick(data, self.yard.clients)
        if client.ticket.state in ENDS:
            self.yard.ask(client, seconds)

    @precondition(lambda self: self.yard.using)
    @rule(data=st.data(), settles=st.booleans())
    def end(self, data: st.DataObject, settles: bool) -> None:
        self.yard.end(self.pick(data, list(self.yard.using)), settle=settles)

    @precondition(lambda self: self.yard.using)
    @rule(data=st.data())
    def lose_the_session_and_open_another(self, data: st.DataObject) -> None:
        client = self.pick(data, list(self.yard.using))
        core = self.yard.pools[client.pool]
        assert core.remove(self.yard.using.pop(client))
        client.ticket.release()
        core.opening += 1
        core.opened(FakeSession(), self.yard.now)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        client = self.pick(data, self.yard.clients)
        waited = client.ticket.waiting
        assert self.yard.cancel(client) is waited

    @rule(seconds=st.sampled_from([0.5, 3.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.yard.now += seconds
        for core in self.yard.pools:
            assert all(ticket.deadline <= self.yard.now for ticket in core.expired(self.yard.now))

    @rule(at=st.sampled_from([0, 1]), paused=st.booleans())
    def pause_or_resume(self, at: int, paused: bool) -> None:
        self.yard.pools[at].paused = paused
        assert self.yard.pools[at].wake(self.yard.now) == []

    @rule(permits=st.integers(0, 4))
    def allot(self, permits: int) -> None:
        next(iter(self.yard.book.classes.values())).allot(permits)

    @rule(permits=st.integers(1, 4), only_one=st.booleans())
    def another_generation(self, permits: int, only_one: bool) -> None:
        self.generation += 1
        two: dict[str, dict[str, Any]] = {**CLASSES, "batch": {"permits": permits}}
        said = {"interactive": {"permits": permits}} if only_one else two
        assert self.yard.book.learn(policy(said, TENANTS, self.generation))
        for core in self.yard.pools:
            core.wake(self.yard.now)

    @rule()
    def settle(self) -> None:
        self.yard.settle()
        self.yard.check_none_waits_in_vain()

    @invariant()
    def the_sums_are_right(self) -> None:
        yard = self.yard
        executing = Counter(client.account for client in yard.using)
        for account in {client.account for client in yard.clients}:
            assert account.executing == executing[account]
        for klass in yard.book.classes.values():
            assert klass.in_use == sum(n for account, n in executing.items() if account.klass is klass)
            assert klass.waiting == sum(client.ticket.waiting and client.account.klass is klass
                                        for client in yard.clients)
        for core in yard.pools:
            core.waiting.check()
            assert core.active == {s for c, s in yard.using.items() if yard.pools[c.pool] is core}

    def teardown(self) -> None:
        for core in self.yard.pools:
            core.paused = False
            core.wake(self.yard.now)
        next(iter(self.yard.book.classes.values())).allot(3)
        self.yard.settle()
        for _ in range(200):
            if not self.yard.using:
                break
            self.yard.end(next(iter(self.yard.using)))
        assert not any(client.ticket.waiting for client in self.yard.clients), "somebody starved"


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
