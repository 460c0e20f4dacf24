"""One budget of a wait, and one table of refusals."""

from __future__ import annotations

import math
from random import Random

import pytest

from pooler.admission.budget import Limit, budget, smallest
from pooler.admission.refusals import DELAY_MS_MAX, TABLE, delay_ms, hint, table_rows
from pooler.errors import BackendLost, NoPermit, NotServing, OutcomeUnknown, PoolerError, Retry, WaitEnded
from tests.repo.sources import ROOT


def test_the_smallest_limit_ends_the_wait_and_the_first_of_equal_ones() -> None:
    assert budget(10.0, [Limit("a", 5.0), Limit("b", 2.0), Limit("c", math.inf)]) == (12.0, ("b", 2.0))
    both = [Limit("query_wait_timeout", 1.0), Limit("pooler.deadline", 1.0)]
    assert smallest(both).name == "query_wait_timeout"
    assert smallest([]).seconds == math.inf


def test_delays_grow_with_the_queue_and_are_spread() -> None:
    chance = Random(1)
    short = [delay_ms(0, chance.random()) for _ in range(500)]
    long = [delay_ms(1_000, chance.random()) for _ in range(500)]
    assert max(short) < min(long)
    assert len(set(short)) > 20
    longest = [delay_ms(10**6, chance.random()) for _ in range(50)]
    assert DELAY_MS_MAX // 2 <= min(longest) <= max(longest) <= DELAY_MS_MAX * 3 // 2


@pytest.mark.parametrize("situation", TABLE)
def test_a_hint_has_a_line_for_programs_and_ends_with_a_command(situation: str) -> None:
    line, command = hint(situation, 120, "t-1").splitlines()
    row = TABLE[situation]
    after = " after_ms=120" if row.retry is Retry.AFTER else ""
    assert line == f"retry={row.retry.value}{after} ticket=t-1"
    assert command == row.more
    assert "ticket" not in hint(situation)


@pytest.mark.parametrize("error", [
    WaitEnded(), NoPermit(), NotServing(), BackendLost(), BackendLost(in_transaction=True), OutcomeUnknown()])
def test_what_is_raised_is_what_the_table_says(error: PoolerError) -> None:
    assert TABLE[error.situation].sqlstate == error.sqlstate


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "refusals.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| ")][1:] == list(table_rows())
