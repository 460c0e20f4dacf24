"""Memory of the workers while much passes through: 1 GiB of COPY each way, values of 200 MiB, a client that
stops reading. What counts is by how much the highest resident size exceeds that of idle workers."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any

import psycopg

from benchmarks.measure import Target, now, resident_bytes
from benchmarks.sides import DBNAME, PASSWORD, USER, Sides, both_sides
from pooler.demo.client import RawClient, query

MIB = 1 << 20
COPY_BYTES, VALUE_BYTES = 1024 * MIB, 200 * MIB
ROW = b"x" * 1023 + b"\n"
STOPPED_SECONDS = 60.0

Say = Callable[[str], None]


def weigh(say: Say) -> dict[str, Any]:
    """The result document. Raises PartFailed when a part is missing."""
    began = now()
    found: dict[str, float] = {}
    with both_sides(1) as sides:
        with connect(sides.ours) as client:
            client.execute("create unlogged table sink (line text)")
        for name, act in ACTS.items():
            found[name] = _highest(sides, act)
            say(f"{name}: {found[name]:.2f} MiB above idle")
    return {"mib_above_idle": found, "highest_mib_above_idle": max(found.values()),
            "copy_bytes": COPY_BYTES, "value_bytes": VALUE_BYTES, "stopped_seconds": STOPPED_SECONDS,
            "seconds": round(now() - began, 1)}


def connect(target: Target) -> psycopg.Connection[tuple[Any, ...]]:
    return psycopg.connect(
        host="127.0.0.1", port=target.port, user=USER, password=PASSWORD, dbname=DBNAME, autocommit=True)


def _highest(sides: Sides, act: Callable[[Target], None]) -> float:
    workers = {pid for pid in sides.fleet_pids() if "pooler.worker" in _command(pid)}
    with connect(sides.ours) as client:
        client.execute("select 1")
    before = resident_bytes(workers)
    for pid in workers:
        with open(f"/proc/{pid}/clear_refs", "w") as control:
            control.write("5")  # the high-water mark starts again (proc(5))
    act(sides.ours)
    assert workers
    return round((sum(_peak(pid) for pid in workers) - before) / MIB, 3)


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as command:
        return command.read()


def _peak(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def _copy_out(target: Target) -> None:
    got = 0
    with connect(target) as client, client.cursor().copy(
        f"copy (select repeat('x', 1023) from generate_series(1, {COPY_BYTES // 1024})) to stdout"
    ) as rows:
        for row in rows:
            got += len(row)
    assert got == COPY_BYTES, got


def _copy_in(target: Target) -> None:
    with connect(target) as client:
        cursor = client.cursor()
        with cursor.copy("copy sink from stdin where length(line) <> 1023") as copy:
            for _ in range(COPY_BYTES // MIB):
                copy.write(ROW * 1024)
        assert cursor.rowcount == 0, cursor.rowcount  # it counts what passed the condition


def _value_out(target: Target) -> None:
    with connect(target) as client:
        row = client.execute(f"select repeat('x', {VALUE_BYTES})").fetchone()
        assert row is not None
        assert len(row[0]) == VALUE_BYTES


def _value_in(target: Target) -> None:
    with connect(target) as client:
        row = client.execute("select length(%s::text)", ["x" * VALUE_BYTES]).fetchone()
        assert row == (VALUE_BYTES,)


def _query_in(target: Target) -> None:
    with connect(target) as client:
        row = psycopg.ClientCursor(client).execute(f"select length('{'x' * VALUE_BYTES}')").fetchone()
        assert row == (VALUE_BYTES,)


def _stopped(target: Target) -> None:
    """500 MB are asked for and not read for a minute; others are served meanwhile; then all is read."""
    wanted = 500 * MIB
    with RawClient("127.0.0.1", target.port).login(USER, PASSWORD, DBNAME) as slow:
        slow.send(query(f"select repeat('x', {MIB}) from generate_series(1, {wanted // MIB})"))
        deadline = now() + STOPPED_SECONDS
        with connect(target) as other:
            while now() < deadline:
                other.execute("select pg_sleep(0.05)")
        got, sock = 0, slow.socket
        while got < wanted:
            select.select([sock], [], [], 30)
            got += len(sock.recv(MIB, socket.MSG_DONTWAIT))


ACTS: dict[str, Callable[[Target], None]] = {
    "1 GiB COPY OUT": _copy_out, "1 GiB COPY IN": _copy_in, "a value of 200 MiB out": _value_out,
    "a value of 200 MiB in": _value_in, "a query of 200 MiB": _query_in,
    "a client that stops reading": _stopped,
}
