"""What a server says that it is: real ones of both versions, and answers that no server gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from psycopg import sql

from coordinator.glancing import LAGS_KEPT, Glances, read_glance
from coordinator.ledger.record import Backend
from coordinator.looks import Door, Looker, LookFailed
from coordinator.spec import Monitor
from coordinator.topology import Glance, NoAnswer
from pooler.demo.postgres import Server
from tests.coordinator.nodes import A, B, Node, Nodes
from tests.support.postgres import Database, MakeServer, make_database

GOOD = ("7001", 1, 100, True, False, 0.5)


def glances_at(database: Database) -> tuple[Looker, Glances]:
    monitor = Monitor(database.monitor, database.monitor_password)
    looker = Looker(lambda address: Door(monitor, database.dbname, "glance"))
    return looker, Glances(looker)


@pytest.mark.postgres
@pytest.mark.parametrize("version", [15, 18])
async def test_a_real_primary_and_its_standby_say_what_they_are(
    make_server: MakeServer, make_standby: Callable[[Server], Server], version: int
) -> None:
    primary = make_server(version)
    database = make_database(primary)
    standby = make_standby(primary)
    looker, glances = glances_at(database)
    first = await glances.at(f"127.0.0.1:{primary.port}")
    assert isinstance(first, Glance)
    assert (first.backend.in_recovery, first.backend.timeline, first.read_only, first.lag_seconds) == (
        False, 1, False, 0.0)
    second = await glances.at(f"127.0.0.1:{standby.port}")
    assert isinstance(second, Glance)
    assert (second.backend.in_recovery, second.backend.system_identifier) == (
        True, first.backend.system_identifier)
    assert second.lag_seconds is not None
    primary.kill()
    standby.promote()
    gone = await glances.at(f"127.0.0.1:{primary.port}")
    assert isinstance(gone, NoAnswer)
    promoted = await glances.at(f"127.0.0.1:{standby.port}")
    assert isinstance(promoted, Glance)
    assert (promoted.backend.in_recovery, promoted.backend.timeline) == (False, 2)
    await looker.close()


@pytest.mark.postgres
async def test_a_server_is_read_only_by_its_own_configuration_and_not_by_that_of_our_role(
    make_server: MakeServer
) -> None:
    server = make_server()
    database = make_database(server)
    looker, glances = glances_at(database)
    with server.connect() as connection:
        connection.execute(sql.SQL("alter role {} set default_transaction_read_only = on").format(
            sql.Identifier(database.monitor)))
    ours = await glances.at(database.address)
    assert isinstance(ours, Glance)
    assert not ours.read_only
    await looker.close()
    with server.connect() as connection:
        connection.execute(sql.SQL("alter role {} reset default_transaction_read_only").format(
            sql.Identifier(database.monitor)))
        connection.execute("alter system set default_transaction_read_only = on")
        connection.execute("select pg_reload_conf()")
    with trio.fail_after(10):  # the postmaster reads it when it comes to it
        while not (isinstance(seen := await glances.at(database.address), Glance) and seen.read_only):
            await looker.close()
    await looker.close()


@pytest.mark.parametrize("row", [
    None, (), GOOD[:-1], (*GOOD, 1), (7001, *GOOD[1:]), ("7001", "1", *GOOD[2:]), ("7001", -1, *GOOD[2:]),
    ("7001", 1, 1 << 63, *GOOD[3:]), (*GOOD[:3], 1, *GOOD[4:]), (*GOOD[:5], "0.5"),
])
def test_what_is_no_answer_is_refused(row: Any) -> None:
    with pytest.raises(LookFailed, match="a:5432"):
        read_glance("a:5432", row, 1.0)


@pytest.mark.parametrize(("told", "lag"), [(0.5, 0.5), (-2.0, 0.0), (None, None), (float("nan"), None)])
def test_a_lag_is_a_time_that_is_known_or_none(told: float | None, lag: float | None) -> None:
    assert read_glance("a:5432", (*GOOD[:5], told), 1.0) == Glance(
        Backend("a:5432", "7001", 1, 100, True), 1.0, False, lag)


async def test_a_standby_is_as_late_as_at_its_best_of_the_last_glances_and_failures_are_counted() -> None:
    nodes = Nodes({each.address: Node(each) for each in (A, B)})
    glances = Glances(nodes, lambda: 1.0)
    seen = []
    for lag in (0.0, 50.0, None, 60.0, 70.0, None, None, None):
        nodes.at[B.address].lag_seconds = lag
        glance = await glances.at(B.address)
        assert isinstance(glance, Glance)
        seen.append(glance.lag_seconds)
    assert LAGS_KEPT == 3
    assert seen == [0.0, 0.0, 0.0, 50.0, 60.0, 60.0, 70.0, None]
    nodes.at[B.address] = Node(None)
    silent = [await glances.at(B.address) for _ in range(3)]
    assert [each.times for each in silent if isinstance(each, NoAnswer)] == [1, 2, 3]
    nodes.at[B.address] = Node(B)
    await glances.at(B.address)
    nodes.at[B.address] = Node(None)
    again = await glances.at(B.address)
    assert isinstance(again, NoAnswer)
    assert again.times == 1
