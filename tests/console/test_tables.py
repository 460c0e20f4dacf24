"""The shape of answers: PgBouncer's columns first, with its types; merged rows; values in both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.types.numeric import NumericBinaryLoader

from pooler.console.binary import describe_row, encode_numeric, encode_row
from pooler.console.commands import SHOW_ITEMS
from pooler.console.merge import merge_rows
from pooler.console.tables import COLUMNS, cells, columns_for
from pooler.observe import rows as made
from pooler.observe.snapshot import (
    ClientRow,
    ConfigRow,
    DatabaseRow,
    PoolStatistics,
    ServerRow,
    StatsRow,
    Totals,
    UserRow,
    WorkerStatistics,
)
from pooler.wire.messages import int4_column, int8_column, numeric_column, read_row_description, text_column

OIDS = {"text": 25, "int4": 23, "int8": 20, "numeric": 1700}
PGBOUNCER: dict[str, list[tuple[str, int]]] = {}
for line in (Path(__file__).parent / "pgbouncer_columns.txt").read_text().splitlines():
    name, column, kind = line.split("\t")
    PGBOUNCER.setdefault(name, []).append((column, OIDS[kind]))


@pytest.mark.parametrize("item", PGBOUNCER)
def test_pgbouncers_columns_come_first_in_its_order_and_types(item: str) -> None:
    ours = [(column.name, column.oid) for column in columns_for(item, [])]
    assert ours[: len(PGBOUNCER[item])] == PGBOUNCER[item]


def test_every_item_has_a_shape() -> None:
    assert set(SHOW_ITEMS) - {"help"} == set(COLUMNS)


SOCKET: dict[str, Any] = {
    "user": "u", "database": "d", "state": "idle", "address": "a", "port": 1,
    "local_address": "l", "local_port": 2,
    "connected_at_us": 0,
}
STATS = StatsRow("d", Totals(), Totals(), 60.0)
WORKER = WorkerStatistics(worker="w", version="1", started_at_us=0)


@pytest.mark.parametrize(
    ("item", "row"),
    [
        ("pools", made.pool_row(PoolStatistics(database="d", user="u", pool_mode="session"))),
        ("pool_scaling", made.pool_scaling_row(PoolStatistics(database="d", user="u", pool_mode="session"))),
        ("clients", made.socket_row(ClientRow(**SOCKET))),
        ("servers", made.socket_row(ServerRow(**SOCKET))),
        ("databases", made.database_row(DatabaseRow(name="d", host="h", port=1, database="d"))),
        ("users", made.user_row(UserRow(name="u"))),
        ("stats", made.stats_row(STATS)),
        ("stats_totals", made.stats_totals_row(STATS)),
        ("stats_averages", made.stats_averages_row(STATS)),
        ("totals", made.totals_rows([STATS])[0]),
        ("lists", made.lists_rows(WORKER, databases=1, users=1, clients=1)[0]),
        ("state", made.state_rows(WORKER)[0]),
        ("config", made.config_row(ConfigRow("k", "v", "d", True, "file"))),
    ],
)
def test_the_workers_rows_fill_every_column(item: str, row: dict[str, Any]) -> None:
    assert list(row) == [column.name for column in COLUMNS[item] if column.name != "worker"]


def test_rows_may_bring_columns_of_their_own_only_to_our_own_items() -> None:
    row = {"worker": "w0", "extra": 3, "database": "d"}
    assert [column.name for column in columns_for("stats", [row])][-1] == "worker"
    names = {column.name: column.oid for column in columns_for("workers", [row])}
    assert (names["extra"], names["database"]) == (20, 25)


def test_a_missing_value_is_null_and_flags_and_lists_are_readable() -> None:
    columns = [int4_column("a"), text_column("b"), int4_column("c"), text_column("d"), int8_column("e")]
    row = {"b": True, "c": True, "d": ["x", "y"], "e": 2.9}
    assert cells(columns, row) == [None, "yes", 1, "x y", 2]


def pool(worker: str, **counts: int) -> dict[str, Any]:
    return {"database": "d", "user": "u", "pool_mode": "transaction", "cl_active": 0, "maxwait": 0,
            "maxwait_us": 0, "load_balance_hosts": None, **counts, "worker": worker}


def test_pools_of_all_workers_are_one_row_with_the_longest_wait() -> None:
    merged = merge_rows("pools", [pool("w0", cl_active=2, maxwait=1, maxwait_us=900_000),
                                  pool("w1", cl_active=3, maxwait=2, maxwait_us=1)])
    (row,) = merged
    assert (row["cl_active"], row["maxwait"], row["maxwait_us"]) == (5, 2, 1)
    assert row["worker"] == "w0,w1"


def test_how_a_pool_grew_adds_up_over_the_workers_that_have_it() -> None:
    statistics = PoolStatistics(database="d", user="u", pool_mode="session", scaling={"creates_started": 3})
    row = made.pool_scaling_row(statistics)
    other = {**row, "user": "v"}
    assert [(each["user"], each["creates"], each["worker"]) for each in merge_rows(
        "pool_scaling", [{**row, "worker": "0"}, {**other, "worker": "0"}, {**row, "worker": "1"}])] == [
            ("u", 6, "0,1"), ("v", 3, "0")]


def test_means_are_weighed_and_rates_add_up() -> None:
    rows = [{"database": "d", "avg_xact_count": 1, "avg_xact_time": 100, "avg_recv": 10},
            {"database": "d", "avg_xact_count": 3, "avg_xact_time": 500, "avg_recv": 5}]
    assert merge_rows("stats", rows) == [
        {"database": "d", "avg_xact_count": 4, "avg_xact_time": 400, "avg_recv": 15}]


def test_limits_of_the_fleet_do_not_add_up_but_what_is_used_does() -> None:
    rows = [{"name": "d", "pool_size": 20, "current_connections": 3, "worker": "w0"},
            {"name": "d", "pool_size": 20, "current_connections": 4, "worker": "w1"}]
    assert merge_rows("databases", rows) == [{"name": "d", "pool_size": 20, "current_connections": 7}]


def test_lists_add_clients_but_not_databases() -> None:
    rows = [{"list": "databases", "items": 2}, {"list": "used_clients", "items": 5}]
    assert merge_rows("lists", rows + rows) == [
        {"list": "databases", "items": 2}, {"list": "used_clients", "items": 10}]


def test_free_places_are_the_fleets_and_not_each_workers() -> None:
    """Each worker tells how many more clients may come to the host; one of them heard of one client less."""
    rows = [{"list": "free_clients", "items": 90}, {"list": "free_clients", "items": 89}]
    assert merge_rows("lists", rows) == [{"list": "free_clients", "items": 89}]


def test_the_fleet_is_paused_only_when_every_worker_is() -> None:
    def state(active: str, paused: str) -> list[dict[str, Any]]:
        return [{"key": "active", "value": active}, {"key": "paused", "value": paused}]

    mixed = merge_rows("state", state("yes", "no") + state("no", "yes"))
    assert [row["value"] for row in mixed] == ["yes", "no"]
    assert [row["value"] for row in merge_rows("state", state("no", "yes") * 2)] == ["no", "yes"]


def test_clients_stay_one_row_each() -> None:
    rows = [{"worker": "w0", "id": 1}, {"worker": "w1", "id": 1}]
    assert merge_rows("clients", rows) == rows


@given(st.integers(-(10**40), 10**40))
def test_a_whole_number_is_sent_as_numeric(value: int) -> None:
    loader: Loader = NumericBinaryLoader(1700)
    assert loader.load(encode_numeric(value)) == value


def test_each_column_has_the_format_that_was_asked_for() -> None:
    columns = [int4_column("a"), int8_column("b"), numeric_column("c"), text_column("d")]
    row = encode_row(columns, [7, 8, 0, None], [1, 0, 1, 1])
    assert row[7:] == (b"\0\0\0\x04\0\0\0\x07" b"\0\0\0\x018" b"\0\0\0\x08" + bytes(8) + b"\xff\xff\xff\xff")
    described = describe_row(columns, [1])
    assert [column.name for column in read_row_description(described[5:])] == ["a", "b", "c", "d"]
    assert psycopg.pq.Format(int.from_bytes(described[-2:], "big")) is Format.BINARY
    assert encode_row([int4_column("a")], [2**40], [1])[-4:] == b"\x7f\xff\xff\xff"
