"""Classes and tenants on the relay: what a client is told, and who is served when there is room again."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from pooler.demo.client import query
from pooler.pool import janitor
from pooler.pool.pool import Pool
from tests.admission.yard import policy
from tests.relay.miniserver import MiniServer
from tests.relay.world import Client, Session, World, world

LONG_AGO = 1_000.0


def learn(w: World, tenants: dict[str, dict[str, Any]] | None = None, **said: Any) -> None:
    w.pool.book.learn(policy({"batch": said}, tenants))


def client(w: World, tenant: str = "t", pool: Pool | None = None) -> Client:
    made = w.client()
    if pool is not None:
        w.pool.clients.discard(made.conn)
        made.conn.pool = pool
        pool.clients.add(made.conn)
    made.conn.ticket.account = made.conn.pool.book.account(tenant, "batch")
    return made


def another_pool(w: World) -> Pool:
    """With a session of its own, under the same ledger."""
    pool = Pool(w.parts, replace(w.pool.plan, user="other"))
    opened, far = w.dial()
    conn = pool.adopt(opened)
    w.sessions.append(Session(MiniServer(pid=opened.pid), opened.sock, far, conn))
    pool.core.opening += 1
    pool.core.opened(conn, monotonic())
    return pool


def test_one_more_than_the_queue_holds_is_refused_at_once_and_stays_connected() -> None:
    with world() as w:
        learn(w, permits=1, maxQueue=1)
        holder, waiter, extra = client(w), client(w), client(w)
        w.say(holder, query("begin"))
        assert w.say(waiter, query("select 1")) == ""
        w.send(extra, query("select 1"))
        w.settle()
        error, ready = extra.take()
        assert error.error().sqlstate == "53300"
        assert 'class "batch" is full: 1 wait' in error.error().fields["M"]
        assert ready.type == "Z"
        w.say(holder, query("commit"))
        w.settle()
        assert waiter.kinds.endswith("Z:I")
        assert w.say(extra, query("select 1")).endswith("Z:I")


@pytest.mark.parametrize(("said", "named"), [
    ({"queueDeadlineSeconds": 5.0, "maxWaitSeconds": 9.0}, 'queueDeadline of class "batch" = 5s'),
    ({"queueDeadlineSeconds": 9.0, "maxWaitSeconds": 5.0}, 'maxWait of class "batch" = 5s'),
    ({"queueDeadlineSeconds": 600.0}, "query_wait_timeout"),
])
def test_who_waits_too_long_is_told_which_limit_it_was_and_what_was_missing(
    said: dict[str, Any], named: str
) -> None:
    with world(sessions=2) as w:
        learn(w, permits=1, **said)
        holder, waiter = client(w), client(w)
        w.say(holder, query("begin"))
        w.say(waiter, query("select 1"))
        janitor.end_late_waits(w.pool, monotonic() + 4.0)
        w.settle()
        assert waiter.take() == []
        janitor.end_late_waits(w.pool, monotonic() + LONG_AGO)
        w.settle()
        error, _ = waiter.take()
        assert error.error().sqlstate == "57014"
        assert named in error.error().fields["M"]
        assert 'class "batch" executes 1 of 1' in error.error().fields["M"]
        w.say(holder, query("commit"))


def test_a_tenant_at_its_limit_is_told_so() -> None:
    with world(sessions=2) as w:
        learn(w, {"t": {"inflight": 1}}, permits=2, queueDeadlineSeconds=5.0)
        holder, waiter = client(w), client(w)
        w.say(holder, query("begin"))
        w.say(waiter, query("select 1"))
        assert w.say(client(w, "another"), query("select 1")).endswith("Z:I")
        janitor.end_late_waits(w.pool, monotonic() + LONG_AGO)
        w.settle()
        assert 'tenant "t" executes 1 (inflight 1)' in waiter.take()[0].error().fields["M"]
        w.say(holder, query("commit"))


def test_room_that_comes_free_in_one_pool_serves_who_waits_in_another() -> None:
    with world() as w:
        learn(w, permits=1)
        other = another_pool(w)
        here, there = client(w), client(w, pool=other)
        w.say(here, query("begin"))
        assert w.say(there, query("select 1")) == ""
        assert len(other.core.idle) == 1
        w.say(here, query("commit"))
        w.settle()
        assert there.kinds.endswith("Z:I")
        (klass,) = w.pool.book.classes.values()
        assert (klass.executing, klass.waiting) == (0, 0)


@pytest.mark.parametrize("how", ["leaves", "is broken off", "loses its session"])
def test_however_a_use_of_a_session_ends_its_execution_ends_once(how: str) -> None:
    with world(sessions=2) as w:
        learn(w, permits=1)
        holder, waiter = client(w), client(w)
        w.say(holder, query("begin"))
        w.say(waiter, query("select 1"))
        (klass,) = w.pool.book.classes.values()
        assert (klass.executing, klass.waiting) == (1, 1)
        if how == "leaves":
            holder.leave()
        elif how == "is broken off":
            holder.conn.break_off("57P01", "for a test")
        else:
            conn = holder.conn.server
            assert conn is not None
            conn.give_up("for a test")
        w.settle()
        assert waiter.kinds.endswith("Z:I")
        assert (klass.executing, klass.waiting) == (0, 0)
        assert holder.conn.ticket.account.executing == 0
