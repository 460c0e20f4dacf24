"""The shape of every SHOW: PgBouncer's columns in its order and types, then our own. Pure.

Types are those of PgBouncer 1.25 (int4, int8, numeric, text), because exporters and drivers depend on them.
Columns of our own items and our own extra columns are taken from the rows that come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pooler.wire.messages import Column, int4_column, int8_column, numeric_column, text_column

Rows = Sequence[Mapping[str, Any]]

_MAKERS = {"i": int4_column, "l": int8_column, "n": numeric_column, "t": text_column}
_SOCKET = (
    "type:t user:t database:t replication:t state:t addr:t port:i local_addr:t local_port:i connect_time:t "
    "request_time:t wait:i wait_us:i close_needed:i ptr:t link:t remote_pid:i tls:t application_name:t "
    "prepared_statements:i id:i"
)
_BUFFERS = "recv_pos:i pkt_pos:i pkt_remain:i send_pos:i send_remain:i pkt_avail:i send_avail:i"
_COUNTS = (
    "server_assignment_count xact_count query_count {} {} xact_time query_time wait_time client_parse_count "
    "server_parse_count bind_count client_login_count"
)


def _numeric(names: str, before: str = "") -> str:
    return " ".join(f"{before}{name}:n" for name in names.split())


_SPECS: Final = {
    "clients": _SOCKET + " tenant:t class:t service:t worker:t",
    "servers": _SOCKET + " permit:t epoch:i worker:t",
    "sockets": f"{_SOCKET} {_BUFFERS} worker:t",
    "active_sockets": f"{_SOCKET} {_BUFFERS} worker:t",
    "config": "key:t value:t default:t changeable:t source:t",
    "databases": "name:t host:t port:i database:t force_user:t pool_size:i min_pool_size:i "
    "reserve_pool_size:i server_lifetime:i pool_mode:t load_balance_hosts:t max_connections:i "
    "current_connections:i max_client_connections:i current_client_connections:i paused:i disabled:i",
    "lists": "list:t items:i",
    "peers": "peer_id:i host:t port:i pool_size:i",
    "peer_pools": "peer_id:i cl_active_cancel_req:i cl_waiting_cancel_req:i sv_active_cancel:i sv_login:i",
    "pools": "database:t user:t cl_active:i cl_waiting:i cl_active_cancel_req:i cl_waiting_cancel_req:i "
    "sv_active:i sv_active_cancel:i sv_being_canceled:i sv_idle:i sv_used:i sv_tested:i sv_login:i maxwait:i "
    "maxwait_us:i pool_mode:t load_balance_hosts:t worker:t",
    "pool_scaling": "user:t database:t inflight:i creates:l gate_waits:l gate_budget_ex:l antic_notify:l "
    "antic_timeout:l create_fallback:l replenish_def:l worker:t",
    "state": "key:t value:t",
    "stats": "database:t "
    + _numeric(_COUNTS.format("received", "sent"), "total_")
    + " "
    + _numeric(_COUNTS.format("recv", "sent"), "avg_"),
    "stats_totals": "database:t " + _numeric(_COUNTS.format("bytes_received", "bytes_sent")),
    "stats_averages": "database:t server_assignment_count:n xact_count:n query_count:n bytes_received:n "
    "bytes_sent:n xact_time:n query_time:n wait_time:n avg_client_parse_count:n avg_server_parse_count:n "
    "avg_bind_count:n avg_client_login_count:n",
    "totals": "name:t value:n",
    "users": "name:t pool_size:t reserve_pool_size:t pool_mode:t max_user_connections:i "
    "current_connections:i max_user_client_connections:i current_client_connections:i",
    "mem": "name:t size:i used:i free:i memtotal:i",
    "fds": "fd:i task:t user:t database:t addr:t port:i cancel:l link:i client_encoding:t std_strings:t "
    "datestyle:t timezone:t password:t scram_client_key:t scram_server_key:t worker:t",
    "dns_hosts": "hostname:t ttl:l addrs:t",
    "dns_zones": "zonename:t serial:l count:i",
    "version": "version:t",
    "ledger": "database:t permit:t kind:t slot:i generation:l state:t age_seconds:l owner:t host:t dbname:t "
    "user:t pid:i backend:t epoch:i policy_generation:l ticket:t tenant:t abandoned:t terminating:t "
    "awaited_proof:t",
    "ticket": "database:t ticket:t state:t outcome:t attempt:i worker:t host:t client:t tenant:t class:t "
    "permit:t pid:i queued_at_us:l changed_at_us:l",
    "leaks": "database:t user:t permit:t pid:i why:t late:t age_ms:l limit_ms:l waits_for:t silent_ms:l "
    "client:t application_name:t tenant:t class:t last_command:t worker:t",
    "classes": "database:t class:t permits:i allotted:i executing:i waiting:i max_queue:i oldest_wait_ms:l "
    "refused:l worker:t",
    "tenants": "database:t tenant:t class:t weight:i inflight:i executing:i waiting:i served:l refused:l "
    "worker:t rate:n burst:n tokens:n admitted_cost:n refused_cost:n",
    "tickets": "database:t user:t ticket:t state:t client:t tenant:t class:t waited_ms:l executing_ms:l "
    "permit:t pid:i worker:t",
    "waiters": "database:t user:t client:t application_name:t tenant:t class:t position:i waited_ms:l "
    "bound_by:t worker:t expected_ms:l",
    "workers": "worker:t index:i boot_id:t state:t clients:i waiting:i sessions:i linked:i",
}


def _columns(spec: str) -> tuple[Column, ...]:
    return tuple(_MAKERS[kind](name) for name, _, kind in (word.partition(":") for word in spec.split()))


COLUMNS: Final[dict[str, tuple[Column, ...]]] = {item: _columns(spec) for item, spec in _SPECS.items()}
_OPEN_ENDED: Final = frozenset({"ledger", "workers"})


def columns_for(item: str, rows: Rows) -> tuple[Column, ...]:
    """The columns of an answer: the item's own, and after them whatever else these rows have.

    For PgBouncer's items only `worker` may be added, so that their shape does not depend on the rows.
    """
    known = COLUMNS[item]
    names = {column.name for column in known}
    more = dict.fromkeys(name for row in rows for name in row if name not in names)
    if item not in _OPEN_ENDED:
        more = {name: None for name in more if name == "worker"}
    return (*known, *(_guess(name, (row.get(name) for row in rows)) for name in more))


def _guess(name: str, values: Iterable[Any]) -> Column:
    seen = [value for value in values if value is not None]
    return int8_column(name) if seen and all(type(value) is int for value in seen) else text_column(name)


def cells(columns: Sequence[Column], row: Mapping[str, Any]) -> list[str | int | None]:
    """A row's values in the order of the columns, NULL where it has none."""
    return [_cell(column, row.get(column.name)) for column in columns]


def _cell(column: Column, value: Any) -> str | int | None:
    if value is None or type(value) is int:
        return value if value is None or column.oid != INT4_OID else min(value, INT4_MAX)
    if isinstance(value, bool):
        return int(value) if column.oid != _TEXT_OID else ("yes" if value else "no")
    if column.oid != _TEXT_OID and isinstance(value, float):
        return int(value)
    if isinstance(value, list | tuple):
        return " ".join(str(each) for each in value)
    return str(value)


_TEXT_OID: Final = 25
INT4_OID: Final = 23
INT4_MAX: Final = 2**31 - 1
