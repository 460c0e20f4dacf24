"""Who may try next, and who is asked to make room."""

from __future__ import annotations

from collections import Counter

from coordinator.ledger.rules import Code
from coordinator.waiting import Asks, Holding, Pool, Queue, Round, Waiter, choose_idle, choose_shed

POOL, OTHER = Pool("db", "shop", "app"), Pool("db", "shop", "batch")
LIVE = frozenset({"w0", "w1", "w2"})


def waiter(boot_id: str = "w0", pool: Pool = POOL, reason: Code = Code.FULL) -> Waiter:
    return Waiter(boot_id, pool, reason)


def test_the_worker_with_the_most_sessions_of_the_pool_is_asked_first() -> None:
    held = {Holding("w1", POOL): 4, Holding("w2", POOL): 6, Holding("w2", OTHER): 9}
    assert choose_shed(waiter(), held, Counter(), LIVE) == Holding("w2", POOL)


def test_nobody_is_asked_who_would_then_have_less_than_the_asker() -> None:
    held = {Holding("w0", POOL): 4, Holding("w1", POOL): 5}
    assert choose_shed(waiter(), held, Counter(), LIVE) is None


def test_sheds_converge_to_even_shares_without_going_back_and_forth() -> None:
    held = {Holding("w0", POOL): 0, Holding("w1", POOL): 9}
    moves = 0
    for asker in ("w0", "w1") * 20:
        chosen = choose_shed(waiter(asker), held, Counter(), LIVE)
        if chosen is not None:
            held[chosen] -= 1
            held[Holding(asker, POOL)] += 1
            moves += 1
    assert sorted(held.values()) == [4, 5]
    assert moves == 4


def test_who_has_nothing_gets_the_only_session_of_another() -> None:
    for asker, holder in ((POOL, OTHER), (POOL, POOL)):
        held = {Holding("w1", holder): 1}
        assert choose_shed(waiter(pool=asker), held, Counter(), LIVE) == Holding("w1", holder)
        assert choose_shed(waiter(pool=asker), held, Counter(held), LIVE) is None
        assert choose_shed(waiter(pool=asker), held, Counter(), LIVE, coming=1) is None


def test_for_an_idle_session_each_other_worker_is_asked_in_its_turn_the_own_pool_first() -> None:
    held = {Holding("w0", POOL): 2, Holding("w1", OTHER): 9, Holding("w1", POOL): 1, Holding("w2", POOL): 3,
            Holding("dead", POOL): 5}
    asked = [choose_idle(waiter(), held, LIVE, turn) for turn in range(4)]
    assert asked == [Holding("w1", POOL), Holding("w2", POOL), Holding("w1", OTHER), Holding("w1", POOL)]
    own = {choose_idle(waiter(reason=Code.SEATS_FULL), held, LIVE, turn) for turn in range(4)}
    assert own == {Holding("w1", POOL), Holding("w2", POOL)}
    assert choose_idle(waiter(), {Holding("w0", POOL): 2}, LIVE, 0) is None


def test_what_was_asked_for_already_counts_as_given() -> None:
    held = {Holding("w1", POOL): 3}
    assert choose_shed(waiter(), held, Counter({Holding("w1", POOL): 1}), LIVE) == Holding("w1", POOL)
    assert choose_shed(waiter(), held, Counter({Holding("w1", POOL): 3}), LIVE) is None


def test_what_is_coming_to_the_asker_counts_as_held() -> None:
    held = {Holding("w0", POOL): 10, Holding("w1", POOL): 13}
    one = Counter({Holding("w1", POOL): 1})
    assert choose_shed(waiter(), held, one, LIVE) == Holding("w1", POOL)
    assert choose_shed(waiter(), held, one, LIVE, coming=1) is None


def test_an_ask_outlives_its_waiter_until_it_is_given_too_old_or_its_worker_is_lost() -> None:
    asks, gone, holder = Asks(), waiter(), Holding("w1", POOL)
    asks.add(holder, gone, 0.0)
    assert asks.waits(gone)
    asks.keep(LIVE, 29.0)
    assert (asks.coming(waiter().holding), asks.by_holder()) == (1, Counter({holder: 1}))
    asks.given(Holding("w2", POOL))
    assert asks.waits(gone)
    asks.given(holder)
    assert not asks.waits(gone)
    for reachable, now in ((LIVE, 30.0), (frozenset({"w0"}), 1.0)):
        asks.add(holder, gone, 0.0)
        asks.keep(reachable, now)
        assert not asks.by_holder()


def test_another_pool_makes_room_for_want_of_a_slot_but_not_for_want_of_a_seat() -> None:
    held = {Holding("w0", OTHER): 10}
    assert choose_shed(waiter(), held, Counter(), LIVE) == Holding("w0", OTHER)
    assert choose_shed(waiter(reason=Code.SEATS_FULL), held, Counter(), LIVE) is None


def test_a_worker_without_a_link_is_not_asked() -> None:
    assert choose_shed(waiter(), {Holding("w1", POOL): 9}, Counter(), frozenset({"w0"})) is None


def test_a_waiter_for_a_seat_holds_up_only_its_own_pool() -> None:
    queue = Queue()
    queue.join(waiter(reason=Code.SEATS_FULL))
    assert queue.reason_before(POOL) is Code.SEATS_FULL
    assert queue.reason_before(OTHER) is None
    queue.join(waiter(reason=Code.FULL))
    assert queue.reason_before(OTHER) is Code.FULL


def test_in_one_round_a_full_ledger_stops_all_and_a_full_pool_only_its_own() -> None:
    this = Round()
    this.refused(waiter(), Code.SEATS_FULL)
    assert not this.may_try(waiter())
    assert this.may_try(waiter(pool=OTHER))
    this.refused(waiter(pool=OTHER), Code.FULL)
    assert not this.may_try(waiter(pool=OTHER))


def test_the_oldest_comes_first_and_one_that_left_is_skipped() -> None:
    queue, first, second = Queue(), waiter(), waiter()
    queue.join(first)
    queue.join(second)
    assert next(iter(queue)) is first
    queue.leave(first)
    queue.leave(first)
    assert list(queue) == [second]


def test_whom_one_policy_generation_refuses_holds_up_nobody_of_another() -> None:
    """In a takeover each request is decided by one of two: one may have room where the other has none."""
    queue, this = Queue(), Round()
    refused, other = Waiter("A", POOL, Code.FULL, generation=1), Waiter("A", POOL, Code.FULL, generation=2)
    queue.join(refused)
    assert queue.reason_before(POOL, 1) is Code.FULL
    assert queue.reason_before(POOL, 2) is None
    this.refused(refused, Code.FULL)
    assert not this.may_try(refused)
    assert this.may_try(other)
