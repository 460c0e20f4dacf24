"""Tables fit, ages are for people, a drain's progress and a permit are told in words."""

from __future__ import annotations

import pytest

from pooler.cli.audit import explanation
from pooler.cli.drain import progress_text
from pooler.cli.out import WIDTH_MAX, duration, print_table, table_lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1 m 0 s"),
        (185, "3 m 5 s"),
        (7620, "2 h 7 m"),
        (86399, "23 h 59 m"),
        (442800, "5 d 3 h"),
        (None, ""),
    ],
)
def test_an_age_has_two_units_at_most(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_table_is_cut_at_its_widest_column_until_it_fits() -> None:
    lines = table_lines(("A", "B"), [("x" * 300, "short"), ("y", None)])
    assert max(len(line) for line in lines) == WIDTH_MAX
    assert all("short" in line or "x" not in line for line in lines)
    assert table_lines(("A",), [("x",)]) == ["A", "x"]


UNKNOWN = ("main/17.1234567890", "SESSION_UNKNOWN", "absent or restarted (pid 4711): no look yet" * 3)


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_the_columns_that_other_commands_are_given_are_never_cut(columns: int) -> None:
    head, line = table_lines(("PERMIT", "STATE", "AWAITS"), [UNKNOWN], 2, columns)
    assert line.split()[:2] == list(UNKNOWN[:2])
    assert len(line) == min(columns, len("  ".join(UNKNOWN)))
    assert head.split() == ["PERMIT", "STATE", "AWAITS"]


def test_nothing_is_cut_that_goes_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("PERMIT", "STATE", "AWAITS"), [UNKNOWN], 2)
    assert UNKNOWN[2] in capsys.readouterr().out


def test_progress_names_what_the_drain_waits_for() -> None:
    found = {
        "step": "draining",
        "epoch": 1,
        "old": {"idle": 1, "busy": 2, "other": 0, "unknown": 3},
        "new_open": 0,
        "waits_for": [{"worker": "w1", "host": "h", "index": 2, "pid": 9, "epoch": 0, "why": "it is away"}],
        "longest": {"pid": 7, "user": "u", "age_seconds": 4.2},
        "elapsed_seconds": 1.5,
    }
    assert progress_text(found) == (
        "   1.5 s  draining: epoch 1 1 idle, 2 busy, 0 opening or closing, 3 unknown; next epoch 0 open; "
        "longest: pid 7 (u, 4.2 s)\n          waits for worker 2 on h (pid 9): it is away"
    )
    assert progress_text({"step": "promoting", "epoch": 1}) == "promoting"


ROW = {
    "permit": "main/1.2",
    "database": "d/write",
    "state": "SESSION_UNKNOWN",
    "age_seconds": 42.0,
    "owner": "w",
    "host": "h",
    "user": "u",
    "dbname": "d",
    "epoch": 1,
    "pid": 7,
    "backend": "10.0.0.1:5432",
    "ticket": "",
    "tenant": "",
    "owner_ended": "",
    "waits_since_us": 0,
    "unreachable_since_us": 0,
    "told_by": "h2",
    "awaited_proof": "absent or restarted (pid 7)",
    "abandoned": False,
    "terminating": True,
}


def test_an_unknown_permit_is_explained_by_the_proof_it_waits_for() -> None:
    lines = explanation(ROW)
    assert lines[3:6] == [
        "its owner's process is not known to have ended",
        "waits for proof absent, or restarted on 10.0.0.1:5432: absent or restarted (pid 7)",
        "the leading coordinator on h2 looks; so could any that reaches it",
    ]
    assert "pg_terminate_backend was ordered for it" in lines
    assert lines[-1].endswith("pooler ledger resolve d/write main/1.2 --evidence '…'")


def test_an_open_permit_waits_for_its_owner_only() -> None:
    assert (
        explanation({**ROW, "state": "OPEN"})[-1]
        == "its owner frees it when the server has ended the session"
    )
