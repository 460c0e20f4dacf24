"""The session table: what a reader sees beside a live writer, after a kill, and of two boots."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator import session_table
from coordinator.ledger.record import Kind, Permit
from coordinator.session_table import (
    Activity,
    Doing,
    SessionTable,
    TableUnreadable,
    encode_who,
    list_tables,
    read_head,
    read_table,
    read_tickets,
)

DB = "orders-primary/write"
PERMIT = Permit(Kind.MAIN, 7, 4_294_967_999)
SINCE_US = 1_790_000_000_000_001


@pytest.fixture
def table(tmp_path: Path) -> SessionTable:
    return SessionTable.create(tmp_path, "boot-1", session_rows=4, ticket_rows=2, clock_offset_us=0)


def test_a_taken_row_is_read_back_idle_then_busy_then_idle_then_gone(table: SessionTable) -> None:
    row = table.take(DB, PERMIT, pid=4711)
    (idle,) = read_table(table.path)
    assert (idle.db, idle.kind, idle.slot, idle.generation, idle.pid) == (DB, "main", 7, 4_294_967_999, 4711)
    assert idle.doing == Doing(Activity.IDLE)
    row.busy(42, encode_who("shop", "interactive", "10.0.0.7:5000/psql", "order-9"), SINCE_US)
    (busy,) = read_table(table.path)
    assert busy.doing == Doing(
        Activity.BUSY, 42, "order-9", "shop", "interactive", "10.0.0.7:5000/psql", SINCE_US)
    row.idle()
    assert read_table(table.path) == [idle]
    row.free()
    row.free()
    assert read_table(table.path) == []


def test_a_permit_that_moved_to_another_slot_is_read_with_its_new_identity(table: SessionTable) -> None:
    row = table.take(DB, Permit(Kind.RESERVE, 3, 99), pid=1)
    row.busy(5, encode_who("a", "b", "c"), SINCE_US)
    row.identify(DB, Permit(Kind.MAIN, 12, 99), pid=1)
    (read,) = read_table(table.path)
    assert (read.kind, read.slot, read.doing.ticket_id) == ("main", 12, 5)


def test_a_granted_ticket_leaves_a_trace_until_it_is_freed(table: SessionTable) -> None:
    ticket = table.take_ticket(8, encode_who("shop", "batch", "local"), SINCE_US)
    (doing,) = read_tickets(table.path)
    assert (doing.ticket_id, doing.tenant, doing.since_us) == (8, "shop", SINCE_US)
    ticket.free()
    assert read_tickets(table.path) == []


def test_what_was_written_by_the_monotonic_clock_is_read_as_time_since_1970(tmp_path: Path) -> None:
    before_us = time.time_ns() // 1000
    row = SessionTable.create(tmp_path, "boot-2").take(DB, PERMIT, 1)
    row.busy(1, encode_who("t", "c", "x"), int(time.monotonic() * 1e6))
    (read,) = read_table(list_tables(tmp_path)["boot-2"])
    assert before_us - 100 <= read.doing.since_us <= time.time_ns() // 1000 + 100


def test_rows_beyond_the_file_work_leave_no_trace_and_are_counted(table: SessionTable) -> None:
    rows = [table.take(DB, Permit(Kind.MAIN, n, 1), n) for n in range(5)]
    tickets = [table.take_ticket(n + 1, encode_who("t", "c", "x"), SINCE_US) for n in range(3)]
    rows[4].busy(9, encode_who("t", "c", "x"), SINCE_US)
    assert len(read_table(table.path)) == 4
    assert len(read_tickets(table.path)) == 2
    assert table.overflowed == 2
    for row in rows:
        row.free()
    for ticket in tickets:
        ticket.free()
    table.take(DB, PERMIT, 1)
    assert [row.slot for row in read_table(table.path)] == [7]


def test_texts_too_long_for_their_field_are_cut_between_characters(table: SessionTable) -> None:
    row = table.take(DB, PERMIT, 1)
    row.busy(1, encode_who("ü" * 40, "k" * 40, "€" * 40), SINCE_US)
    (read,) = read_table(table.path)
    assert (read.doing.tenant, read.doing.class_, read.doing.client) == ("ü" * 12, "k" * 16, "€" * 20)


@pytest.mark.parametrize(("name", "kept"), [
    ("d" * 128, "d" * 128), ("d" * 129, "d" * 128), ("ä" * 65, "ä" * 64), ("d\ud800", "d?"),
])
def test_no_name_of_a_database_ends_who_takes_a_row_for_it(table: SessionTable, name: str, kept: str) -> None:
    table.take(name, PERMIT, 1)
    (row,) = read_table(table.path)
    assert (row.db, row.slot) == (kept, PERMIT.slot)


# -- torn rows ---------------------------------------------------------------------------------------------

ACTIVITY_AT = session_table._HEADER_BYTES + session_table._IDENTITY.size
ACTIVITY_BYTES = session_table._ACTIVITY.size


def _activity_images(table: SessionTable) -> tuple[bytearray, bytes, bytes]:
    """The file, and the activity before and after a grant."""
    row = table.take(DB, PERMIT, 1)
    row.busy(1, encode_who("old-tenant", "old", "old-client"), SINCE_US)
    whole = bytearray(table.path.read_bytes())
    before = bytes(whole[ACTIVITY_AT : ACTIVITY_AT + ACTIVITY_BYTES])
    row.busy(2, encode_who("new-tenant", "new", "new-client"), SINCE_US + 1)
    after = table.path.read_bytes()[ACTIVITY_AT : ACTIVITY_AT + ACTIVITY_BYTES]
    return whole, before, after


def _read_with(path: Path, whole: bytearray, activity: bytes) -> Doing:
    whole[ACTIVITY_AT : ACTIVITY_AT + ACTIVITY_BYTES] = activity
    path.write_bytes(whole)
    (row,) = read_table(path)
    assert row.slot == PERMIT.slot  # the identity survives whatever happened to the activity
    return row.doing


def test_a_write_cut_at_any_byte_is_seen_as_torn(table: SessionTable, tmp_path: Path) -> None:
    whole, _, after = _activity_images(table)
    path = tmp_path / "copy.tbl"
    cut = [_read_with(path, whole, after[:n] + bytes(ACTIVITY_BYTES - n)) for n in range(ACTIVITY_BYTES + 1)]
    complete = [doing for doing in cut if doing.activity is not Activity.TORN]
    assert cut[0].activity is Activity.TORN
    # bytes that are zero anyway (the high ones of the last sequence number) make the last few images whole
    assert 1 <= len(complete) <= 8
    assert {doing.ticket_id for doing in complete} == {2}


@pytest.mark.parametrize("block", [8, 16, 32, 64])
def test_a_clearing_cut_at_any_block_in_any_place_is_seen_as_torn(
    table: SessionTable, tmp_path: Path, block: int
) -> None:
    whole, before, _ = _activity_images(table)
    path = tmp_path / "copy.tbl"
    for start in range(0, ACTIVITY_BYTES, block):
        cleared = before[:start] + bytes(len(before[start : start + block])) + before[start + block :]
        doing = _read_with(path, whole, cleared)
        assert doing.activity is Activity.TORN or cleared == before or doing.ticket_id == 1
        if cleared != before:
            assert doing.activity is Activity.TORN


def test_an_identity_that_was_being_written_is_left_out(table: SessionTable, tmp_path: Path) -> None:
    table.take(DB, PERMIT, 4711)
    whole = bytearray(table.path.read_bytes())
    at = session_table._HEADER_BYTES
    whole[at + 20] ^= 0xFF
    copy = tmp_path / "copy.tbl"
    copy.write_bytes(whole)
    assert read_table(copy) == []


# -- two processes -----------------------------------------------------------------------------------------

WRITER = """
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from coordinator.session_table import SessionTable, encode_who
table = SessionTable.create(Path(sys.argv[1]), sys.argv[2], session_rows=8, ticket_rows=2,
                            clock_offset_us=0)
