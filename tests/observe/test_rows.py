"""Rows of a SHOW: PgBouncer's columns, exact totals, averages that mean something."""

from __future__ import annotations

from pooler.observe import rows
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

POOL = PoolStatistics(database="orders", user="app", pool_mode="transaction", longest_wait_us=2_500_000,
                      totals=Totals(transactions=5))
SOCKET = {"user": "app", "database": "orders", "state": "active", "address": "10.0.0.1", "port": 5432,
          "local_address": "10.0.0.2", "local_port": 6432, "connected_at_us": 0, "wait_us": 1_000_002}


def test_a_wait_is_split_into_seconds_and_the_rest() -> None:
    row = rows.pool_row(POOL)
    assert (row["maxwait"], row["maxwait_us"]) == (2, 500_000)
    client = rows.socket_row(ClientRow(**SOCKET))  # type: ignore[arg-type]
    assert (client["wait"], client["wait_us"]) == (1, 2)


def test_clients_and_servers_share_their_columns_and_add_their_own() -> None:
    client = rows.socket_row(ClientRow(**SOCKET, tenant="t"))  # type: ignore[arg-type]
    server = rows.socket_row(ServerRow(**SOCKET, permit="s-1", epoch=3))  # type: ignore[arg-type]
    assert (client["type"], server["type"]) == ("C", "S")
    assert client["tenant"] == "t"
    assert (server["permit"], server["epoch"]) == ("s-1", 3)
    assert client["connect_time"] == "1970-01-01 00:00:00 UTC"
    assert client["request_time"] is None


def test_an_average_wait_is_the_mean_over_assignments_not_over_the_clock() -> None:
    """R63."""
    period = Totals(server_assignments=100, wait_us=10_000_000, transactions=0, received_bytes=600)
    row = rows.stats_row(StatsRow("orders", period, period, 60.0))
    assert row["avg_wait_time"] == 100_000
    assert row["avg_xact_time"] == 0
    assert row["avg_recv"] == 10
    assert row["total_wait_time"] == 10_000_000


def test_totals_of_pools_that_are_gone_still_count() -> None:
    (row,) = rows.stats_rows([POOL, POOL], {"orders": Totals(transactions=100)}, {}, 60.0)
    assert row.totals.transactions == 110
    assert rows.totals_rows([row])[1] == {"name": "xact_count", "value": 110}


def test_unset_sizes_of_a_user_are_empty_texts() -> None:
    assert rows.user_row(UserRow(name="a"))["pool_size"] == ""
    assert rows.user_row(UserRow(name="a", pool_size=3))["pool_size"] == "3"


def test_flags_are_numbers_and_names_are_pgbouncers() -> None:
    row = rows.database_row(DatabaseRow(name="o", host=None, port=5432, database="o", paused=True,
                                        server_lifetime_seconds=60))
    assert (row["paused"], row["disabled"], row["server_lifetime"]) == (1, 0, 60)
    assert rows.config_row(ConfigRow("k", "v", None, True, "file"))["changeable"] == "yes"


def test_lists_count_what_the_worker_has() -> None:
    worker = WorkerStatistics(worker="w0", version="1", started_at_us=0, clients_max=10, logins_open=1,
                              pools=(PoolStatistics(database="d", user="u", pool_mode="session",
                                                    clients_active=2, clients_idle=3, sessions_idle=4),))
    listed = rows.lists_rows(worker, databases=2, users=3, clients=7)  # of all workers of the host
    items = {str(row["list"]): row["items"] for row in listed}
    assert (items["used_clients"], items["free_clients"], items["used_servers"]) == (5, 3, 4)
    over = rows.lists_rows(worker, databases=2, users=3, clients=11)  # the limit was lowered by a reload
    assert {"list": "free_clients", "items": 0} in over


def test_statistics_answer_the_items_they_cover_and_no_others() -> None:
    worker = WorkerStatistics(worker="w0", version="1", started_at_us=0, pools=(POOL,), state="paused")
    assert rows.statistics_rows(worker, "pools") == [rows.pool_row(POOL)]
    assert rows.statistics_rows(worker, "state") == [
        {"key": "active", "value": "no"},
        {"key": "paused", "value": "yes"},
        {"key": "suspended", "value": "no"},
    ]
    assert rows.statistics_rows(worker, "clients") is None
