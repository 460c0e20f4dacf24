"""transactionLimit: what is past it is cancelled, then ended; and what is said of who has a session."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest

from coordinator.session_table import encode_who
from pooler.demo.client import query
from pooler.pool.ledger_view import LedgerView
from pooler.pool.transaction_limit import CANCELLED_SECONDS, end_past_limit
from pooler.serve.checkouts import checkout
from tests.relay.world import Client, World, world

POLICY = {"executionClasses": {"interactive": {"transactionLimitSeconds": 5.0},
                               "batch": {"transactionLimitSeconds": 60.0}}}


def of_class(w: World, name: str) -> Client:
    """A client of it, in a fleet whose policy has both."""
    w.parts.permits.ledgers["db/write"] = LedgerView("db/write", policy=POLICY)
    client = w.client()
    client.conn.who = encode_who("acme", name, "10.0.0.9:1")
    return client


def limit_passes(w: World, seconds: float) -> None:
    """The worker's clock, so much later."""
    end_past_limit(w.pool, monotonic() + seconds)
    w.settle()


def cancels(w: World) -> int:
    return sum(getattr(task, "func", task).__name__ == "cancel_for" for task, *_ in w.tasks.started)


def test_what_runs_past_the_limit_is_cancelled_once_and_ended_five_seconds_later() -> None:
    with world() as w:
        client = of_class(w, "interactive")
        w.say(client, query("begin"))
        w.sessions[0].stopped = True
        w.say(client, query("select 1"))
        limit_passes(w, 4.9)
        assert cancels(w) == 0
        for late in (5.1, 6.0, 5 + CANCELLED_SECONDS - 0.1):
            limit_passes(w, late)
            assert cancels(w) == 1
        assert not client.closed
        limit_passes(w, 5 + CANCELLED_SECONDS + 0.1)
        assert client.closed
        assert client.kinds == "E:25P04"


def test_the_limit_of_one_class_ends_nobody_of_another() -> None:
    with world(sessions=2) as w:
        quick, batch = of_class(w, "interactive"), of_class(w, "batch")
        w.say(quick, query("begin"))
        w.say(batch, query("begin"))
        limit_passes(w, 59.0)
        assert (quick.closed, batch.closed) == (True, False)
        limit_passes(w, 66.0)
        assert batch.closed


def test_the_next_transaction_is_not_taken_for_the_one_that_was_cancelled() -> None:
    with world() as w:
        client = of_class(w, "interactive")
        for again in (1, 2):
            w.say(client, query("begin"))
            w.sessions[0].stopped = True
            w.say(client, query("select 1"))
            limit_passes(w, 5.1)
            assert cancels(w) == again
            w.sessions[0].stopped = False
            w.settle()
            w.say(client, query("commit"))
        assert not client.closed


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_who_rests_between_transactions_is_past_no_limit(mode: str) -> None:
    with world(mode=mode) as w:
        client = of_class(w, "interactive")
        w.say(client, query("select 1"))
        limit_passes(w, 3600.0)
        assert not client.closed
        assert cancels(w) == 0


def test_a_policy_without_limits_ends_nobody() -> None:
    with world() as w:
        client = w.client()
        w.say(client, query("begin"))
        limit_passes(w, 1e9)
        assert not client.closed


def seen(w: World) -> Any:
    (server,) = w.pool.core.active
    found = checkout(w.pool, server, monotonic() + 10.0)
    return found.why, found.waits_for, found.last_command, found.is_late


@pytest.mark.parametrize(("said", "expected"), [
    (query("begin"), ("idle in transaction", "client", "BEGIN", True)),
    (query("begin") + query("bad"), ("idle in transaction (aborted)", "client", "BAD", True)),
])
def test_a_checkout_says_what_it_is_for_and_who_has_to_act(said: bytes, expected: Any) -> None:
    with world() as w:
        client = of_class(w, "interactive")
        w.say(client, said)
        assert seen(w) == expected
        (server,) = w.pool.core.active
        assert checkout(w.pool, server, monotonic()).holder.startswith(f"u@db from {client.conn.address}")


def test_what_runs_waits_for_its_server_and_a_session_of_ones_own_is_held() -> None:
    with world() as w:
        client = of_class(w, "batch")
        w.sessions[0].stopped = True
        w.say(client, query("select 1"))
        assert seen(w) == ("executing", "server", "SELECT", False)
    with world(mode="session") as w:
        w.say(of_class(w, "interactive"), query("select 1"))
        assert seen(w) == ("held", "client", "SELECT", False)


def test_what_the_pooler_does_for_nobody_is_being_cleaned() -> None:
    with world() as w:
        w.say(of_class(w, "interactive"), query("begin"))
        (server,) = w.pool.core.active
        server.client, server.own = None, 1
        found = checkout(w.pool, server, monotonic() + 100.0)
        assert (found.why, found.waits_for) == ("being cleaned", "server")
        assert not found.is_late
