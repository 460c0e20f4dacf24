"""Who has no time for the wait that is to be expected hears so at once, and stays connected."""

from __future__ import annotations

import math
from time import monotonic
from typing import Any

import pytest

from pooler.admission.estimator import SAMPLES_MIN
from pooler.demo.client import query
from pooler.relay.asking import Asked
from tests.admission.yard import policy
from tests.relay.world import Client, World, world

EXECUTION_SECONDS = 5.0


def learn(w: World, samples: int = SAMPLES_MIN, **said: Any) -> None:
    """Executions of late took five seconds."""
    w.pool.book.learn(policy({"batch": said}))
    for _ in range(samples):
        w.pool.book.classes["batch"].executed(EXECUTION_SECONDS, monotonic())


def client(w: World, deadline_seconds: float = math.inf) -> Client:
    made = w.client()
    made.conn.asked = Asked("nightly", "batch", deadline_seconds)
    made.conn.reset_asked()
    return made


def test_a_short_deadline_behind_a_long_queue_is_refused_at_once_and_told_when_to_come_back() -> None:
    with world() as w:
        learn(w, permits=1)
        holder, waiter, hasty = client(w), client(w), client(w, 0.05)
        w.say(holder, query("begin"))
        assert w.say(waiter, query("select 1")) == ""
        w.send(hasty, query("select 1"))
        w.settle()
        error, ready = hasty.take()
        fields = error.error().fields
        assert error.error().sqlstate == "53300"
        assert fields["M"].startswith(
            "50 ms are left (pooler.deadline = 50ms), and a wait of 10000 ms is expected: ")
        assert 'class "batch" executes 1 of 1 and 1 of it wait before this (tenant "nightly")' in fields["M"]
        assert fields["H"].startswith("retry=after after_ms=")
        assert fields["H"].endswith("SHOW WAITERS")
        assert ready.type == "Z"
        assert (hasty.conn.ticket.account.refused, w.pool.book.classes["batch"].refused) == (1, 1)
        assert w.pool.core.count_waiting() == 1
        w.say(holder, query("commit"))
        w.settle()
        assert waiter.kinds.endswith("Z:I")
        assert w.say(hasty, query("select 1")).endswith("Z:I")


@pytest.mark.parametrize("case", ["few samples", "time enough", "PgBouncer"])
def test_who_may_be_in_time_waits(case: str) -> None:
    with world() as w:
        learn(w, SAMPLES_MIN - (case == "few samples"), permits=1)
        w.parts.as_pgbouncer = case == "PgBouncer"
        holder, waiter = client(w), client(w, 5.1 if case == "time enough" else 0.05)
        w.say(holder, query("begin"))
        assert w.say(waiter, query("select 1")) == ""
        w.say(holder, query("commit"))
        w.settle()
        assert waiter.kinds.endswith("Z:I")


def test_the_deadline_of_the_class_counts_too() -> None:
    with world() as w:
        learn(w, permits=1, queueDeadlineSeconds=1.0)
        holder, waiter = client(w), client(w)
        w.say(holder, query("begin"))
        w.send(waiter, query("select 1"))
        w.settle()
        assert 'queueDeadline of class "batch" = 1s' in waiter.take()[0].error().fields["M"]
        w.say(holder, query("commit"))


def test_each_transaction_is_one_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooler.admission.classes.SAMPLE_SECONDS", 0.0)
    with world() as w:
        learn(w, 0, permits=1)
        klass, one = w.pool.book.classes["batch"], client(w)
        for _ in range(SAMPLES_MIN):
            assert klass.estimator.executions.median(monotonic() + 1.0) is None
            assert w.say(one, query("select 1")).endswith("Z:I")
        found = klass.estimator.executions.median(monotonic() + 2.0)
        assert found is not None
        assert 0 < found < 1


def test_of_many_transactions_one_is_looked_at_now_and_then_so_that_a_minute_is_more_than_a_moment() -> None:
    with world() as w:
        learn(w, 0, permits=1)
        klass, one = w.pool.book.classes["batch"], client(w)
        for _ in range(SAMPLES_MIN):
            klass.sample_at = math.inf
            assert w.say(one, query("select 1")).endswith("Z:I")
        assert klass.estimator.executions.median(monotonic() + 1.0) is None
        klass.executed(1.0, 5.0)
        assert klass.sample_at > 5.0
