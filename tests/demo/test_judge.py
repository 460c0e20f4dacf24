"""Every check of the demonstration's judge passes a true history and rejects each forged one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from coordinator.ledger.record import Kind, Session
from coordinator.ledger.states import SessionState
from pooler.demo import judge
from pooler.demo.judge import ServerSeen, Verdict, Writes
from pooler.demo.ledgerwatch import Seen
from pooler.demo.serverlog import Interval, Refusal, overlap_max, refusals_from_log, sessions_from_log

NOON = datetime(2030, 1, 1, 12)
TAG = "abcdefgh"


def interval(start: float, end: float | None, slot: int = 0, generation: int = 1) -> Interval:
    """One session from `start` to `end` seconds after noon; a line of the log for each millisecond."""
    return Interval(
        int(1000 * start), "app", "shop", f"pooler:{TAG}:m{slot}.{generation}",
        NOON + timedelta(seconds=start), None if end is None else NOON + timedelta(seconds=end),
        int(1000 * start), None if end is None else int(1000 * end))


def server(*sessions: Interval, refusals: Sequence[Refusal] = (), name: str = "one") -> ServerSeen:
    apart = [replace(each, start_line=100 * each.start_line + n,
                     end_line=None if each.end_line is None else 100 * each.end_line - 50 + n)
             for n, each in enumerate(sessions)]  # no two events share a line
    return ServerSeen(name, apart, refusals)


def permit(state: SessionState, slot: int = 0, generation: int = 1, owner: str = "boot") -> Session:
    return Session(Kind.MAIN, slot, generation, state, owner, "host", "shop", "app", 0, "request", 1, 1)


def tenure(slot: int = 0, generation: int = 1, owner: str = "boot", *, unknown: bool = False) -> list[Seen]:
    """A permit's whole life at seconds 1, 2, …, released at its end."""
    states = [SessionState.RESERVED, SessionState.OPEN, *([SessionState.UNKNOWN] if unknown else [])]
    key = f"/slot/{slot}"
    steps: list[Session | None] = [permit(state, slot, generation, owner) for state in states]
    first = permit(SessionState.RESERVED, slot, 0, owner)
    return [Seen(at + 1.0, generation + at, key, first if at == 0 else step)
            for at, step in enumerate([*steps, None])]


REFUSAL = Refusal(NOON, 7, "app", "remaining connection slots are reserved")


@pytest.mark.parametrize(("servers", "held"), [
    ([server(interval(0, 1), interval(0.5, 2))], True),
    ([server(interval(0, 1), interval(1, 2)), server(interval(2, 3), interval(2, None), name="two")], True),
    ([server(interval(0, 1), interval(0.5, 2), interval(0.9, 3))], False),
    ([server(interval(0, None), interval(0.5, None)), server(interval(1, 2), name="two")], False),
    ([server(interval(0, 1), refusals=[REFUSAL])], False),
])
def test_the_budget_holds_on_each_server_and_on_both_together(servers: list[ServerSeen], held: bool) -> None:
    assert judge.judge_budget(servers, permits=2).held is held


@pytest.mark.parametrize(("sessions", "history", "held"), [
    ([interval(1, 2)], tenure(), True),
    ([], tenure()[:1], True),  # reserved, never connected
    ([interval(1, 2, slot=5)], tenure(), False),  # born without a permit
    ([interval(1, 2), interval(3, 4)], tenure(), False),  # one permit, two sessions
    ([], tenure(), False),  # OPEN, but no such session
])
def test_sessions_and_permits_are_one_to_one(
    sessions: list[Interval], history: list[Seen], held: bool
) -> None:
    assert judge.judge_permits([server(*sessions)], history, TAG).held is held


def test_a_session_that_was_moved_to_another_slot_is_the_one_that_was_born_in_the_first() -> None:
    moved = replace(permit(SessionState.OPEN, 0), left_slots=("main/3",))
    history = [*tenure(slot=3), Seen(3.0, 3, "/slot/0", moved), Seen(4.0, 4, "/slot/0", None)]
    assert judge.judge_permits([server(interval(1, 4, slot=3))], history, TAG).held
    assert not judge.judge_permits([server(interval(1, 4, slot=0))], history, TAG).held


def writes(**changes: object) -> Writes:
    base = Writes({"a": 1.0, "b": 2.0}, frozenset({"u"}), frozenset({"r"}), {"a": 1, "b": 1, "u": 1})
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("found", "held"), [
    ({"a": 1, "b": 1, "u": 1}, True),
    ({"a": 1, "b": 1}, True),  # the unknown one did not come about
    ({"a": 1}, False),  # lost
    ({"a": 1, "b": 2}, False),  # twice
    ({"a": 1, "b": 1, "r": 1}, False),  # refused, and yet there
    ({"a": 1, "b": 1, "x": 1}, False),  # nobody wrote it
])
def test_writes_are_there_as_they_were_answered(found: dict[str, int], held: bool) -> None:
    assert judge.judge_writes(writes(found=found), 0, 3, wanted=2).held is held


def test_too_few_writes_around_the_drain_prove_nothing() -> None:
    assert not judge.judge_writes(writes(), 1.5, 3, wanted=2).held


