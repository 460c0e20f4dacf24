"""Token buckets on the relay: who pays, when, what who cannot pay hears, and who waits for tokens."""

from __future__ import annotations

import math
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from pooler.admission.ticket import TicketState
from pooler.admission.tolls import Toll
from pooler.demo.client import query
from pooler.pool import janitor
from pooler.relay.asking import Asked
from pooler.serve.admission_rows import tenant_rows, ticket_rows, waiter_rows
from tests.admission.yard import policy
from tests.relay.world import Client, World, world

SLOW = 0.001  # tokens a second: none comes in while a test runs


def bucket(**said: Any) -> dict[str, Any]:
    return {"rate": SLOW, "burst": 3.0, "cost": 1.0, "mode": "reject", "per": "transaction",
            "startFull": True} | said


def learn(w: World, tenant: dict[str, Any] | None = None, klass: dict[str, Any] | None = None,
          generation: int = 1, **said: Any) -> None:
    w.pool.book.learn(policy({"batch": {"permits": 4} | said | ({"bucket": klass} if klass else {})},
                             {"a": {"bucket": tenant}} if tenant else {}, generation), monotonic())


def client(w: World, tenant: str = "a", deadline_seconds: float = math.inf) -> Client:
    made = w.client()
    made.conn.asked = Asked(tenant, "batch", deadline_seconds)
    made.conn.reset_asked()
    return made


def toll_of(w: World, tenant: str = "a") -> Toll:
    toll = w.pool.book.tolls.of_tenant(tenant)
    assert toll is not None
    return toll


def says(w: World, by: Client, times: int = 1) -> list[str]:
    return [w.say(by, query("select 1"))[-3:] for _ in range(times)]


def refused(w: World, by: Client) -> dict[str, str]:
    w.send(by, query("select 1"))
    w.settle()
    error, ready = by.take()
    assert ready.type == "Z"
    return dict(error.error().fields)


def fill(w: World, tokens: float, now: float) -> None:
    """So many come in, and whoever can pay then passes."""
    toll_of(w).bucket.add(tokens, now)
    w.parts.tollgate.release(now)
    w.settle()


def test_a_tenant_is_admitted_its_burst_at_once_and_told_when_the_next_token_is_there() -> None:
    with world() as w:
        learn(w, bucket())
        one, other = client(w), client(w)
        assert says(w, one, 2) + says(w, other) == ["Z:I"] * 3
        said = refused(w, other)
        assert said["C"] == "53400"
        assert said["M"].startswith(
            'rate limit of tenant "a" (class "batch"): a transaction costs 1, and of its 3 tokens ')
        retry, after, *_ = said["H"].split()
        assert retry == "retry=after"
        assert 900_000 < int(after.removeprefix("after_ms=")) <= 1_000_000
        assert (toll_of(w).admitted_cost, toll_of(w).refused_cost) == (3.0, 1.0)
        assert other.conn.ticket.account.refused == 1
        assert says(w, client(w, "b"), 9) == ["Z:I"] * 9
        toll_of(w).bucket.add(1.0, monotonic())
        assert says(w, other) == ["Z:I"]


def test_what_costs_more_than_the_bucket_holds_is_never_admitted() -> None:
    with world() as w:
        learn(w, bucket(cost=4.0))
        said = refused(w, client(w))
        assert said["C"] == "54000"
        assert said["H"].startswith("retry=never\n")
        assert 'costs 4, and its bucket never holds more than 3' in said["M"]
        assert toll_of(w).level(monotonic()) == pytest.approx(3.0)


def test_who_pays_two_buckets_pays_both_or_neither() -> None:
    with world() as w:
        learn(w, bucket(), bucket(burst=1.0))
        one = client(w)
        assert says(w, one) == ["Z:I"]
        said = refused(w, one)
        assert said["M"].startswith('rate limit of class "batch" (tenant "a")')
        assert toll_of(w).level(monotonic()) == pytest.approx(2.0, abs=0.1)


def test_a_bucket_may_start_empty_and_change_without_filling() -> None:
    with world() as w:
        learn(w, bucket(startFull=False))
        one = client(w)
        assert refused(w, one)["C"] == "53400"
        learn(w, bucket(burst=30.0), generation=2)
        assert refused(w, one)["C"] == "53400"
        learn(w, None, generation=3)
        assert says(w, one, 3) == ["Z:I"] * 3


