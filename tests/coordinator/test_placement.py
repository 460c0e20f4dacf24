"""What the policies promise is held beside every server where it may be asked for."""

from __future__ import annotations

import pytest

from coordinator.placement import Demand, crowded, foreign, larger_of
from tests.coordinator.test_room import HERE, THERE, look, policy

WRITE, READ = "orders/write", "orders/read"


def test_what_meets_after_a_failover_is_summed_though_no_host_is_named_by_both() -> None:
    """180 for writes at one node and 100 for reads at the other of one cluster."""
    demands = [Demand(WRITE, (HERE,), policy(180, db=WRITE), "7"),
               Demand(READ, (THERE,), policy(100, db=READ), "7")]
    looks = {HERE: look(250), THERE: look(250, start_us=2, address=THERE)}
    found = crowded(demands, looks)
    assert found.keys() == {WRITE, READ}
    for each in found.values():
        assert f"{WRITE} 181 + {READ} 101 sessions" in each
        assert "room for 247 sessions" in each
    assert crowded(demands, {HERE: look(285), THERE: look(285, start_us=2, address=THERE)}) == {}


def test_two_databases_of_100_do_not_fit_a_server_of_150_and_both_are_named() -> None:
    demands = [Demand("a/write", (HERE,), policy(100)), Demand("b/write", (HERE,), policy(100))]
    assert "a/write 101 + b/write 101 sessions" in crowded(demands, {HERE: look(150)})["b/write"]


def test_two_clusters_do_not_meet() -> None:
    demands = [Demand("a/write", (HERE,), policy(100), "7"), Demand("b/write", (THERE,), policy(100), "8")]
    assert crowded(demands, {HERE: look(150)}) == {}


def test_ledgers_that_meet_fit_below_the_hard_limit_of_each() -> None:
    demands = [Demand("a/write", (HERE,), policy(40, hard_connection_limit=60)),
               Demand("b/write", (HERE,), policy(40))]
    (text,) = set(crowded(demands, {HERE: look(150)}).values())
    assert "hardConnectionLimit of a/write is 60, but at" in text
    assert "a/write 41 + b/write 41 sessions" in text


@pytest.mark.parametrize(("walsenders", "fits"), [(5, True), (4, False), (-1, True)])
def test_replication_reserves_fit_into_max_wal_senders(walsenders: int, fits: bool) -> None:
    demands = [Demand("a/write", (HERE,), policy(1, replication_reserve=2)),
               Demand("b/write", (HERE,), policy(1, replication_reserve=3))]
    found = crowded(demands, {HERE: look(150, walsenders=walsenders)})
    assert (found == {}) == fits
    assert fits or found["a/write"] == (
        f"{HERE} has max_wal_senders 4, but replicationReserve is a/write 2 + b/write 3 there")


def test_every_violation_is_named() -> None:
    text = crowded([Demand("a/write", (HERE,), policy(50, hard_connection_limit=99, replication_reserve=9))],
                   {HERE: look(43, walsenders=4)})["a/write"]
    assert len(text.split("; ")) == 3


def test_of_two_generations_that_grant_the_larger_of_each_number_counts() -> None:
    both = larger_of(policy(8, reserve_permits=1, hard_connection_limit=40),
                     policy(4, 3, hard_connection_limit=30))
    assert (both.server_session_permits, both.reserve_permits, both.admin_reserve) == (8, 1, 3)
    assert both.hard_connection_limit == 30


def test_a_server_of_another_cluster_is_no_place_for_a_ledger_whoever_names_its_address() -> None:
    demand = Demand(WRITE, (HERE, THERE), policy(40, db=WRITE), "8")
    looks = {HERE: look(10)}  # "7"
    assert crowded([demand], looks) == {}
    assert foreign([demand], looks) == {WRITE: (
        f"{HERE} is another cluster (system identifier 7), and the sessions are in 8")}


def test_where_nothing_says_which_cluster_an_address_counts() -> None:
    demand = Demand(WRITE, (HERE,), policy(40, db=WRITE))
    assert crowded([demand], {HERE: look(10)}).keys() == {WRITE}
    assert foreign([demand], {HERE: look(10)}) == {}
