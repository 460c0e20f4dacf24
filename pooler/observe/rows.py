"""Snapshots as rows of a SHOW, with PgBouncer's column names (the order is the console's affair). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime

from pooler.observe.snapshot import (
    ClientRow,
    ConfigRow,
    DatabaseRow,
    PoolStatistics,
    ServerRow,
    SocketRow,
    StatsRow,
    Totals,
    UserRow,
    WorkerStatistics,
)

Cell = str | int | None
Row = dict[str, Cell]


def stats_rows(
    pools: Iterable[PoolStatistics],
    before: Mapping[str, Totals],
    period: Mapping[str, Totals],
    seconds: float,
) -> tuple[StatsRow, ...]:
    """One row a database. `before` is added to the totals (pools that are gone); `period` is what was done in
    the last whole period of so many seconds."""
    totals = dict(before)
    for pool in pools:
        totals[pool.database] = totals.get(pool.database, Totals()) + pool.totals
    return tuple(
        StatsRow(database, totals[database], period.get(database, Totals()), seconds)
        for database in sorted(totals)
    )


def pool_row(pool: PoolStatistics) -> Row:
    """SHOW POOLS."""
    return {
        "database": pool.database,
        "user": pool.user,
        "cl_active": pool.clients_active,
        "cl_waiting": pool.clients_waiting,
        "cl_active_cancel_req": pool.cancels_active,
        "cl_waiting_cancel_req": pool.cancels_waiting,
        "sv_active": pool.sessions_active,
        "sv_active_cancel": pool.sessions_cancelling,
        "sv_being_canceled": pool.sessions_being_canceled,
        "sv_idle": pool.sessions_idle,
        "sv_used": pool.sessions_used,
        "sv_tested": pool.sessions_tested,
        "sv_login": pool.sessions_opening,
        "maxwait": pool.longest_wait_us // 1_000_000,
        "maxwait_us": pool.longest_wait_us % 1_000_000,
        "pool_mode": pool.pool_mode,
        "load_balance_hosts": pool.load_balance_hosts,
    }


_SCALING = {
    "inflight": "inflight_creates",
    "creates": "creates_started",
    "gate_waits": "burst_gate_waits",
    "gate_budget_ex": "burst_gate_budget_exhausted",
    "antic_notify": "anticipation_wakes_notify",
    "antic_timeout": "anticipation_wakes_timeout",
    "create_fallback": "create_fallback",
    "replenish_def": "replenish_deferred",
}


def pool_scaling_row(pool: PoolStatistics) -> Row:
    """SHOW POOL_SCALING."""
    row: Row = {"user": pool.user, "database": pool.database}
    return row | {column: pool.scaling.get(name, 0) for column, name in _SCALING.items()}


def socket_row(socket: SocketRow) -> Row:
    """SHOW CLIENTS and SHOW SERVERS."""
    row: Row = {
        "type": "C" if isinstance(socket, ClientRow) else "S",
        "user": socket.user,
        "database": socket.database,
        "replication": socket.replication,
        "state": socket.state,
        "addr": socket.address,
        "port": socket.port,
        "local_addr": socket.local_address,
        "local_port": socket.local_port,
        "connect_time": clock_text(socket.connected_at_us),
        "request_time": None if socket.requested_at_us is None else clock_text(socket.requested_at_us),
        "wait": socket.wait_us // 1_000_000,
        "wait_us": socket.wait_us % 1_000_000,
        "close_needed": int(socket.close_needed),
        "ptr": socket.pointer,
        "link": socket.link,
        "remote_pid": socket.remote_pid,
        "tls": socket.tls,
        "application_name": socket.application_name,
        "prepared_statements": socket.prepared_statements,
        "id": socket.id,
    }
    if isinstance(socket, ClientRow):
        row |= {"tenant": socket.tenant, "class": socket.class_name, "service": socket.service}
    elif isinstance(socket, ServerRow):
        row |= {"permit": socket.permit, "epoch": socket.epoch}
    return row


def database_row(row: DatabaseRow) -> Row:
    """SHOW DATABASES."""
    cells: Row = {f.name.removesuffix("_seconds"): getattr(row, f.name) for f in fields(row)}
    return cells | {"paused": int(row.paused), "disabled": int(row.disabled)}


def user_row(row: UserRow) -> Row:
    """SHOW USERS: sizes that are not set are empty texts."""
    cells: Row = {f.name: getattr(row, f.name) for f in fields(row)}
    for name in ("pool_size", "reserve_pool_size"):
        cells[name] = "" if cells[name] is None else str(cells[name])
    return cells


def config_row(row: ConfigRow) -> Row:
    """SHOW CONFIG."""
    return {
        "key": row.key,
        "value": row.value,
        "default": row.default,
        "changeable": "yes" if row.changeable else "no",
        "source": row.source,
    }


# our name: PgBouncer's in STATS_TOTALS and TOTALS, in STATS after total_, after avg_, in STATS_AVERAGES
_COUNTERS = {
    "server_assignments": ("server_assignment_count",) * 4,
    "transactions": ("xact_count",) * 4,
    "queries": ("query_count",) * 4,
    "received_bytes": ("bytes_received", "received", "recv", "bytes_received"),
    "sent_bytes": ("bytes_sent", "sent", "sent", "bytes_sent"),
    "transaction_us": ("xact_time",) * 4,
    "query_us": ("query_time",) * 4,
    "wait_us": ("wait_time",) * 4,
    "client_parses": ("client_parse_count",) * 3 + ("avg_client_parse_count",),
    "server_parses": ("server_parse_count",) * 3 + ("avg_server_parse_count",),
    "binds": ("bind_count",) * 3 + ("avg_bind_count",),
    "client_logins": ("client_login_count",) * 3 + ("avg_client_login_count",),
}
_MEAN_OVER = {"transaction_us": "transactions", "query_us": "queries", "wait_us": "server_assignments"}


def averages(row: StatsRow) -> dict[str, int]:
    """By our names: counts and bytes a second; times a transaction, a query, an assignment."""
    found: dict[str, int] = {}
    for name in _COUNTERS:
        amount = getattr(row.period, name)
        over = getattr(row.period, _MEAN_OVER[name]) if name in _MEAN_OVER else row.period_seconds
        found[name] = int(amount / over) if over else 0
    return found


def stats_row(row: StatsRow) -> Row:
    """SHOW STATS."""
    mean = averages(row)
    cells: Row = {"database": row.database}
    cells |= {f"total_{names[1]}": getattr(row.totals, name) for name, names in _COUNTERS.items()}
    return cells | {f"avg_{names[2]}": mean[name] for name, names in _COUNTERS.items()}


def stats_totals_row(row: StatsRow) -> Row:
    """SHOW STATS_TOTALS."""
    return {"database": row.database} | {
        names[0]: getattr(row.totals, name) for name, names in _COUNTERS.items()
    }


def stats_averages_row(row: StatsRow) -> Row:
    """SHOW STATS_AVERAGES."""
    mean = averages(row)
    return {"database": row.database} | {names[3]: mean[name] for name, names in _COUNTERS.items()}


def totals_rows(stats: Iterable[StatsRow]) -> list[Row]:
    """SHOW TOTALS: every counter over all databases."""
    total = Totals()
    for row in stats:
        total += row.totals
    return [{"name": names[0], "value": getattr(total, name)} for name, names in _COUNTERS.items()]


def lists_rows(worker: WorkerStatistics, *, databases: int, users: int, clients: int) -> list[Row]:
    """SHOW LISTS. `clients`: those of all workers of the host, who share the limit."""
    used = sum(p.clients_active + p.clients_waiting + p.clients_idle for p in worker.pools)
    items = {
        "databases": databases,
        "users": users,
        "peers": 0,
        "pools": len(worker.pools),
        "peer_pools": 0,
        "free_clients": max(0, worker.clients_max - clients),
        "used_clients": used,
        "login_clients": worker.logins_open,
        "free_servers": 0,
        "used_servers": sum(p.sessions_active + p.sessions_idle + p.sessions_used for p in worker.pools),
        "dns_names": 0,
        "dns_zones": 0,
        "dns_queries": 0,
        "dns_pending": 0,
    }
    return [{"list": name, "items": count} for name, count in items.items()]


def state_rows(worker: WorkerStatistics) -> list[Row]:
    """SHOW STATE."""
    states = ("active", "paused", "suspended")
    return [{"key": name, "value": "yes" if worker.state == name else "no"} for name in states]


def statistics_rows(worker: WorkerStatistics, item: str) -> list[Row] | None:
    """Rows of the SHOW items that the statistics alone answer; None for the others."""
    makers: dict[str, Callable[[], list[Row]]] = {
        "pools": lambda: [pool_row(pool) for pool in worker.pools],
        "pool_scaling": lambda: [pool_scaling_row(pool) for pool in worker.pools],
        "stats": lambda: [stats_row(row) for row in worker.stats],
        "stats_totals": lambda: [stats_totals_row(row) for row in worker.stats],
        "stats_averages": lambda: [stats_averages_row(row) for row in worker.stats],
        "totals": lambda: totals_rows(worker.stats),
        "state": lambda: state_rows(worker),
    }
    make = makers.get(item)
    return None if make is None else make()


def clock_text(at_us: int) -> str:
    """A time of the clock as PgBouncer writes it."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
