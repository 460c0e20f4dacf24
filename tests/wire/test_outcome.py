"""What a client was told of its transaction, read from what it was sent, however that is cut."""

from __future__ import annotations

import pytest

from pooler.wire.messages import command_complete, data_row, message
from pooler.wire.outcome import OutcomeWatch

ROW, ERROR = data_row([b"x" * 300]), message(b"E", b"SERROR\0C22012\0\0")
READY_I, READY_T, READY_E = (message(b"Z", status) for status in (b"I", b"T", b"E"))
BEGIN, COMMIT, ROLLBACK, INSERT = (
    command_complete(tag) for tag in ("BEGIN", "COMMIT", "ROLLBACK", "INSERT 0 1"))

CASES = {
    "autocommit": (ROW + INSERT + READY_I, "committed"),
    "autocommit, failed": (INSERT + ERROR + READY_I, "rolled_back"),
    "block": (BEGIN + READY_T + INSERT + READY_T + COMMIT + READY_I, "committed"),
    "block, rolled back": (BEGIN + READY_T + INSERT + READY_T + ROLLBACK + READY_I, "rolled_back"),
    "COMMIT of a failed block": (BEGIN + READY_T + ERROR + READY_E + ROLLBACK + READY_I, "rolled_back"),
    "to a savepoint, then COMMIT": (BEGIN + ROLLBACK + INSERT + COMMIT + READY_I, "committed"),
    "committed, then an error": (BEGIN + INSERT + COMMIT + ERROR + READY_I, "committed"),
    "not over": (BEGIN + READY_T + INSERT + READY_T, ""),
    "only a Parse": (message(b"1") + READY_I, ""),
    "a Parse, then it runs": (message(b"1") + READY_I + INSERT + READY_I, "committed"),
    "the first of two": (ERROR + READY_I + INSERT + READY_I, "rolled_back"),
    "prepared": (BEGIN + INSERT + command_complete("PREPARE TRANSACTION") + READY_I, "unknown"),
}


@pytest.mark.parametrize("size", [1, 2, 5, 7, 64, 100_000])
@pytest.mark.parametrize("case", CASES)
def test_the_outcome_is_what_the_client_was_told(case: str, size: int) -> None:
    said, outcome = CASES[case]
    watch = OutcomeWatch()
    for at in range(0, len(said), size):
        watch.feed(said[at : at + size])
    assert watch.outcome == outcome


def test_of_a_session_the_last_counts() -> None:
    watch = OutcomeWatch(keeps_last=True)
    watch.feed(INSERT + READY_I + ERROR + READY_I)
    assert watch.outcome == "rolled_back"
    assert not watch.ran