rows = [table.take("db", SimpleNamespace(kind="main", slot=n, generation=n), 100 + n) for n in range(6)]
who = [encode_who(f"tenant {n}", "c", f"client {n}", f"{n}" * 30) for n in range(10)]
print("writing", flush=True)
n = 0
while True:
    n += 1
    for row in rows:
        row.busy(n, who[n % 10], 1_000_000 + n)
        if n % 3 == 0:
            row.idle()
"""


def _start_writer(run_dir: Path, boot_id: str) -> subprocess.Popen[bytes]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run_dir), boot_id], stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"writing\n"
    return writer


def _assert_consistent(path: Path) -> int:
    """Every row is one write, whole, or torn. Returns how many are torn."""
    rows = read_table(path)
    assert {row.slot for row in rows} == set(range(6))
    for row in rows:
        doing = row.doing
        if doing.activity is Activity.BUSY:
            last = doing.ticket_id % 10
            assert (doing.tenant, doing.client) == (f"tenant {last}", f"client {last}")
            assert doing.ticket_name == f"{last}" * 30
            assert doing.since_us == 1_000_000 + doing.ticket_id
    return sum(row.doing.activity is Activity.TORN for row in rows)


def test_a_reader_beside_a_live_writer_sees_whole_rows_and_a_kill_leaves_at_most_one_torn(
    tmp_path: Path,
) -> None:
    for attempt in range(5):
        with _start_writer(tmp_path, f"boot-{attempt}") as writer:
            path = list_tables(tmp_path)[f"boot-{attempt}"]
            try:
                for _ in range(100 * (attempt + 1)):
                    _assert_consistent(path)
            finally:
                writer.send_signal(signal.SIGKILL)
            assert writer.wait() == -signal.SIGKILL
        assert _assert_consistent(path) <= 1
        assert read_head(path) == session_table.TableHead(f"boot-{attempt}", writer.pid)


def test_two_boots_have_tables_of_their_own(tmp_path: Path) -> None:
    for boot, slot in (("a", 1), ("b", 2)):
        SessionTable.create(tmp_path, boot).take(DB, Permit(Kind.ADMIN, slot, 1), 1)
    tables = list_tables(tmp_path)
    assert sorted(tables) == ["a", "b"]
    assert {boot: read_table(path)[0].slot for boot, path in tables.items()} == {"a": 1, "b": 2}
    assert read_head(tables["a"]).boot_id == "a"
    assert read_head(tables["b"]).pid == os.getpid()


@pytest.mark.parametrize("content", [b"", b"hello", b"x" * 500, b"PLRSESS\0\x02\0" + bytes(200),
                                     b"PLRSESS\0\x01\0\x80\0\xff\0\0\0\x40\x01\0\0" + bytes(200)])
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "sessions-x.tbl"
    path.write_bytes(content)
    with pytest.raises(TableUnreadable, match=r"sessions-x\.tbl"):
        read_table(path)


@pytest.mark.parametrize("boot_id", ["", "../etc", "a/b", "x" * 65])
def test_a_boot_id_that_is_no_file_name_is_refused(tmp_path: Path, boot_id: str) -> None:
    with pytest.raises(ValueError, match="not a boot id"):
        SessionTable.create(tmp_path, boot_id)