def test_a_connection_that_paid_once_pays_no_more() -> None:
    with world() as w:
        learn(w, bucket(per="connection", burst=2.0))
        one, two, three = client(w), client(w), client(w)
        assert says(w, one, 5) + says(w, two, 5) == ["Z:I"] * 10
        assert "a connection costs 1" in refused(w, three)["M"]
        assert says(w, one) == ["Z:I"]


def test_who_is_delayed_is_served_in_his_turn_as_tokens_come() -> None:
    with world() as w:
        learn(w, bucket(mode="delay", burst=1.0, rate=0.05))
        first, second, third = client(w), client(w), client(w)
        assert says(w, first) == ["Z:I"]
        assert says(w, second) + says(w, third) == ["", ""]
        there: Any = SimpleNamespace(parts=w.parts, pools={"p": w.pool})
        rows = list(waiter_rows(there))
        assert [(row["position"], row["bound_by"]) for row in rows] == [
            (1, "tenant bucket"), (2, "tenant bucket")]
        assert 10_000 < rows[0]["expected_ms"] <= 20_000 < rows[1]["expected_ms"] <= 40_000
        assert [row["state"] for row in ticket_rows(there)] == ["QUEUED", "QUEUED"]
        (tenant,) = tenant_rows(there)
        assert (tenant["burst"], tenant["admitted_cost"], tenant["refused_cost"]) == (1.0, 1.0, 0.0)
        fill(w, 1.0, monotonic())
        assert (second.kinds[-3:], third.kinds) == ("Z:I", "")
        fill(w, 1.0, monotonic())
        assert third.kinds.endswith("Z:I")
        assert list(waiter_rows(there)) == []
        assert len(w.tasks.started) == 1


def test_a_delayed_one_is_not_overtaken_and_pays_once_it_is_let_by() -> None:
    with world() as w:
        learn(w, bucket(mode="delay", burst=1.0, rate=0.05))
        waits, late = client(w), client(w)
        assert says(w, client(w)) == ["Z:I"]
        assert says(w, waits) == [""]
        toll_of(w).bucket.add(1.0, monotonic())
        assert says(w, late) == [""]
        w.parts.tollgate.release(monotonic())
        w.settle()
        assert (waits.kinds[-3:], late.kinds) == ("Z:I", "")
        assert toll_of(w).admitted_cost == 2.0


def test_a_delay_is_bounded_by_the_budget_and_by_the_queue() -> None:
    with world() as w:
        learn(w, bucket(mode="delay", rate=0.5), maxQueue=2)
        assert says(w, client(w), 3) == ["Z:I"] * 3
        hasty = refused(w, client(w, deadline_seconds=1.0))
        assert hasty["C"] == "53400"
        assert says(w, client(w)) + says(w, client(w)) == ["", ""]
        assert 'class "batch" is full' in refused(w, client(w))["M"]


def test_whose_budget_ends_in_the_delay_is_told_by_which_limit_and_for_what() -> None:
    with world() as w:
        learn(w, bucket(mode="delay", burst=1.0, rate=1.0))
        assert says(w, client(w)) == ["Z:I"]
        waits = client(w, deadline_seconds=5.0)
        assert says(w, waits) == [""]
        toll_of(w).bucket.rate = SLOW
        janitor.end_late_waits(w.pool, monotonic() + 6.0)
        w.settle()
        error, _ = waits.take()
        assert error.error().sqlstate == "57014"
        assert 'pooler.deadline = 5s: rate limit of tenant "a"' in error.error().fields["M"]
        toll_of(w).bucket.add(1.0, monotonic())
        assert says(w, waits) == ["Z:I"]


@pytest.mark.parametrize("how", ["leaves", "cancels", "the pool ends"])
def test_who_leaves_the_delay_takes_no_tokens(how: str) -> None:
    with world() as w:
        learn(w, bucket(mode="delay", burst=1.0, rate=0.05))
        assert says(w, client(w)) == ["Z:I"]
        waits, next_one = client(w), client(w)
        assert says(w, waits) + says(w, next_one) == ["", ""]
        if how == "leaves":
            waits.leave()
            w.settle()
        elif how == "cancels":
            waits.conn.cancel_wait()
        else:
            w.pool.refuse_waiting(RuntimeError("for a test"))  # type: ignore[arg-type]
            w.settle()
            assert "E:58000" in next_one.kinds
            assert says(w, next_one) == [""]
        assert waits.conn.ticket.state is not TicketState.QUEUED
        fill(w, 1.0, monotonic())
        assert next_one.kinds.endswith("Z:I")
        assert toll_of(w).admitted_cost == 2.0


