"""SHOW MEM: figures of the worker that is asked, and of several together."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pooler.console.merge import merge_rows
from pooler.console.tables import COLUMNS, cells
from pooler.serve.memory import memory_rows
from pooler.serve.registry import Registry


class Statements:
    """Three texts."""

    text_bytes = 300

    def __len__(self) -> int:
        return 3


class End:
    """A client or a session, by its buffers."""

    def __init__(self, came: bytes = b"", out: bytearray | None = None) -> None:
        self.buffer, self.out = came, out


def rows(*clients: End) -> dict[str, dict[str, Any]]:
    registry = SimpleNamespace(
        known_users=("ann", "bob"), pools={}, clients=dict(enumerate(clients)),
        settings=SimpleNamespace(databases={"a": object()}),
        parts=SimpleNamespace(servers={End(out=bytearray(b"12345")): 1}, statements=Statements()))
    return {row["name"]: row for row in memory_rows(cast(Registry, registry))}


def test_what_is_held_is_counted_by_kind_and_the_process_as_the_system_sees_it() -> None:
    found = rows(End(b"123"), End(b"", bytearray(b"1")), End())
    assert {name: row["used"] for name, row in found.items() if name != "process"} == {
        "user_cache": 2, "db_cache": 1, "pool_cache": 0, "server_cache": 1, "client_cache": 3,
        "iobuf_cache": 3, "server_prepared_statement_cache": 3}
    assert found["iobuf_cache"]["memtotal"] == 9
    assert (found["server_prepared_statement_cache"]["size"], found["pool_cache"]["memtotal"]) == (100, 0)
    assert all(row["memtotal"] // max(row["used"], 1) == row["size"] for row in found.values())
    resident_kib = int(Path(f"/proc/{os.getpid()}/status").read_text().split("VmRSS:")[1].split()[0])
    assert abs(found["process"]["memtotal"] - resident_kib * 1024) < 32 << 20


def test_of_several_workers_it_is_the_sum_and_of_one_object_the_mean() -> None:
    one = {"name": "client_cache", "size": 100, "used": 1, "free": 0, "memtotal": 100, "worker": "0"}
    other = {"name": "client_cache", "size": 200, "used": 3, "free": 0, "memtotal": 600, "worker": "1"}
    assert merge_rows("mem", [one, other]) == [
        {"name": "client_cache", "size": 175, "used": 4, "free": 0, "memtotal": 700}]
    none = {"name": "client_cache", "size": 0, "used": 0, "free": 0, "memtotal": 0}
    assert merge_rows("mem", [none, none])[0]["size"] == 0


def test_a_figure_too_large_for_its_column_is_the_largest_that_there_is() -> None:
    row = {"name": "process", "size": 4096, "used": 1 << 20, "free": 0, "memtotal": 1 << 32}
    assert cells(COLUMNS["mem"], row) == ["process", 4096, 1 << 20, 0, 2**31 - 1]