@pytest.mark.parametrize(("counted", "held"), [(10, True), (12, True), (9, False), (13, False)])
def test_the_servers_count_lies_between_done_and_done_with_unknown(counted: int, held: bool) -> None:
    assert judge.judge_counts({"shop": (10, 2)}, {"shop": counted}).held is held


@pytest.mark.parametrize(("exit_code", "old", "new", "held"), [
    (0, interval(0, 1), interval(1, 2), True),
    (4, interval(0, 1), interval(1, 2), False),
    (0, interval(0, 1.5), interval(1, 2), False),  # both served at once
    (0, interval(0, None), interval(1, 2), False),  # the old one never ended
])
def test_a_drain_ends_the_old_before_it_begins_the_new(
    exit_code: int, old: Interval, new: Interval, held: bool
) -> None:
    assert judge.judge_drain(exit_code, server(old), server(new), []).held is held


def fate_verdict(history: list[Seen], proofs: dict[str, str]) -> Verdict:
    keys = {each.key for each in history}
    return judge.judge_fate(judge.fate_of(keys, "boot", history, 2.5, proofs))


def test_a_killed_workers_permits_are_unknown_first_and_released_with_proof() -> None:
    history = tenure(unknown=True)
    assert fate_verdict(history, {"main/0.1": "absent"}).held
    assert not fate_verdict(history, {}).held  # no proof recorded
    assert not fate_verdict(history[:-1], {}).held  # never released
    assert not fate_verdict(tenure(), {"main/0.1": "absent"}).held  # released without being unknown
    assert not judge.judge_fate(judge.fate_of(set(), "boot", [], 0, {})).held  # it held nothing


def test_a_session_in_no_pool_is_a_leak() -> None:
    assert judge.judge_leaks({"app@shop": 2}, {"app@shop": 2}).held
    assert not judge.judge_leaks({"app@shop": 2}, {"app@shop": 1, "other@shop": 1}).held
    assert not judge.judge_leaks({"app@shop": 1}, {}).held


def test_little_work_or_an_idle_worker_proves_nothing() -> None:
    assert judge.judge_volume(20, 20, 2, 2).held
    assert not judge.judge_volume(19, 20, 2, 2).held
    assert not judge.judge_volume(20, 20, 1, 2).held


LOG = """\
2030-01-01 12:00:00.000 UTC|10|00000|[unknown]|[unknown]|[unknown]|LOG:  connection received: host=127.0.0.1
2030-01-01 12:00:00.001 UTC|10|00000|app|shop|[unknown]|LOG:  connection authorized: user=app database=shop application_name=a|b c
2030-01-01 12:00:00.002 UTC|11|00000|[unknown]|[unknown]|[unknown]|LOG:  connection received: host=127.0.0.1
2030-01-01 12:00:00.003 UTC|11|00000|app|shop|[unknown]|LOG:  connection authorized: user=app database=shop
2030-01-01 12:00:00.004 UTC|11|53300|app|shop|[unknown]|FATAL:  sorry, too many clients already
2030-01-01 12:00:00.005 UTC|12|00000|[unknown]|[unknown]|[unknown]|LOG:  connection received: host=127.0.0.1
2030-01-01 12:00:00.006 UTC|10|57P01|app|shop|a|b c|FATAL:  terminating connection due to administrator command
2030-01-01 12:00:00.007 UTC|10|00000|app|shop|a|b c|LOG:  disconnection: session time: 0:00:00.007 user=app
2030-01-01 12:00:00.008 UTC|10|00000|[unknown]|[unknown]|[unknown]|LOG:  connection received: host=127.0.0.1
2030-01-01 12:00:00.009 UTC|10|00000|app|shop|[unknown]|LOG:  connection authorized: user=app database=shop
a line of something else
"""  # noqa: E501  lines as PostgreSQL writes them


def test_the_log_gives_refused_ended_and_open_sessions_and_reused_pids(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(LOG)
    found = sessions_from_log(path)
    lines = [(each.pid, each.start_line, each.end_line) for each in found]
    assert lines == [(10, 0, 7), (11, 2, 4), (10, 8, None)]
    assert found[0].application_name == "a|b c"
    assert overlap_max(found)[0] == 2
    assert [each.pid for each in refusals_from_log(path)] == [11]


@pytest.mark.parametrize("last_word", [
    "all server processes terminated; reinitializing", "starting PostgreSQL 18.6 on x86_64-pc-linux-gnu"])
def test_sessions_that_a_crash_took_without_a_word_have_ended(tmp_path: Path, last_word: str) -> None:
    path = tmp_path / "log"
    before, after = LOG.splitlines()[2:4], LOG.splitlines()[8:10]
    gone = f"2030-01-01 12:00:00.007 UTC|1|00000||||LOG:  {last_word}"
    path.write_text("\n".join([*before, gone, *after]) + "\n")
    found = sessions_from_log(path)
    assert [(each.pid, each.start_line, each.end_line) for each in found] == [(11, 0, 2), (10, 3, None)]
    assert overlap_max(found)[0] == 1
