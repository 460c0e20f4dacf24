"""`pooler plan`: the worksheet's arithmetic, a live server, and what it says of bad input."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.capacity import LocalPools, Sample, Server, Zones, naive, planned, proposed, wanted_of
from pooler.capacity import tested_tps as highest_tps
from tests.cli.conftest import Pooler
from tests.support.postgres import Database

SERVER = ("--max-connections", "100", "--reserved", "5", "--other-clients", "24", "--margin", "8")
TEST = """\
- {tps: 150, p99: 110ms, errors: 0.0001}
- {tps: 200, p99: 220ms, errors: 0.0003}
- {tps: 250, p99: 500ms, errors: 0.0020}
"""


def test_what_remains_for_ordinary_sessions() -> None:
    assert Server(100, 3, 5, 24, 8).ordinary == 60


@pytest.mark.parametrize(("pools", "steady", "overlap"), [
    (LocalPools(6, 2, 1, 1, 8, 2), 60, 80), (LocalPools(6, 2, 1, 1, 6, 1), 42, 56),
    (LocalPools(8, 0, 2, 1, 6, 1), 112, 112), (LocalPools(8, 0, 1, 2, 6, 1), 112, 112),
    (LocalPools(10, 0, 1, 1, 50, 0), 500, 500)])
def test_pools_in_each_process_multiply(pools: LocalPools, steady: int, overlap: int) -> None:
    assert (pools.steady, pools.overlap) == (steady, overlap)


def test_the_highest_point_within_both_limits_is_what_a_worker_was_tested_at() -> None:
    samples = [Sample(Fraction(150), 0.11, 0.0001), Sample(Fraction(200), 0.22, 0.0003),
               Sample(Fraction(250), 0.5, 0.002)]
    assert highest_tps(samples, 0.3, 0.001) == 200
    assert highest_tps(samples, 0.5, 0.001) == 200, "its errors are over the limit"
    assert highest_tps(samples, 0.1, 0.001) is None


def test_workers_by_the_test_alone_are_too_few_when_a_zone_is_lost() -> None:
    zones = Zones(Fraction(2_000), 3, 1, Fraction("0.7"))
    few, enough = naive(zones, Fraction(200)), planned(zones, Fraction(200))
    assert (few.count, few.left_tps) == (12, Fraction(1_600))
    assert (enough.count, enough.left_tps) == (24, Fraction(2_240))
    assert enough.left_tps - zones.forecast_tps == 240


@given(st.integers(1, 10**6), st.integers(1, 9), st.integers(1, 10_000), st.integers(1, 100), st.data())
def test_what_is_planned_carries_the_forecast_with_no_worker_to_spare(
    forecast: int, count: int, tested: int, percent: int, data: st.DataObject
) -> None:
    zones = Zones(Fraction(forecast), count, data.draw(st.integers(0, count - 1)), Fraction(percent, 100))
    found = planned(zones, Fraction(tested))
    each = tested * zones.headroom
    assert found.left_tps >= forecast > (found.per_zone - 1) * zones.left * each


@given(st.builds(Server, *[st.integers(0, 500)] * 5))
def test_a_proposed_budget_never_takes_more_than_there_is(server: Server) -> None:
    if server.ordinary > 0:
        assert wanted_of(server, [proposed(server)]) == server.hard_connection_limit


def test_a_rollout_that_takes_too_much_is_told_with_what_a_fleet_makes_of_it(pooler: Pooler) -> None:
    asked = (*SERVER, "--replicas", "6", "--surge", "2", "--pool-size", "8", "--overflow", "2")
    done = pooler("plan", *asked)
    assert done.code == 1
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "remain for ordinary sessions 60" in lines
    assert "6 replicas x 1 processes x 1 pools x (8 + 2) 60 fits 60" in lines
    assert "in the overlap of a rollout: 8 replicas 80 20 too many for 60" in lines
    assert "a policy that fits: permits 60 + reserve 0 + admin 8 68" in lines
    assert "of 80 connections that all run a transaction at once, wait 20" in lines
    assert max(map(len, done.out.splitlines())) <= 100
    found = json.loads(pooler("plan", *asked, "--json").out)
    assert found["local_pools"] == {
        "steady": 60, "overlap": 80, "ordinary_sessions": 60, "fits": False, "waiting_in_fleet": 20}
    assert (found["fits"], found["fleet"]["fits"], found["fleet"]["sessions"]) == (False, True, 92)


def test_a_rollout_that_fits_exits_0(pooler: Pooler) -> None:
    done = pooler("plan", *SERVER, "--replicas", "6", "--surge", "2", "--pool-size", "6", "--overflow", "1")
    assert (done.code, done.err) == (0, "")
    assert "8 replicas" in done.out
    assert "56  fits 60" in done.out


def test_ledgers_of_a_config_are_held_against_the_server(pooler: Pooler, config: Path) -> None:
    assert pooler("plan", "-c", config, "--max-connections", "15").code == 0
    done = pooler("plan", "-c", config, "--max-connections", "14", "--json")
    found = json.loads(done.out)
    assert (done.code, found["fleet"]["sessions"], found["fleet"]["hardConnectionLimit"]) == (1, 12, 11)
    assert found["fleet"]["ledgers"][0]["database"] == "orders-primary/write"
    assert pooler("plan", "-c", config, "--max-connections", "15", "--other-clients", "1").code == 1


def test_a_live_server_is_read(pooler: Pooler, postgres: Database) -> None:
    done = pooler("plan", "--against", postgres.dsn(), "--json")
    server = json.loads(done.out)["server"]
    with psycopg.connect(postgres.dsn()) as conn:
        (most,) = conn.execute("SELECT current_setting('max_connections')::int").fetchone() or (0,)
    assert (server["max_connections"], server["superuser_reserved_connections"]) == (most, 3)
    assert server["ordinary_sessions"] == (
        most - 3 - server["reserved_connections"] - server["other_clients"])


def test_a_load_test_and_a_forecast_give_workers_and_hosts(pooler: Pooler, tmp_path: Path) -> None:
    (tmp_path / "test.yaml").write_text(TEST)
    asked = ("plan", "--measured", "test.yaml", "--forecast", "1600", "--growth", "1.25")
    done = pooler(*asked)
    assert (done.code, done.err) == (0, "")
    assert "12 workers; with 1 of 3 zones lost they carry 1,600 tps: too little" in done.out
    assert "24 workers, 8 in each zone, on 12 hosts of 2" in done.out
    assert "240 tps spare" in done.out
    found = json.loads(pooler(*asked, "--workers-per-host", "3", "--json").out)["workers"]
    assert (found["naive"]["workers"], found["naive"]["left_tps"]) == (12, 1600)
    assert found["planned"] == {
        "workers": 24, "workers_per_zone": 8, "hosts": 9, "left_tps": 2240, "spare_tps": 240}


@pytest.mark.parametrize(("text", "said"), [
    ("[", "line 1"), ("{}", "a list is expected"), ("[]", "a list is expected"), ("[1]", "point 1 is not"),
    ("[{tps: 1, p99: 1s}]", "point 1 is not {tps, p99, errors}"),
    ("[{tps: 0, p99: 1s, errors: 0}, {tps: 1, p99: no, errors: 2}]",
     "tps of point 1: 0 is not a number above 0; p99 of point 2: "),
    ("[{tps: 1, p99: 1s, errors: 0}]", "none of 1 points has p99 <= 300ms and errors <= 0.001"),
    ("[{tps: .inf, p99: 1ms, errors: 0}]", "inf is not a number"), ("\0", "unacceptable character")])
def test_a_load_test_that_cannot_be_read_is_told_where(
    pooler: Pooler, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "test.yaml").write_text(text)
    done = pooler("plan", "--measured", "test.yaml", "--forecast", "100")
    assert done.code in (1, 2)
    assert done.out == ""
    assert said in done.err
    assert "internal error" not in done.err


@pytest.mark.parametrize(("words", "said"), [
    ((), "which server?"), (("--replicas", "6"), "which server?"),
    (("--forecast", "1"), "go together"), (("--measured", "none.yaml"), "go together"),
    (("--measured", "none.yaml", "--forecast", "1"), "No such file"),
    (("--measured", "none.yaml", "--forecast", "x"), "--forecast x: not a number"),
    (("--measured", "none.yaml", "--forecast", "1", "--lose", "3"), "none would be left"),
    (("--measured", "none.yaml", "--forecast", "1", "--headroom", "1.5"), "--headroom 1.5"),
    (("--measured", "none.yaml", "--forecast", "1", "--growth", "1/0"), "not a number"),
    (("-c", "none.yaml", "--max-connections", "1"), "no config file none.yaml"),
    (("--max-connections", "0"), "--max-connections"), (("--against", "host="), "")])
def test_wrong_usage_is_told(pooler: Pooler, words: tuple[str, ...], said: str) -> None:
    done = pooler("plan", *words)
    assert done.code in (1, 2)
    assert done.out == ""
    assert said in done.err
    assert done.err
    assert "internal error" not in done.err


def test_each_example_of_the_help_has_a_line_of_its_own(pooler: Pooler) -> None:
    shown = pooler("plan", "--help").out.splitlines()
    assert sum("Example: pooler plan " in line for line in shown) == 3
