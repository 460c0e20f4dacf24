"""A client that cannot be served hears why, stays connected, and is in step."""

from __future__ import annotations

import pytest

from pooler.demo.client import FLUSH, SYNC, parse, query
from pooler.errors import NoPermit, PoolerError
from pooler.pool import janitor
from pooler.pool.growth import Growth
from tests.relay.scripts import COPY_DONE, GROUP, call, copy_data, group
from tests.relay.world import Client, World, world

ASKED = {
    "query": (query("insert a"), "E:57014 Z:I"),
    "queries": (query("insert a") + query("insert b"), "E:57014 Z:I"),
    "call": (call(), "E:57014 Z:I"),
    "group": (group("insert a") + SYNC, "E:57014 Z:I"),
    "group, sync later": (group("insert a"), "E:57014"),
    "group and query": (group("insert a") + query("insert b") + SYNC, "E:57014 Z:I"),
    "half a query": (query("insert abcdefgh")[:12], "E:57014 Z:I"),
    "half a group": ((group("insert a") + SYNC)[:-7], "E:57014"),
    "half a big bind": (parse("select $1") + b"B\0\0\x40\0" + b"\0\0" + b"x" * 5000, "E:57014"),
    "sync first": (SYNC + query("insert a"), "Z:I E:57014 Z:I"),
    "flush first": (FLUSH + query("insert a"), "E:57014 Z:I"),
    "stray copy first": (copy_data("1") + COPY_DONE + query("insert a"), "E:57014 Z:I"),
}
REST = {
    "half a query": query("insert abcdefgh")[12:],
    "half a group": (group("insert a") + SYNC)[-7:],
    "half a big bind": b"x" * (0x4000 - 4 - 5002) + SYNC,
    "group, sync later": SYNC,
}


def waiting(w: World, sent: bytes) -> tuple[Client, Client]:
    """A client that waits with this, and the one who holds the session."""
    holder, client = w.client(), w.client()
    w.say(holder, query("begin"))
    w.send(client, sent)
    w.settle()
    assert client.conn.ticket.waiting
    return holder, client


def in_step(w: World, holder: Client, client: Client, name: str, committed: list[str]) -> None:
    """The rest of what was refused is dropped, and a following query works; nothing refused has run."""
    heard = w.say(client, REST.get(name, b""))
    assert heard == ("Z:I" if name in ("half a group", "half a big bind", "group, sync later") else "")
    w.say(holder, query("commit"))
    client.take()
    assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
    assert w.sessions[0].mini.committed == committed
    w.check_idle()


@pytest.mark.parametrize("name", ASKED)
def test_a_wait_that_ends_by_its_deadline(name: str) -> None:
    sent, expected = ASKED[name]
    with world() as w:
        holder, client = waiting(w, sent)
        janitor.end_late_waits(w.pool, float("inf"))
        w.settle()
        assert client.kinds == (expected + " E:57014 Z:I" if name == "queries" else expected)
        assert not client.conn.ticket.waiting, "what came with it has waited as long"
        in_step(w, holder, client, name, [])


def test_a_thousand_pipelined_queries_wait_for_one_deadline_together() -> None:
    with world() as w:
        whole = (query("insert a") + group("insert b") + SYNC) * 500
        holder, client = waiting(w, whole + query("insert c")[:3])
        janitor.end_late_waits(w.pool, float("inf"))
        w.settle()
        assert client.kinds == " ".join(["E:57014 Z:I"] * 1_000)
        w.say(holder, query("commit"))
        assert w.say(client, query("insert c")[3:]) == "C:INSERT 0 1 Z:I"
        assert w.sessions[0].mini.committed == ["c"], "less than a header had come"
        w.check_idle()


@pytest.mark.parametrize("name", ASKED)
def test_a_wait_that_its_client_cancels(name: str) -> None:
    sent, expected = ASKED[name]
    with world() as w:
        holder, client = waiting(w, sent)
        client.conn.cancel_wait()
        w.settle()
        assert client.kinds == expected
        in_step(w, holder, client, name, ["b"] if name == "queries" else [])


class FailingGrowth(Growth):
    """A pool to whose server nobody can log in."""

    def refusal(self, now: float) -> PoolerError | None:
        return self.last_error


@pytest.mark.parametrize("name", ASKED)
def test_a_pool_that_cannot_be_served_refuses_at_once(name: str) -> None:
    sent, expected = ASKED[name]
    expected = expected.replace("57014", "53300")
    with world(0) as w:
        w.pool.growth = FailingGrowth(w.pool)
        w.pool.growth.last_error = NoPermit("none to be had")
        client = w.client()
        assert w.say(client, sent) == (expected + " E:53300 Z:I" if name == "queries" else expected)
        assert w.say(client, REST.get(name, b"")) in ("", "Z:I")
        assert w.say(client, GROUP + SYNC) == "E:53300 Z:I"
        w.pool.growth.last_error = None
        w.send(client, query("select 2"))
        w.settle()
        w.open_session()
        w.settle()
        assert client.kinds == "T D:2 C:SELECT 1 Z:I"


def test_ten_thousand_queries_in_one_write_are_all_refused() -> None:
    with world(0) as w:
        w.pool.growth = FailingGrowth(w.pool)
        w.pool.growth.last_error = NoPermit("none to be had")
        client = w.client()
        assert w.say(client, query("") * 10_000) == " ".join(["E:53300 Z:I"] * 10_000)


def test_a_client_that_is_gone_when_it_is_refused_asks_for_nothing_more() -> None:
    """Its next query came in the same write: it must not get a session that nobody gives back."""
    with world() as w:
        holder, client = waiting(w, query("insert a") + query("insert b"))
        client.near.close()
        janitor.end_late_waits(w.pool, float("inf"))
        w.settle()
        w.say(holder, query("commit"))
        assert w.sessions[0].mini.committed == []
        w.check_idle()


def test_a_cancel_of_a_client_that_does_not_wait_does_nothing() -> None:
    with world() as w:
        client = w.client()
        client.conn.cancel_wait()
        assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"


def test_a_refused_group_waits_for_its_sync_before_it_says_ready() -> None:
    with world() as w:
        holder, client = waiting(w, parse("select 1"))
        janitor.end_late_waits(w.pool, float("inf"))
        w.settle()
        assert client.kinds == "E:57014"
        assert w.say(client, GROUP) == ""
        assert w.say(client, query("select 1")) == "", "as a server after an error: skipped to the Sync"
        assert w.say(client, SYNC) == "Z:I"
        w.say(holder, query("commit"))
        assert w.say(client, query("select 2")) == "T D:2 C:SELECT 1 Z:I"
