"""Shares of execution permits: weighted over the fleet, whole, none idle beside a waiter, still at rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from coordinator.allotment import (
    Class,
    Moves,
    Terms,
    exact_shares,
    loans,
    moves,
    settle,
    usable_permits,
    whole_shares,
)
from coordinator.ledger.execution import NOT_RECALLED, Gift, HeldShare, Seat, Share, Shares
from coordinator.policy import Policy, parse_policy

WEIGHTS = {"a": Terms(3), "b": Terms(1), "c": Terms(1, inflight=2)}

needs_of_workers = st.dictionaries(
    st.sampled_from([f"w{n}" for n in range(5)]),
    st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 40), max_size=4), max_size=5)


def policy(classes: Mapping[str, int], *, tenants: Mapping[str, Terms] = WEIGHTS, slots: int = 0,
           max_lend: int | None = None) -> Policy:
    lend = {} if max_lend is None else {"maxLend": max_lend}
    return parse_policy({
        "schema": "dbAdmissionPolicy.v1", "database": "d/write", "generation": 1, "adminReserve": 1,
        "serverSessionPermits": slots or sum(classes.values()), "fairness": "weighted-deficit-v2",
        "executionClasses": {name: {"permits": permits, "maxQueue": 100, **lend}
                             for name, permits in classes.items()},
        "tenants": {name: {"weight": each.weight} | ({"inflight": each.inflight} if each.inflight else {})
                    for name, each in tenants.items()}})


class World:
    """A fleet that carries moves out at once; a worker executes as much as it may of what it needs."""

    def __init__(self, workers: int, policy: Policy) -> None:
        self.policy, self.live = policy, frozenset(f"w{n}" for n in range(workers))
        self.shares = Shares(workers=dict.fromkeys(self.live, 1))
        self.demand: dict[str, dict[str, dict[str, int]]] = {}
        self.unusable = 0

    def step(self) -> Moves:
        found = moves(self.policy, self.shares, self.demand, live=self.live, unusable=self.unusable)
        held = dict(self.shares.held)
        for giver, each in found.given.items():
            for seat, gift in each.items():
                lender = "" if giver == seat.execution_class else giver
                before = held.get(seat, HeldShare(Share())).share
                held[seat] = HeldShare(before.with_gift(gift, lender), 1)
        for seat, kept in found.keep.items():
            held[seat] = HeldShare(replace(held[seat].share, keep=kept), 1)
        self.shares = replace(self.shares, held=held)
        return found

    def give_back(self) -> None:
        held = {seat: HeldShare(each.share.lowered(each.share.kept), 1)
                for seat, each in self.shares.held.items()}
        self.shares = replace(self.shares, held=held)

    def check(self) -> None:
        for name, each in self.policy.classes.items():
            assert self.shares.given(name) <= each.permits
            assert self.shares.lent(name) <= each.max_lend

    def rest(self) -> None:
        """Until nothing moves."""
        for _ in range(50):
            self.give_back()
            found = self.step()
            self.check()
            if not found.given and not found.keep:
                return
        raise AssertionError(f"it never comes to rest: {found}")

    def has(self, name: str = "x") -> dict[str, int]:
        return {worker: self.shares.of(Seat(name, worker)).permits for worker in sorted(self.live)}


@given(needs_of_workers, st.integers(1, 60), st.integers(0, 10), st.dictionaries(
    st.sampled_from([f"w{n}" for n in range(5)]), st.integers(0, 20)))
def test_whole_shares_are_within_one_of_the_exact_ones_and_nobody_gets_more_than_it_needs(
    needs: dict[str, dict[str, int]], permits: int, turn: int, now: dict[str, int]
) -> None:
    found = whole_shares(needs, WEIGHTS, permits, now, turn)
    active = {worker for worker, each in needs.items() if any(each.values())}
    assert set(found) == active
    wanted = Class(permits, 0, needs).wants(WEIGHTS)
    if len(active) > permits:
        assert sum(found.values()) == permits
        return
    exact = exact_shares({worker: needs[worker] for worker in active}, WEIGHTS, permits)
    assert sum(found.values()) >= min(permits, wanted)
    assert sum(found.values()) <= permits
    for worker, share in found.items():
        assert abs(share - exact[worker]) < 1
        assert 1 <= share <= sum(needs[worker].values())


@given(needs_of_workers, st.integers(1, 60), st.integers(0, 10))
def test_whole_shares_that_hold_stay(needs: dict[str, dict[str, int]], permits: int, turn: int) -> None:
    found = whole_shares(needs, WEIGHTS, permits, {}, turn)
    assert whole_shares(needs, WEIGHTS, permits, found, turn) == found


@pytest.mark.parametrize("now", [{}, {"h0": 5, "h1": 5, "l0": 1, "l1": 1}, {"h0": 6, "h1": 6}])
def test_a_tenant_with_workers_of_its_own_has_its_share_in_whole_permits_too(now: dict[str, int]) -> None:
    needs = {"h0": {"heavy": 20}, "h1": {"heavy": 20}, "l0": {"light": 20}, "l1": {"light": 20}}
    found = whole_shares(needs, {"heavy": Terms(3)}, 12, now)
    assert (found["h0"] + found["h1"], found["l0"] + found["l1"]) == (9, 3)


@given(needs_of_workers, st.integers(1, 60))
def test_exact_shares_are_max_min_no_tenant_below_its_share_while_another_has_more_by_weight(
    needs: dict[str, dict[str, int]], permits: int
) -> None:
    one_each = {tenant: {tenant: sum(each.get(tenant, 0) for each in needs.values())} for tenant in "abcd"}
    active = {tenant: each for tenant, each in one_each.items() if each[tenant]}
    if len(active) > permits:
        return
    exact = exact_shares(active, WEIGHTS, permits)
    for tenant, share in exact.items():
        terms = WEIGHTS.get(tenant, Terms())
        cap = min(active[tenant][tenant], terms.inflight or permits)
        if share < cap:
            for other, more in exact.items():
                assert more <= 1 or Fraction(more, WEIGHTS.get(other, Terms()).weight) <= Fraction(
                    share, terms.weight)


def test_weights_of_three_to_one_hold_with_each_tenant_on_its_own_worker() -> None:
    world = World(2, policy({"x": 40}))
    world.demand = {"x": {"w0": {"a": 100}, "w1": {"b": 100}}}
    world.rest()
    assert world.has() == {"w0": 30, "w1": 10}


def test_equal_weights_hold_with_nine_clients_to_one() -> None:
    world = World(2, policy({"x": 20}, tenants={}))
    world.demand = {"x": {"w0": {"a": 900, "b": 50}, "w1": {"b": 50}}}
    world.rest()
    assert world.has() == {"w0": 15, "w1": 5}


def test_a_fleet_at_rest_has_all_permits_out_and_moves_none() -> None:
    world = World(3, policy({"x": 10}))
    world.rest()
    assert sum(world.has().values()) == 10
    assert min(world.has().values()) >= 3
    world.demand = {"x": {"w0": {"a": 3}, "w1": {"b": 2}}}
    assert world.step() == Moves()


def test_a_worker_that_came_later_has_some_before_it_needs_any() -> None:
    world = World(2, policy({"x": 9}))
    world.rest()
    world.live |= {"w2"}
    world.shares = replace(world.shares, workers=dict.fromkeys(world.live, 1))
    world.rest()
    assert world.has()["w2"] == 3


def test_who_is_raised_gets_its_part_of_what_is_spare_so_that_growing_asks_seldom() -> None:
    world = World(2, policy({"x": 100}))
    world.rest()
    writes = 0
    for tickets in range(1, 80):
        world.demand = {"x": {"w0": {"a": tickets}}}
        while found := world.step():
            if not found.given and not found.keep:
                break
            writes += 1
            world.give_back()
    assert world.has()["w0"] >= 79
    assert writes < 20


def test_where_workers_are_more_than_permits_all_have_their_turn() -> None:
    needs = {f"w{n}": {"a": 5} for n in range(5)}
    served = {worker for turn in range(5)
              for worker, share in whole_shares(needs, {}, 2, {}, turn).items() if share}
    assert served == set(needs)
    assert moves(policy({"x": 2}), Shares(workers=dict.fromkeys(needs, 1)), {"x": needs},
                 live=frozenset(needs)).crowded


def test_what_the_gone_have_is_given_to_nobody() -> None:
    world = World(2, policy({"x": 10}))
    world.shares = replace(world.shares, held={Seat("x", "dead"): HeldShare(Share(4), 1)})
    world.demand = {"x": {"w0": {"a": 50}, "w1": {"a": 50}}}
    world.rest()
    assert sum(world.has().values()) == 6


def test_slots_that_no_session_can_be_in_lower_the_classes_only_where_they_have_them_all() -> None:
    assert usable_permits(policy({"x": 8, "y": 2}), 5) == {"x": 4, "y": 1}
    assert usable_permits(policy({"x": 8, "y": 2}, slots=15), 5) == {"x": 8, "y": 2}
    assert usable_permits(policy({"x": 8, "y": 2}), 50) == {"x": 0, "y": 0}


def test_a_class_that_the_policy_has_no_more_is_recalled_whole() -> None:
    world = World(1, policy({"x": 4}))
    world.shares = replace(world.shares, held={Seat("old", "w0"): HeldShare(Share(3), 1)})
    assert world.step().keep == {Seat("old", "w0"): 0}
    world.give_back()
    assert world.has("old") == {"w0": 0}


# ---- lending


def test_an_idle_class_lends_up_to_its_most_and_no_more_however_idle_it_is() -> None:
    world = World(2, policy({"x": 10, "y": 10}))
    world.demand = {"x": {"w0": {"a": 30}, "w1": {"a": 30}}}
    world.rest()
    assert sum(world.has("x").values()) == 15
    assert world.shares.lent("y") == 5


def test_a_lender_that_needs_its_own_is_served_first() -> None:
    world = World(2, policy({"x": 10, "y": 10}))
    world.demand = {"x": {"w0": {"a": 60}}}
    world.rest()
    world.demand["y"] = {"w1": {"b": 60}}
    world.rest()
    assert (sum(world.has("x").values()), sum(world.has("y").values())) == (10, 10)
    assert world.shares.lent("y") == 0


def test_no_new_loan_is_made_while_the_lender_needs_all() -> None:
    both = {name: Class(10, 5, {"w0": {"a": 30}}) for name in "xy"}
    assert loans(both, {}, {}) == {}
    assert loans(both, {}, {("y", "x"): 3}) == {}


def test_a_loan_that_is_to_end_goes_back_for_permits_of_the_borrowers_own_class() -> None:
    world = World(2, policy({"x": 4, "y": 4}))
    world.shares = replace(world.shares, held={
        Seat("x", "w0"): HeldShare(Share(0, {"y": 2}), 1), Seat("x", "w1"): HeldShare(Share(2), 1)})
    found = world.step()
    assert found.given["x"][Seat("x", "w0")] == Gift(2, instead_of="y")
    assert world.shares.lent("y") == 0


@settings(max_examples=100, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_of_any_story_nothing_is_given_twice_and_at_its_end_no_permit_idles_beside_a_waiter(
    data: st.DataObject
) -> None:
    rules = policy({"x": data.draw(st.integers(2, 12)), "y": data.draw(st.integers(2, 12))})
    world = World(data.draw(st.integers(1, 4)), rules)
    for _ in range(data.draw(st.integers(1, 6))):
        world.demand = data.draw(st.fixed_dictionaries({
            "x": needs_of_workers, "y": needs_of_workers}))
        world.unusable = data.draw(st.sampled_from([0, 0, 3]))
        world.step()
        world.check()
        if data.draw(st.booleans()):
            world.give_back()
    world.unusable = 0
    world.rest()
    for name, other in (("x", "y"), ("y", "x")):
        needs = {worker: each for worker, each in world.demand[name].items() if worker in world.live}
        wants = Class(0, 0, needs).wants(WEIGHTS)
        useful = sum(min(count, sum(needs.get(worker, {}).values()))
                     for worker, count in world.has(name).items())
        assert useful >= min(wants, rules.classes[name].permits)
        needs_there = {worker: each for worker, each in world.demand[other].items() if worker in world.live}
        idle = rules.classes[other].permits - Class(0, 0, needs_there).wants(WEIGHTS)
        assert useful >= min(wants, rules.classes[name].permits
                             + max(0, min(idle, rules.classes[other].max_lend)))
    assert world.step() == Moves(crowded=world.step().crowded)


@example(needed={"w0": 0}, now={}, permits=5)
@given(st.dictionaries(st.sampled_from(["w0", "w1", "w2"]), st.integers(0, 5), min_size=1),
       st.dictionaries(st.sampled_from(["w0", "w1", "w2"]), st.integers(0, 30)), st.integers(15, 20))
def test_what_is_settled_is_all_there_is_and_stays(
    needed: dict[str, int], now: dict[str, int], permits: int
) -> None:
    found = settle(needed, now, permits)
    assert sum(found.values()) == permits
    assert all(found[each] >= needed[each] for each in needed)
    assert settle(needed, found, permits) == found


def test_a_share_that_is_not_recalled_is_kept_whole() -> None:
    assert Share(3, {"y": 2}).kept == 5
    assert Share(3, {"y": 2}, keep=4).lowered(4) == Share(3, {"y": 1}, keep=NOT_RECALLED)
