"""Rows of every worker made one answer of the fleet. Pure.

Counts add up, the longest wait is the longest of all, averages of times are weighed by what they are averages
over. The `worker` of a row of POOLS and POOL_SCALING says whose rows are in it. CLIENTS, SERVERS, LEDGER and
WORKERS stay as they are: their rows are one worker's each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

Row = dict[str, Any]
Merge = Callable[[Sequence[Row]], Row]

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "pools": ("database", "user", "pool_mode"),
    "pool_scaling": ("user", "database"),
    "stats": ("database",),
    "stats_totals": ("database",),
    "stats_averages": ("database",),
    "totals": ("name",),
    "databases": ("name",),
    "users": ("name",),
    "lists": ("list",),
    "config": ("key",),
    "state": ("key",),
    "mem": ("name",),
    "version": ("version",),
    "dns_hosts": ("hostname",),
    "dns_zones": ("zonename",),
    "peers": ("peer_id",),
    "peer_pools": ("peer_id",),
}
_SUMMED_EXCEPT: Final = {  # limits are the fleet's, the same in every worker
    "databases": {"current_connections", "current_client_connections"},
    "users": {"current_connections", "current_client_connections"},
}
_WITH_WORKERS: Final = frozenset({"pools", "pool_scaling"})
_NOT_PER_WORKER: Final = frozenset({"databases", "users", "peers", "pools", "peer_pools"})  # of LISTS
_MEANS: Final = {
    "avg_xact_time": "avg_xact_count",
    "avg_query_time": "avg_query_count",
    "avg_wait_time": "avg_server_assignment_count",
    "xact_time": "xact_count",
    "query_time": "query_count",
    "wait_time": "server_assignment_count",
}


def merge_rows(item: str, rows: Iterable[Row]) -> list[Row]:
    """One row for each key of the item, in the order in which the keys first came."""
    keys = KEYS.get(item)
    if keys is None:
        return list(rows)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    merge = _MERGES.get(item, _add)
    if item in _WITH_WORKERS:
        return [_with_workers(merge(group), group) for group in groups.values()]
    return [_without_worker(merge(group)) for group in groups.values()]


def _with_workers(merged: Row, group: Sequence[Row]) -> Row:
    workers = dict.fromkeys(str(row["worker"]) for row in group if row.get("worker") is not None)
    if workers:
        merged["worker"] = ",".join(workers)
    return merged


def _without_worker(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "worker"}


def _add(group: Sequence[Row]) -> Row:
    """Numbers add up, the rest is the first row's."""
    merged = dict(group[0])
    for row in group[1:]:
        for name, value in row.items():
            if _is_number(value) and _is_number(merged.get(name)):
                merged[name] += value
            elif merged.get(name) is None:
                merged[name] = value
    return merged


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _pools(group: Sequence[Row]) -> Row:
    merged = _add(group)
    longest = max(row["maxwait"] * 1_000_000 + row["maxwait_us"] for row in group)
    merged["maxwait"], merged["maxwait_us"] = divmod(longest, 1_000_000)
    return merged


def _means(group: Sequence[Row]) -> Row:
    """Averages: rates add up, means are weighed."""
    merged = _add(group)
    for mean, over in _MEANS.items():
        if mean in merged and over in merged:
            weight = sum(row.get(over) or 0 for row in group)
            total = sum((row.get(mean) or 0) * (row.get(over) or 0) for row in group)
            merged[mean] = int(total / weight) if weight else max(row.get(mean) or 0 for row in group)
    return merged


def _memory(group: Sequence[Row]) -> Row:
    """The processes' together; an object is as large as it is on average."""
    merged = _add(group)
    return merged | {"size": merged["memtotal"] // (merged["used"] or 1)}


def _limits(summed: set[str]) -> Merge:
    def merge(group: Sequence[Row]) -> Row:
        merged = _add(group)
        for name, value in merged.items():
            if _is_number(value) and name not in summed:
                merged[name] = max(row.get(name) or 0 for row in group)
        return merged

    return merge


def _lists(group: Sequence[Row]) -> Row:
    if group[0].get("list") == "free_clients":  # the places of all workers; the latest count is the least
        return min(group, key=lambda row: row["items"])
    if group[0].get("list") in _NOT_PER_WORKER:
        return _limits(set())(group)
    return _add(group)


def _states(group: Sequence[Row]) -> Row:
    """The fleet is paused when every worker is, and active when any is."""
    said = {row.get("value") for row in group}
    some = group[0].get("key") == "active"
    yes = "yes" in said if some else said == {"yes"}
    return dict(group[0]) | {"value": "yes" if yes else "no"}


def _first(group: Sequence[Row]) -> Row:
    return dict(group[0])


_MERGES: Final[dict[str, Merge]] = {
    "pools": _pools,
    "stats": _means,
    "stats_averages": _means,
    "databases": _limits(_SUMMED_EXCEPT["databases"]),
    "users": _limits(_SUMMED_EXCEPT["users"]),
    "lists": _lists,
    "state": _states,
    "config": _first,
    "mem": _memory,
    "version": _first,
    "dns_hosts": _first,
    "dns_zones": _first,
    "peers": _first,
}
