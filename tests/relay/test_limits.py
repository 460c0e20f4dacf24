"""Limits and checks of a pool, with scripted sessions: what each counts, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from pooler.demo.client import FLUSH, SYNC, message, query
from pooler.pool import janitor, pressure, steering
from pooler.relay.leaving import CHANGED
from tests.relay.scripts import group
from tests.relay.world import World, world

LONG_AGO = 1_000.0


def limits_pass(w: World, seconds: float) -> None:
    """As the worker's clock does."""
    now = monotonic() + seconds
    for rule in (janitor.end_idle_transactions, janitor.end_long_transactions, janitor.end_long_queries,
                 janitor.end_idle_clients, janitor.tell_who_waits, janitor.use_reserve):
        rule(w.pool, now)
    w.settle()


def rest(w: World, seconds: float = LONG_AGO) -> None:
    """Idle sessions have been so for so long."""
    for session in w.pool.core.idle:
        session.idle_since -= seconds


# ---- query_timeout, transaction_timeout


def test_each_query_of_a_pipeline_has_its_own_time() -> None:
    """R53: not the sum of all, and not from what was sent last either."""
    with world() as w:
        client, session = w.client(), w.sessions[0]
        w.say(client, query("begin"))
        session.stopped = True
        w.say(client, query("select 1") * 2)
        conn = session.conn
        conn.query_at -= 10.0
        asked = conn.query_at
        w.say(client, query("select 3"))
        assert conn.query_at == asked
        session.stopped = False
        held, session.mini.feed = session.mini.feed, lambda data: held(data[:14])  # type: ignore[method-assign]
        w.settle()
        assert conn.query_at > asked
        assert conn.owed


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_time_between_transactions_and_queries_is_counted_for_none(mode: str) -> None:
    """R53."""
    with world(mode=mode, query_timeout=2.0, transaction_timeout=2.0) as w:
        client = w.client()
        assert w.say(client, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        conn = w.sessions[0].conn
        for name in ("query_at", "started_at", "last_used"):
            setattr(conn, name, getattr(conn, name) - LONG_AGO)
        limits_pass(w, 0.0)
        assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        assert not client.closed
        assert w.pool.transaction_times.sum_seconds < 1.0


@pytest.mark.parametrize("asked", [query("begin"), group("select 1") + FLUSH])
def test_an_open_transaction_ends_with_its_client_and_another_is_served(asked: bytes) -> None:
    with world(sessions=2, transaction_timeout=5.0) as w:
        client, other = w.client(), w.client()
        w.say(client, asked)
        limits_pass(w, 4.9)
        assert not client.closed
        limits_pass(w, 5.1)
        assert client.closed
        assert client.kinds == "E:25P04"
        assert w.say(other, query("select 1")) == "T D:1 C:SELECT 1 Z:I"


@pytest.mark.parametrize("limits", [{"query_timeout": 5.0}, {"transaction_timeout": 5.0}])
@pytest.mark.parametrize("waits_first", [False, True])
def test_a_request_that_is_never_sent_to_its_end_holds_a_session_no_longer_than_it_may(
    limits: dict[str, Any], waits_first: bool
) -> None:
    """R43."""
    with world(sessions=2, **limits) as w:
        slow, other, holders = w.client(), w.client(), [w.client(), w.client()]
        for holder in holders if waits_first else ():
            w.say(holder, query("begin"))
        w.say(slow, message(b"Q", b"x" * 50_000)[:100])
        for holder in holders if waits_first else ():
            w.say(holder, query("commit"))
        assert slow.conn.server is not None
        limits_pass(w, 4.9)
        assert not slow.closed
        limits_pass(w, 5.1)
        assert slow.closed
        assert w.say(other, query("select 1")) == "T D:1 C:SELECT 1 Z:I"


# ---- waiting


def test_who_waits_is_told_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(query_wait_notify=5.0) as w:
        holder, first, second = w.client(), w.client(), w.client()
        w.say(holder, query("begin"))
        w.say(first, query("select 1"))
        limits_pass(w, 4.0)
        assert first.kinds == ""
        limits_pass(w, 6.0)
        w.say(second, query("select 2"))
        limits_pass(w, 0.1)
        limits_pass(w, 6.0)
        limits_pass(w, 7.0)
        assert (first.kinds, second.kinds) == ("N", "N")
        w.say(holder, query("commit"))
        assert (first.kinds, second.kinds) == ("T D:1 C:SELECT 1 Z:I", "T D:2 C:SELECT 1 Z:I")


@pytest.mark.parametrize("reserve", [0, 1])
def test_a_long_wait_opens_the_reserve_and_no_wait_closes_it(reserve: int) -> None:
    with world(reserve_pool_timeout=5.0) as w:
        w.pool.apply_settings(replaced(w, reserve=reserve))
        holder, waiter = w.client(), w.client()
        w.say(holder, query("begin"))
        w.say(waiter, query("select 1"))
        limits_pass(w, 4.9)
        assert w.pool.core.opening == 0
        limits_pass(w, 5.1)
        assert (w.pool.core.opening, w.pool.core.size_max) == (reserve, 1 + reserve)
        w.say(holder, query("commit"))
        limits_pass(w, 5.2)
        assert w.pool.core.size_max == 1


def replaced(w: World, **changes: Any) -> Any:
    return replace(w.pool.plan, **changes)


# ---- server_check_query


def test_a_session_that_rested_long_is_asked_before_it_is_given() -> None:
    with world() as w:
        rest(w)
        client, session = w.client(), w.sessions[0]
        assert w.say(client, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        assert session.received.startswith(query(""))
        before = session.received.count(query(""))
        w.say(client, query("select 2"))
        assert session.received.count(query("")) == before
        w.check_idle()


@pytest.mark.parametrize(("settings", "asked"), [
    ({"server_check_query": "select 7"}, query("select 7")), ({"server_check_query": ""}, b""),
])
def test_the_check_is_the_one_that_is_set(settings: dict[str, Any], asked: bytes) -> None:
    with world(**settings) as w:
        rest(w)
        w.say(w.client(), query("select 1"))
        assert w.sessions[0].received == asked + query("select 1")


def test_a_delay_of_zero_asks_each_time() -> None:
    with world(server_check_delay=0.0) as w:
        client = w.client()
        for _ in range(3):
            w.say(client, query("select 1"))
        assert w.sessions[0].received == (query("") + query("select 1")) * 3


def test_a_session_that_does_not_answer_costs_a_client_nothing_but_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went away unnoticed: the next is asked, and serves."""
    monkeypatch.setattr(pressure, "ENDS_SECONDS", -1.0)  # one by one: no restart of the server
    with world(sessions=3) as w:
        rest(w)
        client = w.client()
        for session in w.sessions[1:]:
            session.mini.ended = True
            session.stopped = True
            session.far.close()
        assert w.say(client, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        assert [session.conn.closing for session in w.sessions] == [False, True, True]


def test_a_check_that_is_refused_closes_the_session() -> None:
    with world(sessions=2, server_check_query="select 1/0") as w:
        rest(w)
        client = w.client()
        w.say(client, query("select 1"))
        assert all(session.conn.closing for session in w.sessions)
        assert client.conn.ticket.waiting


def test_only_as_many_are_asked_as_wait() -> None:
    with world(sessions=3) as w:
        rest(w)
        w.sessions[-1].stopped = True
        w.say(w.client(), query("select 1"))
        assert (len(w.pool.core.idle), len(w.pool.core.checking), w.pool.core.opening) == (2, 1, 0)


def test_after_a_pause_sessions_are_asked_too() -> None:
    with world() as w:
        rest(w)
        client = w.client()
        w.pool.pause()
        assert w.say(client, query("select 1")) == ""
        w.pool.resume()
        w.settle()
        assert client.kinds == "T D:1 C:SELECT 1 Z:I"
        assert w.sessions[0].received.startswith(query(""))


# ---- server_reset_query


@pytest.mark.parametrize("rule", ["clean", "allow"])
@pytest.mark.parametrize(("reset", "asked"), [
    ("DISCARD ALL", b"DISCARD ALL"), ("RESET ALL", b"RESET ALL"), ("", b""),
])
def test_a_session_of_ones_own_is_reset_by_what_is_set_when_its_client_leaves(
    rule: str, reset: str, asked: bytes
) -> None:
    with world(mode="session", session_state=rule, server_reset_query=reset) as w:
        client, session = w.client(), w.sessions[0]
        w.say(client, query("set work_mem = '7MB'"))
        before = len(session.received)
        client.leave()
        w.settle()
        assert session.received[before:] == (query(asked.decode()) if asked else b"")
        w.check_idle()
        kept = w.say(w.client(), query("show work_mem"))
        assert ("7MB" in kept) is (not asked)


def test_a_reset_query_that_is_always_run_is_so_after_a_transaction_that_left_something() -> None:
    with world(session_state="allow", server_reset_query="RESET ALL", server_reset_query_always=True) as w:
        client, session = w.client(), w.sessions[0]
        w.say(client, query("select 1"))
        assert b"RESET ALL" not in session.received
        w.say(client, query("set work_mem = '7MB'"))
        assert session.received.endswith(query("RESET ALL"))
        w.check_idle()


# ---- server_fast_close, sizes, packets


@pytest.mark.parametrize("fast", [True, False])
def test_reconnect_ends_clients_with_a_session_of_their_own_where_it_is_to_be_fast(fast: bool) -> None:
    with world(sessions=2, mode="session", server_fast_close=fast) as w:
        idle, busy = w.client(), w.client()
        w.say(idle, query("select 1"))
        w.say(busy, query("begin"))
        steering.reconnect(w.pool)
        w.settle()
        assert (idle.closed, busy.closed) == (fast, False)
        assert w.say(busy, query("commit")) == "C:COMMIT Z:I" + (" E:57P01" if fast else "")
        assert busy.closed is fast
        assert CHANGED == "database configuration changed"


def test_a_smaller_pool_closes_what_is_idle_and_then_what_falls_idle() -> None:
    """R74: no transaction is ended by it."""
    with world(sessions=4) as w:
        clients = [w.client() for _ in range(3)]
        for client in clients:
            w.say(client, query("begin"))
        w.pool.apply_settings(replaced(w, size_max=2))
        w.pool.apply_settings(replaced(w, size_max=2))  # once more, as each login does
        assert len(w.pool.core.idle) == 0
        for client in clients:
            assert w.say(client, query("commit")) == "C:COMMIT Z:I"
        assert len(w.pool.core.idle) == 2
        w.pool.core.closing = 0  # they are gone
        w.pool.apply_settings(replaced(w, size_max=4))
        for client in clients:
            w.say(client, query("begin"))
        assert w.pool.core.opening == 1


def test_a_message_longer_than_max_packet_size_is_refused_before_it_is_passed_on() -> None:
    with world(max_packet_size=100_000) as w:
        client = w.client()
        assert w.say(client, query("select " + "1" * 90_000)).startswith("T D")
        w.say(client, message(b"Q", b"select " + b"1" * 100_000 + b"\0"))
        assert client.closed
        w.check_idle()
        assert w.say(w.client(), group("select 1") + SYNC) == "1 2 D:1 C:SELECT 1 Z:I"
