"""Whose turn it is: by weight, past whoever is at a limit, and at the same cost for any number of tenants."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pooler.admission.ticket import ENDS, TicketState
from tests.admission.yard import Client, Yard, policy

T = TicketState
WIDE = {"permits": 10_000}


def saturate(yard: Yard, clients: list[Client], grants: int, random: Random | None = None,
             seconds: dict[str, float] | None = None) -> Counter[str]:
    """Every client asks again as soon as it is done; how often each tenant was served meanwhile.

    `seconds`: how long a transaction of a tenant lasts; they end in the order of their ends.
    """
    for client in clients:
        yard.ask(client)
    before = Counter(yard.served)
    while (yard.served - before).total() < grants:
        if seconds is None:
            client = random.choice(list(yard.using)) if random is not None else next(iter(yard.using))
        else:
            client = min(yard.using, key=lambda each: each.granted_at + seconds[each.account.tenant])
            yard.now = client.granted_at + seconds[client.account.tenant]
        yard.end(client)
        yard.ask(client)
    return yard.served - before


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=5), size=st.integers(1, 4),
       seed=st.integers(0, 2**32), pools=st.sampled_from([1, 2]))
def test_shares_are_by_weight_whether_sessions_or_permits_are_short(
    weights: list[int], size: int, seed: int, pools: int
) -> None:
    """Two pools: each tenant has its own there, and the class has fewer permits than they have sessions."""
    tenants = {f"t{n}": {"weight": weight} for n, weight in enumerate(weights)}
    if pools == 1:
        yard = Yard(policy({"only": WIDE}, tenants), size)
        clients = [yard.client(name) for name in tenants for _ in range(12)]
    else:
        yard = Yard(policy({"only": {"permits": size}}, tenants), *(size + 1 for _ in tenants))
        clients = [yard.client(name, pool=at) for at, name in enumerate(tenants) for _ in range(12)]
    served = saturate(yard, clients, 200 * sum(weights), Random(seed))
    for name, said in tenants.items():
        assert served[name] == pytest.approx(200 * said["weight"], rel=0.05), served
    yard.check()


def test_a_tenant_with_dear_transactions_has_its_share_of_the_time_if_they_are_charged() -> None:
    seconds = {"long": 4.0, "short": 1.0}
    yard = Yard(policy({"only": WIDE}), 5)
    clients = [yard.client(name) for name in seconds for _ in range(20)]
    for name, each in seconds.items():
        yard.book.account(name, "").cost = each
    served = saturate(yard, clients, 4_000, seconds=seconds)
    assert served["long"] * 4 == pytest.approx(served["short"], rel=0.05)


def test_classes_share_the_sessions_of_a_pool_by_their_permits() -> None:
    yard = Yard(policy({"interactive": {"permits": 30}, "batch": {"permits": 10}}), 4)
    clients = [yard.client(name, name) for name in ("interactive", "batch") for _ in range(20)]
    served = saturate(yard, clients, 4_000, Random(1))
    assert served["interactive"] == pytest.approx(3_000, rel=0.05)


def test_a_class_executes_no_more_than_its_permits_and_the_others_pass() -> None:
    yard = Yard(policy({"interactive": {"permits": 8}, "batch": {"permits": 2}}), 6)
    batch = [yard.asks("b", "batch") for _ in range(10)]
    assert len(yard.using) == 2
    interactive = [yard.asks("i", "interactive") for _ in range(4)]
    assert len(yard.using) == 6, "who has room passes those who lack it"
    assert yard.pools[0].openings_wanted() == 0
    yard.end(interactive[0])
    assert yard.book.classes["batch"].executing == 2
    yard.end(batch[0])
    assert yard.book.classes["batch"].executing == 2
    assert batch[2] in yard.using
    yard.check()


def test_a_waiter_that_lacks_room_in_its_class_opens_no_session() -> None:
    yard = Yard(policy({"batch": {"permits": 1}}), 1)
    core = yard.pools[0]
    core.size_max = core.opening_max = 5
    first = yard.asks("a")
    for _ in range(3):
        yard.asks("a")
    assert core.openings_wanted() == 0
    wanted = []
    core.on_room = lambda: wanted.append(core.openings_wanted())
    core.remove(yard.using.pop(first))
    first.ticket.release()
    yard.settle()
    assert wanted == [1], "there is room for one, and no session"


def test_no_tenant_at_its_limit_holds_up_another() -> None:
    yard = Yard(policy({"only": WIDE}, {"tight": {"inflight": 1}}), 3)
    tight = [yard.asks("tight") for _ in range(50)]
    assert len(yard.using) == 1
    assert yard.pools[0].openings_wanted() == 0
    others = [yard.asks("free") for _ in range(3)]
    assert [each in yard.using for each in others] == [True, True, False]
    yard.end(others[0])
    assert others[2] in yard.using, "the fifty before it are passed over"
    yard.end(others[1])
    assert len(yard.using) == 2
    yard.end(tight[0])
    assert tight[1] in yard.using
    yard.check()
    yard.check_none_waits_in_vain()


def test_a_tenant_below_its_limit_again_is_served_in_whichever_pool_it_waits() -> None:
    yard = Yard(policy({"only": WIDE}, {"tight": {"inflight": 1}}), 1, 1)
    here, there = yard.asks("tight"), yard.asks("tight", pool=1)
    assert there.ticket.waiting
    yard.end(here)
    assert there in yard.using
    yard.check()


def test_room_in_a_class_that_comes_free_in_one_pool_serves_a_waiter_of_another() -> None:
    yard = Yard(policy({"only": {"permits": 1}}), 1, 1)
    here, there, here_too = yard.asks("a"), yard.asks("b", pool=1), yard.asks("a")
    yard.end(here)
    assert there in yard.using, "it lacked room first"
    yard.end(there)
    assert here_too in yard.using
    yard.check()


def test_a_flood_moves_the_wait_of_a_light_tenant_by_less_than_one_transaction() -> None:
    def longest_wait(flood: int) -> float:
        yard = Yard(policy({"only": WIDE}), 4)
        crowd = [yard.client("flood") for _ in range(flood)]
        light = yard.client("light")
        for at, client in enumerate(crowd):
            yard.now = at / len(crowd)  # not in step with each other
            yard.ask(client)
        for turn in range(200):
            client = min(yard.using, key=lambda each: each.granted_at)
            yard.now = max(yard.now, client.granted_at + 1.0)
            yard.end(client)
            if client is not light:
                yard.ask(client)
            if turn % 10 == 0 and light.ticket.state in ENDS:
                yard.ask(light)
        return max(yard.waits["light"])

    assert longest_wait(10_000) - longest_wait(2) < 1.0


def test_a_ticket_above_the_aging_limit_goes_first_the_oldest_before_the_rest() -> None:
    said = {"only": {"permits": 100, "agingLimitSeconds": 5.0}}
    yard = Yard(policy(said, {"heavy": {"weight": 100}}), 1)
    holder = yard.asks("heavy")
    old = [yard.asks("light"), yard.asks("lighter")]
    yard.now = 4.0
    heavy = [yard.asks("heavy") for _ in range(300)]
    yard.now = 6.0
    for expected in (*old, heavy[0]):
        yard.end(holder)
        (holder,) = yard.using
        assert holder is expected
    yard.check()


def test_age_goes_before_the_round_between_pools_too() -> None:
    said = {"only": {"permits": 1, "agingLimitSeconds": 5.0}}
    yard = Yard(policy(said, {"heavy": {"weight": 100}}), 1, 1)
    holder = yard.asks("heavy")
    heavy = [yard.asks("heavy") for _ in range(3)]
    old = yard.asks("light", pool=1)
    yard.now = 4.0
    late = yard.asks("light", pool=1)
    yard.now = 5.5
    for expected in (*heavy, old):  # all are too old; they go as they came
        yard.end(holder)
        (holder,) = yard.using
        assert holder is expected
    yard.end(holder)
    assert late in yard.using


def test_an_aged_ticket_of_a_tenant_at_its_limit_is_passed_and_served_once_it_may() -> None:
    said = {"only": {"permits": 100, "agingLimitSeconds": 5.0}}
    yard = Yard(policy(said, {"tight": {"inflight": 1}}), 2)
    tight, other = yard.asks("tight"), yard.asks("free")
    tight_next, other_next = yard.asks("tight"), yard.asks("free")
    yard.now = 0.5
    last = yard.asks("free")
    yard.now = 6.0
    yard.end(other)
    assert other_next in yard.using
    yard.end(tight)
    assert tight_next in yard.using
    yard.end(other_next)
    assert last in yard.using
    yard.check()


def test_a_full_queue_refuses_at_once_and_nobody_else() -> None:
    yard = Yard(policy({"interactive": {"permits": 1, "maxQueue": 2}, "batch": WIDE}), 1)
    holder = yard.asks("a")
    waiting = [yard.asks("a") for _ in range(2)]
    refused = yard.asks("a")
    assert refused.ticket.state is T.REJECTED
    assert all(each.ticket.waiting for each in waiting)
    other = yard.asks("b", "batch")
    assert other.ticket.waiting
    assert yard.cancel(other)
    assert (refused.account.refused, refused.account.klass.refused) == (1, 1)
    yard.end(holder)
    yard.ask(refused)
    assert refused.ticket.waiting
    yard.check()


def test_a_ticket_waits_no_longer_than_its_class_lets_it() -> None:
    yard = Yard(policy({"only": {"permits": 1, "queueDeadlineSeconds": 9.0, "maxWaitSeconds": 4.0}}), 1)
    yard.asks("a")
    late, patient = yard.client("a"), yard.client("a")
    yard.ask(late, seconds=2.0)
    yard.ask(patient)
    assert yard.pools[0].expired(2.0) == [late.ticket]
    assert yard.pools[0].expired(3.9) == []
    assert yard.pools[0].expired(4.0) == [patient.ticket]
    yard.check()


def test_an_allotment_that_grows_serves_and_one_that_shrinks_takes_nothing_away() -> None:
    yard = Yard(policy({"only": {"permits": 2}}), 4)
    clients = [yard.asks("a") for _ in range(4)]
    klass = yard.book.classes["only"]
    klass.allot(3)
    yard.settle()
    assert len(yard.using) == 3
    klass.allot(1)
    yard.end(clients[0])
    yard.end(clients[1])
    assert len(yard.using) == 1
    yard.end(clients[2])
    assert clients[3] in yard.using
    yard.check()


def test_another_generation_counts_at_once_for_who_executes_and_who_waits() -> None:
    yard = Yard({}, 3)
    clients = [yard.asks(tenant, klass) for tenant, klass in (("a", ""), ("b", "batch"), ("a", ""))]
    waiting = [yard.asks("b", "batch"), yard.asks("a")]
    two = {"interactive": {"permits": 1}, "batch": {"permits": 2}}
    yard.book.learn(policy(two, {"a": {"weight": 3}}, 2))
    yard.check()
    executing = {name: each.executing for name, each in yard.book.classes.items()}
    assert executing == {"interactive": 2, "batch": 1}
    assert clients[0].account.weight == 3
    yard.end(clients[0])
    assert waiting[0] in yard.using, "batch has room, interactive still has one above its permits"
    yard.end(clients[2])
    assert waiting[1] in yard.using
    yard.book.learn(policy({"one": {"permits": 9}}, {}, 3))
    yard.check()
    assert yard.book.classes["one"].executing == 3


def test_what_nobody_uses_is_dropped() -> None:
    yard = Yard(policy({"only": WIDE}), 1)
    holder = yard.asks("stays")
    for n in range(1_000):
        yard.cancel(yard.asks(f"tenant {n}"))
    yard.clients.clear()
    gc.collect()  # a client and its ticket know each other
    client = yard.asks("last")
    assert [each.tenant for each in yard.book.accounts()] == ["last", "stays"]
    yard.end(holder)
    assert client in yard.using
    assert len(yard.pools[0].waiting) == 0


def lines_run(yard: Yard, grants: int) -> int:
    """How many lines of the scheduler run for so many ends of who was served first."""
    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line" and "/admission/" in frame.f_code.co_filename
        return count

    sys.settrace(count)
    try:
        for _ in range(grants):
            yard.end(next(iter(yard.using)))
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("permits", [1, 10_000])
def test_a_grant_takes_as_many_steps_for_10_000_tenants_as_for_10(permits: int) -> None:
    def steps(tenants: int) -> int:
        yard = Yard(policy({"only": {"permits": permits, "agingLimitSeconds": 1e6}}), 1)
        holder = yard.asks("holder")
        clients = [yard.client(f"tenant {n}") for n in range(tenants)]
        for client in clients:
            yard.ask(client)
        lines = lines_run(yard, 10)
        assert holder not in yard.using
        return lines

    assert steps(10_000) == steps(11)


def test_a_grant_takes_as_many_steps_where_clients_waited_before_there_was_a_policy() -> None:
    said = policy({"only": {"permits": 1}})

    def steps(yard: Yard) -> int:
        for _ in range(12):
            yard.asks("a")
        return lines_run(yard, 10)

    early = Yard({}, 1)
    first, second = early.asks("a"), early.asks("a")
    early.end(first)
    early.end(second)
    early.book.learn(said)
    assert steps(early) == steps(Yard(said, 1))
