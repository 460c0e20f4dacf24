"""When a session goes back: after the transaction, the statement, or the client; and what is counted."""

from __future__ import annotations

import pytest

from pooler.demo.client import SYNC, close, query
from pooler.wire.messages import bind, parse
from tests.relay.scripts import group
from tests.relay.world import world


def test_transaction_pooling_hands_on_at_the_end_of_a_transaction() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, query("begin"))
        assert w.say(two, query("select 2")) == ""
        assert w.say(one, query("select 1")) == "T D:1 C:SELECT 1 Z:T"
        assert two.kinds == ""
        w.say(one, query("commit"))
        assert two.kinds == "T D:2 C:SELECT 1 Z:I"


def test_session_pooling_hands_on_when_the_client_leaves() -> None:
    with world(mode="session") as w:
        one, two = w.client(), w.client()
        w.say(one, query("select 1"))
        assert w.say(two, query("select 2")) == ""
        one.leave()
        w.settle()
        assert two.kinds == "T D:2 C:SELECT 1 Z:I"


def test_session_pooling_takes_no_session_before_the_first_query() -> None:
    with world(mode="session") as w:
        w.client()
        w.settle()
        assert w.pool.core.count().idle == 1


@pytest.mark.parametrize("sent", [query("select 1"), group("select 1") + SYNC, query("select 1; insert a")])
def test_statement_pooling_serves_single_statements(sent: bytes) -> None:
    with world(mode="statement") as w:
        client = w.client()
        assert w.say(client, sent).endswith("Z:I")
        w.check_idle()


@pytest.mark.parametrize("sent", [query("begin"), group("begin") + SYNC, query("begin; insert a")])
def test_statement_pooling_refuses_a_transaction_block_and_undoes_it(sent: bytes) -> None:
    with world(mode="statement") as w:
        client = w.client()
        assert w.say(client, sent).split()[-1] == "E:08P01"
        assert client.closed
        assert w.sessions[0].mini.committed == []
        w.check_idle()


def test_a_waiter_is_served_in_turn_and_every_use_is_counted() -> None:
    with world() as w:
        clients = [w.client() for _ in range(5)]
        w.say(clients[0], query("begin"))
        for n, client in enumerate(clients[1:]):
            w.say(client, query(f"insert c{n}"))
        w.say(clients[0], query("commit"))
        assert w.sessions[0].mini.committed == ["c0", "c1", "c2", "c3"]
        assert (w.pool.transactions, w.pool.assignments, w.pool.queries) == (5, 5, 6)
        assert sum(len(c.conn.buffer) for c in clients) == 0


def test_each_query_of_a_transaction_is_timed_from_its_own_coming() -> None:
    with world() as w:
        client = w.client()
        w.say(client, query("begin"))
        began = client.conn.requested_at
        w.say(client, query("select 1"))
        assert client.conn.requested_at > began
        w.say(client, query("commit"))
        assert w.pool.query_seconds <= w.pool.transaction_times.sum_seconds


def test_parses_and_binds_are_counted_as_asked_and_as_sent() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, parse("s", "select 1") + bind("", "s") + SYNC)
        w.say(two, parse("t", "select 1") + bind("", "t") + SYNC)
        assert (w.pool.client_parses, w.pool.server_parses, w.pool.binds) == (2, 1, 2)


@pytest.mark.parametrize(("mode", "kept"), [("session", 200), ("transaction", 0)])
def test_nothing_is_counted_as_prepared_where_names_are_the_clients_own(mode: str, kept: int) -> None:
    with world(mode=mode, max_prepared_statements=kept) as w:
        client = w.client()
        w.say(client, parse("s", "select 1") + bind("", "s") + SYNC)
        assert (w.pool.client_parses, w.pool.server_parses, w.pool.binds) == (0, 0, 0)


def test_bytes_are_counted_once_however_long_they_waited() -> None:
    with world() as w:
        holder, client = w.client(), w.client(TimeZone="Asia/Tokyo")
        sent = query("begin"), query("select 1"), query("commit")
        w.say(holder, sent[0])
        w.say(client, sent[1])
        w.say(holder, sent[2])
        assert w.pool.received_bytes == sum(map(len, sent))


def test_a_session_marked_to_retire_serves_nobody_after_its_transaction() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        w.say(one, query("begin"))
        w.say(two, query("select 2"))
        w.sessions[0].conn.retire = "a test"
        assert w.say(one, query("commit")) == "C:COMMIT Z:I"
        assert two.kinds == ""
        assert w.sessions[0].conn.closing
        w.open_session()
        w.settle()
        assert two.kinds == "T D:2 C:SELECT 1 Z:I"


def test_a_bug_in_one_connection_ends_that_one_only() -> None:
    with world(2) as w:
        one, two = w.client(), w.client()
        w.say(one, query("begin"))
        w.say(two, query("begin"))
        one.conn.pool = None  # type: ignore[assignment]
        one.near.send(query("select 1"))
        w.reactor._turn()
        assert w.reactor.faults == 1
        w.reactor.faults = 0
        assert w.say(two, query("select 2")) == "T D:2 C:SELECT 1 Z:T"


def test_a_function_call_ends_a_group_as_a_query_does() -> None:
    with world() as w:
        one, two = w.client(), w.client()
        call = b"F\x00\x00\x00\x0e\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00"
        assert w.say(one, close("P", "") + call) == "3 V Z:I"
        assert w.say(two, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        w.check_idle()


def test_half_a_message_behind_settings_holds_no_session() -> None:
    with world() as w:
        one, two = w.client(TimeZone="Asia/Tokyo"), w.client()
        for client in (one, two):
            assert w.say(client, query("select 1")) == "T D:1 C:SELECT 1 Z:I"
        whole = parse("select 3", "a") + SYNC
        assert w.say(one, whole[:9]) == ""
        assert w.say(two, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
        assert w.say(one, whole[9:]) == "1 Z:I"
        w.check_idle()
