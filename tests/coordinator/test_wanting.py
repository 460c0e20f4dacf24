"""Who looks beyond its own host, whom the leader asks over all hosts, and who stands back for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from coordinator.ledger.notes import Want
from coordinator.ledger.record import Kind
from coordinator.ledger.rules import Code
from coordinator.ledger.snapshot import Held, Wanted
from coordinator.ledger.states import SessionState
from coordinator.waiting import ASK_SECONDS_MAX, Holding, Pool, Waiter
from coordinator.wanting import (
    CHOOSE_AGAIN_SECONDS,
    LINGER_SECONDS,
    Choices,
    Own,
    Short,
    neediest,
    stands_back,
    still_wanted,
    waits_in_vain,
)
from tests.ledger.ground import session

POOL, OTHER = Pool("db", "app", "app"), Pool("db", "app", "batch")
LINKED = frozenset({"a0", "a1"})


def waiter(boot_id: str, pool: Pool = POOL, since: float = 0.0, reason: Code = Code.FULL) -> Waiter:
    return Waiter(boot_id, pool, reason, request_id=f"r-{boot_id}", since=since)


def want(boot_id: str, pool: Pool = POOL, reason: Code = Code.FULL) -> Want:
    return Want(pool.name, pool.user, pool.kind, str(reason), boot_id, boot_id[0], 0)


def wanted(
    boot_id: str, created: int, pool: Pool = POOL, reason: Code = Code.FULL, holder: str = ""
) -> Wanted:
    value = replace(want(boot_id, pool, reason), holder=holder, op="shed" if holder else "",
                    holder_pool=pool.name, holder_user=pool.user)
    return Wanted(f"want/{boot_id}/{created}", value, created, created, 1)


# ---- on the host that waits


@pytest.mark.parametrize(("held", "since", "vain"), [
    ({"a0": 4, "a1": 4}, 0.1, True), ({"a0": 4, "a1": 5}, 0.1, True), ({"a0": 4, "a1": 4}, 0.05, False),
    ({"a0": 4, "a1": 6}, 0.1, False), ({"a0": 4, "a1": 6}, 1.0, True), ({"a0": 0, "a1": 1}, 0.1, True),
    ({"a0": 0, "a1": 2}, 0.1, False), ({}, 0.1, True)])
def test_one_looks_beyond_its_host_where_no_sibling_has_two_more_or_none_gives(
    held: dict[str, int], since: float, vain: bool
) -> None:
    mine = {Holding(boot_id, POOL): count for boot_id, count in held.items()}
    assert waits_in_vain(waiter("a0"), mine, LINKED, since) is vain


def test_nobody_is_asked_for_what_others_could_not_give() -> None:
    for each in (waiter("gone"), waiter("a0", replace(POOL, kind=Kind.RESERVE)),
                 waiter("a0", reason=Code.DRAINING)):
        assert not waits_in_vain(each, {}, LINKED, 5.0)


def test_a_pool_tells_of_the_worker_that_has_least_and_of_the_first_of_equals() -> None:
    held = {Holding("a0", POOL): 2, Holding("a1", POOL): 1, Holding("a0", OTHER): 1, Holding("a1", OTHER): 1}
    first = waiter("a1", OTHER)
    waiters = [waiter("a0"), waiter("a1"), first, waiter("a0", OTHER)]
    assert neediest(waiters, held, LINKED, 5.0) == {POOL: waiters[1], OTHER: first}


def test_a_want_stands_until_its_pool_has_one_more_or_nobody_waits_for_a_while() -> None:
    own = Own("k", want("a0"), 1, base=3, absent_at=10.0)
    held = {Holding("a0", POOL): 1, Holding("a1", POOL): 2, Holding("a1", OTHER): 9}
    assert still_wanted(own, POOL, None, held, chosen=False, now=10.0 + LINGER_SECONDS)
    assert not still_wanted(own, POOL, None, held, chosen=False, now=10.1 + LINGER_SECONDS)
    assert not still_wanted(own, POOL, None, {**held, Holding("a0", POOL): 2}, chosen=True, now=10.0)


def test_what_a_host_lost_for_good_since_is_not_what_it_wanted() -> None:
    own, less = Own("k", want("a0"), 1, base=3), {Holding("a1", POOL): 2}
    back = {Holding("a1", POOL): 3}
    assert still_wanted(own, POOL, None, less, chosen=True, now=10.0)
    assert still_wanted(own, POOL, None, back, chosen=True, now=10.5), "it only went from one to the other"
    assert still_wanted(own, POOL, None, less, chosen=True, now=10.6)
    assert still_wanted(own, POOL, None, less, chosen=True, now=11.7)
    assert not still_wanted(own, POOL, None, back, chosen=True, now=11.8)


def test_a_pool_whose_only_session_goes_round_is_short_for_as_long_as_it_does() -> None:
    short = Short(waiter("a0"), 1.0, 1.0)
    assert not short.lasts(1.05)
    short.heard(waiter("a1"), 1.2)
    assert (short.lasts(1.3), short.lasts(2.1), short.lasts(2.3)) == (True, True, False)
    assert short.waiter.boot_id == "a1"
    short.heard(waiter("a0"), 5.0)
    assert not short.lasts(5.0)


def test_a_needier_worker_takes_the_place_of_another_but_not_once_somebody_was_asked() -> None:
    own = Own("k", want("a0"), 1, base=3)
    held = {Holding("a0", POOL): 2, Holding("a1", POOL): 1}
    assert not still_wanted(own, POOL, waiter("a1"), held, chosen=False, now=0.0)
    assert still_wanted(own, POOL, waiter("a1"), held, chosen=True, now=0.0)
    assert still_wanted(own, POOL, waiter("a0"), held, chosen=False, now=0.0)
    assert not still_wanted(own, POOL, waiter("a0", reason=Code.SEATS_FULL), held, chosen=False, now=0.0)


# ---- who stands back


def until(*wants: Wanted) -> dict[tuple[str, int], float]:
    return {(each.key, each.mod_revision): 2.0 for each in wants}


def test_whoever_came_later_stands_back_until_the_time_is_over() -> None:
    chosen = wanted("b0", 5, holder="a0")
    assert stands_back(POOL, [], [chosen], until(chosen), 1.9)
    assert stands_back(OTHER, [], [chosen], until(chosen), 1.9)
    assert not stands_back(POOL, [], [chosen], until(chosen), 2.0)
    assert not stands_back(POOL, [], [chosen], {}, 1.0), "nothing was freed yet"
    assert not stands_back(replace(POOL, kind=Kind.ADMIN), [], [chosen], until(chosen), 1.0)


def test_a_want_of_a_seat_holds_up_its_own_pool_only() -> None:
    chosen = wanted("b0", 5, reason=Code.SEATS_FULL, holder="a0")
    assert stands_back(POOL, [], [chosen], until(chosen), 1.0)
    assert not stands_back(OTHER, [], [chosen], until(chosen), 1.0)


def test_of_two_that_were_chosen_for_the_older_goes_first_and_one_always_does() -> None:
    a, b = wanted("a0", 5, holder="b0"), wanted("b0", 6, holder="a0")
    assert not stands_back(POOL, [a], [b], until(a, b), 1.0)
    assert stands_back(POOL, [b], [a], until(a, b), 1.0)


def test_a_want_that_is_to_get_none_goes_before_none() -> None:
    b, spared = wanted("b0", 6, holder="a0"), wanted("a0", 5, holder="b0")
    for a in (wanted("a0", 5), replace(spared, want=replace(spared.want, op="spare"))):
        assert stands_back(POOL, [a], [b], until(b), 1.0)


# ---- the leader's choices


@dataclass
class Fleet:
    """Workers `<host><number>` that all want more, and a leader; whoever is asked gives at once."""

    held: Counter[str]
    choices: Choices = field(default_factory=lambda: Choices("db"))
    now: float = 100.0
    wants: dict[str, Wanted] = field(default_factory=dict)  # by host
    revision: int = 0
    sheds: int = 0

    @property
    def live(self) -> frozenset[str]:
        return frozenset(self.held)

    def sessions(self) -> dict[str, Held]:
        found, slot = {}, 0
        for boot_id, count in sorted(self.held.items()):
            for number in range(count):
                found[f"{boot_id}/{number}"] = Held(session(owner=boot_id, host=boot_id[0], slot=slot), 1)
                slot += 1
        return found

    def want_all(self) -> None:
        """Each host tells of its worker that has least."""
        for host in sorted({boot_id[0] for boot_id in self.held}):
            least = min((each for each in sorted(self.held) if each[0] == host), key=lambda x: self.held[x])
            before = self.wants.get(host)
            if before is None or before.want.boot_id != least:
                self.revision += 1
                self.wants[host] = wanted(least, self.revision)

    def choose(self) -> list[tuple[Wanted, Want]]:
        return self.choices.choose(list(self.wants.values()), self.sessions(), self.live, self.now)

    def step(self) -> None:
        """All want, the leader chooses, and what was asked for goes over."""
        self.now += 1
        self.want_all()
        for each, chosen in self.choose():
            if chosen.op != "shed":
                continue
            self.sheds += 1
            self.held[chosen.holder] -= 1
            self.choices.gone(f"{chosen.holder}/{self.held[chosen.holder]}", self.now)
            self.held[each.want.boot_id] += 1
            del self.wants[each.want.boot_id[0]]


@given(shares=some.dictionaries(
    some.sampled_from([f"{host}{number}" for host in "abcd" for number in "012"]), some.integers(0, 8),
    min_size=2))
def test_repeated_choices_make_shares_even_and_then_nobody_is_asked_any_more(shares: dict[str, int]) -> None:
    fleet = Fleet(Counter(shares))
    total = fleet.held.total()
    for _ in range(4 * total + 8):
        fleet.step()
        assert fleet.held.total() == total
        assert min(fleet.held.values()) >= 0
    counts = fleet.held.values()
    over_hosts = {host: [n for boot, n in fleet.held.items() if boot[0] == host] for host in "abcd"}
    least = {host: min(each) for host, each in over_hosts.items() if each}
    most = {host: max(each) for host, each in over_hosts.items() if each}
    if total >= len(fleet.held):  # fewer go round: each gets its turn
        assert all(most[other] - least[host] <= 1 for host in least for other in most if other != host)
        sheds = fleet.sheds
        for _ in range(20):
            fleet.step()
        assert fleet.sheds == sheds, "equal holders take nothing from each other"
        assert sheds <= sum(abs(count - total / len(counts)) for count in counts) + 8 * len(counts)


def fleet_of(**held: int) -> Fleet:
    fleet = Fleet(Counter(held))
    fleet.wants["b"] = wanted("b0", 1)
    return fleet


def asked(chosen: Iterable[tuple[Wanted, Want]]) -> list[tuple[str, str]]:
    return [(want.op, want.holder) for _, want in chosen]


def test_one_is_asked_for_a_want_and_another_only_when_that_gave_nothing_for_long() -> None:
    fleet = fleet_of(a0=8, b0=0)
    assert asked(fleet.choose()) == [("shed", "a0")]
    fleet.now += ASK_SECONDS_MAX - 1
    assert not fleet.choices.is_due(["want/b0/1"], fleet.now, moved=True)
    assert fleet.choose() == []
    fleet.now += 1
    assert fleet.choices.is_due(["want/b0/1"], fleet.now, moved=True)
    assert asked(fleet.choose()) == [("shed", "a0")]


def test_what_was_given_and_went_to_another_is_chosen_again_later_each_time() -> None:
    fleet, pause = fleet_of(a0=8, b0=0), CHOOSE_AGAIN_SECONDS
    for _ in range(3):
        assert asked(fleet.choose()) == [("shed", "a0")]
        fleet.choices.gone("a0/0", fleet.now)
        fleet.now += pause - 0.1
        assert fleet.choose() == []
        fleet.now += 0.1
        pause *= 2


def test_what_one_was_asked_for_counts_as_given_for_the_next_want_also_when_that_is_gone() -> None:
    fleet = fleet_of(a0=2, b0=0, c0=0)
    fleet.wants["c"] = wanted("c0", 2)
    assert asked(fleet.choose()) == [("shed", "a0"), ("shed", "a0")]
    fleet.wants = {"d": wanted("d0", 3)}
    assert fleet.choose() == []


def test_sessions_that_end_or_are_not_known_are_nobodys_to_give() -> None:
    fleet = fleet_of(a0=3, b0=0)
    for state in (SessionState.CLOSING, SessionState.UNKNOWN):
        sessions = {key: Held(replace(each.session, state=state), 1)
                    for key, each in fleet.sessions().items()}
        assert Choices("db").choose(list(fleet.wants.values()), sessions, fleet.live, 0.0) == []


def test_who_has_no_worker_key_is_not_asked() -> None:
    fleet = fleet_of(a0=3, b0=0)
    assert fleet.choices.choose(list(fleet.wants.values()), fleet.sessions(), frozenset({"b0"}), 0.0) == []


def test_where_nobody_has_more_each_is_asked_for_an_idle_one_in_its_turn_then_seldom() -> None:
    fleet = fleet_of(a0=2, b0=2, c0=2)
    assert fleet.choose() == [], "not before it has waited for a second"
    turns = []
    for _ in range(60):
        fleet.now += 1
        if fleet.choices.is_due(["want/b0/1"], fleet.now, moved=False):
            turns += [(fleet.now - 100, *each) for each in asked(fleet.choose())]
    assert turns == [(1, "spare", "a0"), (2, "spare", "c0"), (32, "spare", "a0")]


def test_of_its_own_host_nobody_is_asked_and_nothing_more_is_read_until_sessions_came_or_went() -> None:
    fleet = fleet_of(b0=0, b1=8)
    assert fleet.choose() == []
    fleet.now += 1
    assert fleet.choices.is_due(["want/b0/1"], fleet.now, moved=False)
    assert fleet.choose() == []
    fleet.now += 1_000
    assert not fleet.choices.is_due(["want/b0/1"], fleet.now, moved=False)
    fleet.held["a0"] = 1
    assert fleet.choices.is_due(["want/b0/1"], fleet.now, moved=True)
    assert asked(fleet.choose()) == [("shed", "a0")]


def test_a_choice_that_was_not_written_is_made_again() -> None:
    fleet = fleet_of(a0=2, b0=0)
    (chosen,) = fleet.choose()
    fleet.choices.forget(chosen[0])
    assert asked(fleet.choose()) == asked([chosen])


def test_a_new_leader_considers_every_want_anew() -> None:
    fleet = fleet_of(a0=4, b0=0)
    fleet.wants["b"] = wanted("b0", 1, holder="a0")
    assert fleet.choices.is_due(["want/b0/1"], fleet.now, moved=False)
    assert asked(fleet.choose()) == [("shed", "a0")]


def test_a_want_that_cannot_be_met_by_anybody_is_left_alone() -> None:
    fleet = fleet_of(a0=4, b0=0)
    fleet.wants["b"] = replace(fleet.wants["b"], want=replace(want("b0"), reason="of a newer version"))
    assert fleet.choose() == []
    assert not fleet.choices.is_due(["want/b0/1"], fleet.now + 1_000, moved=True)