def test_where_the_policy_has_no_bucket_any_more_nobody_waits_for_it() -> None:
    with world() as w:
        learn(w, bucket(mode="delay", burst=1.0, rate=0.05))
        assert says(w, client(w)) == ["Z:I"]
        waits = client(w)
        assert says(w, waits) == [""]
        learn(w, None, generation=2)
        w.parts.tollgate.release(monotonic())
        w.settle()
        assert waits.kinds.endswith("Z:I")


def test_where_the_policy_makes_it_too_dear_meanwhile_whoever_waits_is_told_so() -> None:
    with world() as w:
        learn(w, bucket(mode="delay", burst=1.0, rate=0.05))
        assert says(w, client(w)) == ["Z:I"]
        waits = client(w)
        assert says(w, waits) == [""]
        learn(w, bucket(mode="delay", burst=1.0, rate=0.05, cost=2.0), generation=2)
        w.parts.tollgate.release(monotonic())
        w.settle()
        assert waits.kinds == "E:54000 Z:I"


def test_what_a_full_queue_refuses_takes_no_tokens() -> None:
    with world() as w:
        learn(w, bucket(), permits=1, maxQueue=0)
        holder, extra = client(w), client(w)
        w.say(holder, query("begin"))
        assert refused(w, extra)["C"] == "53300"
        assert toll_of(w).admitted_cost == 1.0
        w.say(holder, query("commit"))
        assert says(w, extra) == ["Z:I"]


def test_who_was_delayed_and_finds_the_queue_full_takes_no_tokens_from_who_is_behind() -> None:
    with world() as w:
        learn(w, bucket(mode="delay", burst=1.0, rate=0.05), permits=1, maxQueue=2)
        holder, first, second = client(w, "b"), client(w), client(w)
        assert says(w, client(w)) == ["Z:I"]
        assert says(w, first) + says(w, second) == ["", ""]
        w.say(holder, query("begin"))
        w.pool.book.classes["batch"].queue_max = 0
        fill(w, 1.0, monotonic())
        assert first.kinds == second.kinds == "E:53300 Z:I"
        assert toll_of(w).admitted_cost == 1.0
        w.say(holder, query("commit"))
        assert says(w, second) == ["Z:I"]


def test_who_waits_for_the_tokens_of_his_class_waits_for_his_own_again_if_those_were_taken() -> None:
    with world() as w:
        delays = bucket(mode="delay", burst=1.0, rate=0.05)
        learn(w, delays, delays)
        klass = w.pool.book.account("b", "batch").tolls[0]
        assert says(w, client(w, "b")) == ["Z:I"]
        first, second = client(w), client(w)
        assert says(w, first) + says(w, second) == ["", ""]
        assert [each.conn.ticket.toll for each in (first, second)] == [klass, klass]
        klass.bucket.add(1.0, monotonic())
        w.parts.tollgate.release(monotonic())
        w.settle()
        assert first.kinds.endswith("Z:I")
        klass.bucket.add(1.0, monotonic())
        w.parts.tollgate.release(monotonic())
        assert second.conn.ticket.toll is toll_of(w)
        fill(w, 1.0, monotonic())
        assert second.kinds.endswith("Z:I")
        assert toll_of(w).admitted_cost == 2.0


def test_who_has_paid_and_finds_no_session_waits_in_the_queue_and_is_not_charged_again() -> None:
    with world() as w:
        learn(w, bucket(mode="delay", burst=2.0, rate=0.05), permits=1)
        holder, waits = client(w), client(w)
        w.say(holder, query("begin"))
        assert says(w, waits) == [""]
        assert w.pool.core.count_waiting() == 1
        assert toll_of(w).admitted_cost == 2.0
        w.say(holder, query("commit"))
        w.settle()
        assert waits.kinds.endswith("Z:I")
        assert toll_of(w).admitted_cost == 2.0


def test_what_goes_on_elsewhere_is_not_charged_again() -> None:
    with world() as w:
        learn(w, bucket(burst=1.0))
        one = client(w)
        one.conn.ticket.is_prepaid = True
        assert says(w, one, 2) == ["Z:I"] * 2
        assert toll_of(w).admitted_cost == 1.0
