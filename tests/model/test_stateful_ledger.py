"""A ledger under any sequence of commands by two coordinators, with answers lost: what they say is so.

The memory store answers at once, so that the Ledger's coroutines run without a scheduler; a request may get
no answer though it was carried out, was not, or will be later.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from coordinator.ledger.homes import Home
from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.ledger import Applied, Ledger, Voided
from coordinator.ledger.record import Alias, Permit, Session
from coordinator.ledger.rules import (
    Closing,
    Code,
    Command,
    Connecting,
    MarkOwnerGone,
    Open,
    Reassert,
    Refused,
    Release,
    Unknown,
    session_of,
)
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.store.api import Put, Txn
from coordinator.store.faulty import Faults, FaultyStore
from tests.ledger.ground import BACKEND, KEYS, ask, epoch, ledger_on, register, session_keys, write
from tests.model.coordinator_world import DirectStore
from tests.model.judge import Judge, JudgedKeyspace
from tests.model.product_mutants import PRODUCT_MUTANTS
from tests.model.server_world import Servers
from tests.model.world import LIMITS, founded, published

T = TypeVar("T")
OWNERS = ("A", "B")
REQUESTS = tuple(f"r{number}" for number in range(6))
ANSWERS = {
    "answered": Faults(lands=0.0),
    "no answer, carried out": Faults(unknown_applied=1.0, lands=0.0),
    "no answer, not carried out": Faults(unknown_not_applied=1.0, lands=0.0),
    "no answer, still on its way": Faults(unknown_late=1.0, lands=0.0),
    "refused": Faults(unavailable=1.0, lands=0.0),
}
who = st.integers(0, 1)
answers = st.sampled_from([*["answered"] * 4, *ANSWERS])


def run(doing: Coroutine[Any, Any, T]) -> T:
    """Its result; nothing in it may wait."""
    try:
        doing.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits")


class TwoCoordinators(RuleBasedStateMachine):
    """Every write is judged as it happens: released once, never back, granted under what stands."""

    permits = Bundle("permits")
    tamper: Callable[[Txn], Txn] | None = None  # what a mutant does

    def __init__(self) -> None:
        super().__init__()
        self.keyspace = JudgedKeyspace(founded(), Judge(0, Servers(Random(0)), LIMITS))
        direct = DirectStore(self.keyspace, type(self).tamper)
        self.stores = [FaultyStore(direct, Random(number), ANSWERS["answered"]) for number in (0, 1)]
        self.ledgers: list[Ledger] = [
            ledger_on(store, home=Home(number, 2)) for number, store in enumerate(self.stores)]
        self.leases = {owner: register(self.keyspace, owner) for owner in OWNERS}
        self.request_of: dict[Permit, str] = {}

    def ledger(self, number: int, answer: str) -> Ledger:
        self.stores[number].faults = ANSWERS[answer]
        return self.ledgers[number]

    def standing(self, permit: Permit) -> Session | None:
        entry = self.keyspace.entries.get(KEYS.session(permit.kind, permit.slot))
        session = session_of(entry) if entry is not None else None
        return session if session is not None and session.permit == permit else None

    def told(self, request: str) -> bool:
        """Whether its owner knows of a permit of this request that stands."""
        return any(request == of and self.standing(permit) for permit, of in self.request_of.items())

    # ---- requests

    @rule(target=permits, number=who, answer=answers, request=st.sampled_from(REQUESTS))
    def a_permit_is_asked_for(self, number: int, answer: str, request: str) -> Any:
        owner = OWNERS[int(request[1:]) % 2]
        if self.told(request) and KEYS.receipt(request) not in self.keyspace.entries:
            return multiple()  # it has its permit: no worker asks for that again on another lease
        user = "app" if int(request[1:]) < 3 else "batch"
        got = run(self.ledger(number, answer).reserve(ask(request, owner, seats=2, user=user)))
        if isinstance(got, Refused):
            assert got.code in (Code.FULL, Code.SEATS_FULL, Code.LEDGER_UNAVAILABLE, Code.VOIDED)
            return multiple()
        session = self.standing(got.permit)
        assert session is not None
        assert (session.request_id, session.owner) == (request, owner)
        self.request_of[got.permit] = request
        return got.permit

    @rule(number=who, answer=answers, request=st.sampled_from(REQUESTS))
    def a_request_is_given_up(self, number: int, answer: str, request: str) -> None:
        """Only if its permit was never connected, as its owner knows."""
        owner = OWNERS[int(request[1:]) % 2]
        if self.told(request):
            return
        got = run(self.ledger(number, answer).void(request, owner))
        registered = KEYS.worker(owner) in self.keyspace.entries  # else its hello sees to it
        if isinstance(got, Voided) and registered:
            held = {session_of(entry).request_id for key, entry in self.keyspace.entries.items()
                    if key.startswith(KEYS.sessions())}
            assert request not in held

    # ---- permits

    @rule(number=who, answer=answers, permit=permits, closes=st.booleans())
    def a_session_goes_on(self, number: int, answer: str, permit: Permit, closes: bool) -> None:
        before = self.standing(permit)
        command: Command = Closing(permit) if closes else Open(permit, 42, 5_000, BACKEND)
        if before is not None and before.state is SessionState.RESERVED:
            command = Connecting(permit)
        self.carried_out(number, answer, command, {
            Connecting: SessionState.CONNECTING, Closing: SessionState.CLOSING, Open: SessionState.OPEN,
        }[type(command)])

    @rule(number=who, answer=answers, permit=permits, unused=st.booleans())
    def a_permit_is_given_back(self, number: int, answer: str, permit: Permit, unused: bool) -> None:
        proof = Proof.UNUSED if unused else Proof.EOF
        self.carried_out(number, answer, Release(permit, proof, Actor.OWNER), None)

    @rule(number=who, answer=answers, permit=permits, abandoned=st.booleans())
    def nobody_knows_of_it(self, number: int, answer: str, permit: Permit, abandoned: bool) -> None:
        self.carried_out(number, answer, Unknown(permit, abandoned), SessionState.UNKNOWN)

    @rule(number=who, answer=answers, permit=permits)
    def its_owner_still_has_it(self, number: int, answer: str, permit: Permit) -> None:
        before = self.standing(permit)
        got = self.carried_out(number, answer, Reassert(permit), None if before is None else before.state
                               if before.state is not SessionState.UNKNOWN else SessionState.OPEN)
        if isinstance(got, Applied) and got.changed:
            assert before is not None
            assert before.pid
            assert not before.abandoned

    @rule(number=who, answer=answers, permit=permits)
    def a_server_shows_it_gone(self, number: int, answer: str, permit: Permit) -> None:
        self.carried_out(number, answer, Release(permit, Proof.ABSENT, Actor.BACKEND_REAPER), None)

    def carried_out(
        self, number: int, answer: str, command: Command, state: SessionState | None
    ) -> Applied | Refused:
        """Carries the command out, and holds the answer against what then stands."""
        before = self.standing(command.permit)
        got = run(self.ledger(number, answer).apply(command))
        after = self.standing(command.permit)
        if isinstance(got, Applied):
            assert before is not None
            assert (after.state if after else None) == state
        elif got.code is Code.GONE:
            assert after is None
        elif got.settled and answer == "answered":
            assert after == before
        return got

    # ---- what befalls them

    @rule(owner=st.sampled_from(OWNERS))
    def a_lease_ends(self, owner: str) -> None:
        self.keyspace.expire(self.leases[owner])

    @rule(owner=st.sampled_from(OWNERS), number=who)
    def a_worker_says_hello(self, owner: str, number: int) -> None:
        """On a new lease; it lists what it was told of."""
        self.keyspace.expire(self.leases[owner])
        self.leases[owner] = register(self.keyspace, owner)
        run(self.ledger(number, "answered").free_unlisted(owner, list(self.request_of)))

    @rule(number=who, answer=answers)
    def the_leader_sweeps(self, number: int, answer: str) -> None:
        snapshot = run(self.ledger(number, "answered").snapshot())
        for held in snapshot.sessions:
            if held.session.owner not in snapshot.workers:
                self.carried_out(number, answer, MarkOwnerGone(held.permit), SessionState.UNKNOWN)

    @rule(number=who)
    def late_writes_land(self, number: int) -> None:
        run(self.stores[number].land_late())

    @rule(later=st.sampled_from((1, 2)))
    def the_policy_changes(self, later: int) -> None:
        now = Alias.decode(self.keyspace.entries[KEYS.alias()].value).active
        write(self.keyspace, *published(now + later))

    @rule()
    def the_epoch_advances(self) -> None:
        number = run(self.ledger(0, "answered").snapshot()).epoch
        assert number is not None
        write(self.keyspace, Put(KEYS.epoch(), epoch(number.number + 1)))

    # ---- what always holds

    @invariant()
    def the_audit_finds_nothing(self) -> None:
        judge = Judge(0, Servers(Random(0)), LIMITS)
        assert check_ledger(judge.snapshot(self.keyspace), KEYS) == []
        assert not any(ledger.lost for ledger in self.ledgers)

    def teardown(self) -> None:
        """Whatever is on its way lands at last, and everything can be given back."""
        self.late_writes_land(0)
        self.late_writes_land(1)
        for owner in OWNERS:
            self.request_of.clear()
            self.keyspace.expire(self.leases[owner])
        ledger = self.ledger(0, "answered")
        for held in run(ledger.snapshot()).sessions:
            run(ledger.apply(Unknown(held.permit)))
            done = run(ledger.apply(Release(held.permit, Proof.ATTESTED, Actor.OPERATOR)))
            assert isinstance(done, Applied)
        assert session_keys(self.keyspace) == []


TestTwoCoordinators = TwoCoordinators.TestCase
TestTwoCoordinators.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("name", [
    "release without its compare", "writes without the slot's compare", "no receipt's compare"])
def test_a_ledger_without_this_compare_is_found_out(name: str) -> None:
    class Broken(TwoCoordinators):
        tamper = staticmethod(PRODUCT_MUTANTS[name].tamper)  # type: ignore[arg-type]

    unshrunk = settings(max_examples=1_500, stateful_step_count=40, deadline=None, phases=[Phase.generate],
                        derandomize=True, database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=unshrunk)
