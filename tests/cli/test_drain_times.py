"""`pooler drain` gives up and cancels what runs at different moments, whatever it was asked."""

from __future__ import annotations

import json
from contextlib import suppress

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.cli.drain import AFTER_CANCEL_SECONDS, drain_times
from pooler.demo.etcd import Etcd
from tests.cli.conftest import Pooler
from tests.support.fleet import MakeFleet
from tests.support.postgres import Database

SECONDS = st.floats(0, 3600)


@given(st.none() | SECONDS, SECONDS)
def test_what_runs_is_cancelled_well_before_the_command_gives_up_or_well_after(
    asked: float | None, drain_timeout: float
) -> None:
    whole, cancel = drain_times(asked, drain_timeout)
    assert abs(whole - cancel) >= AFTER_CANCEL_SECONDS - 1e-6
    assert cancel >= drain_timeout
    assert asked is None or whole == asked


def test_by_default_and_with_enough_time_drain_timeout_is_kept_to_the_letter() -> None:
    assert drain_times(None, 30) == (40, 30)
    assert drain_times(60, 30) == (60, 30)
    assert drain_times(3, 30) == (3, 30)
    assert drain_times(30, 30) == (30, 40)


@pytest.mark.postgres
@pytest.mark.etcd
@pytest.mark.parametrize(("words", "code", "served"), [((), 0, False), (("--timeout", "1s"), 4, True)])
def test_an_open_transaction_is_cut_by_the_default_and_left_alone_by_a_shorter_time(
    pooler: Pooler, make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd,
    words: tuple[str, ...], code: int, served: bool,
) -> None:
    made = make_fleet(postgres_newest, etcd, workers=1, permits=4, more={"failover": {"drain_timeout": "1s"}})
    client = psycopg.connect(made.dsn())
    client.execute("SELECT 1")
    done = pooler("drain", postgres_newest.dbname, "--json", *words, "-c", made.config)
    assert json.loads(done.out.splitlines()[-1])["code"] == done.code == code, done.err
    goes_on = False
    with suppress(psycopg.OperationalError):
        client.execute("SELECT 1")
        goes_on = True
    assert goes_on is served
    client.close()
