"""Whatever a client sends, it is that client alone that ends, and with FATAL 08P01."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.demo.client import SYNC, bind, message, parse, query
from tests.relay.scripts import SCRIPTS, group
from tests.relay.world import World, world


def bystander_served(w: World) -> None:
    """Another client is served, on a new session if need be."""
    if all(s.conn.closing for s in w.sessions):
        w.open_session()
    other = w.client()
    assert w.say(other, query("select 2")) == "T D:2 C:SELECT 1 Z:I"


VIOLATIONS = {
    "unknown type": message(b"m"),
    "a type of the server": message(b"Z", b"I"),
    "length 3": b"Q\x00\x00\x00\x03",
    "length 0": b"Q\x00\x00\x00\x00" + b"select 1",
    "length -1": b"Q\xff\xff\xff\xff",
    "length above the limit": b"Q\x40\x00\x00\x01",
    "a sync with contents": b"S" + (70_000).to_bytes(4, "big"),
    "a sync of length 3": b"S\x00\x00\x00\x03",
    "a bind of length 2": b"B\x00\x00\x00\x02" + b"x" * 10,
    "a bind without names": b"B\x00\x00\x00\x08abcd",
    "a parse without a name": b"P\x00\x00\x00\x08abcd",
    "a parse with an endless length": b"P\x7f\xff\xff\xff" + b"x" * 50,
    "a describe of nothing": b"D\x00\x00\x00\x06Qx",
    "a close of length 4": b"C\x00\x00\x00\x04",
    "copy data of length 1": b"d\x00\x00\x00\x01",
    "flush of length 2": b"H\x00\x00\x00\x02",
    "a flush with contents": message(b"H", b"x" * 300),
    "64 random bytes": bytes(range(140, 204)),
    "a password": message(b"p", b"secret\0"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
@pytest.mark.parametrize("state", ["idle", "transaction", "waiting", "behind a query", "refused group"])
def test_a_violation_ends_that_client_only(name: str, state: str) -> None:
    with world() as w:
        client, holder = w.client(), w.client()
        before = b""
        if state == "transaction":
            w.say(client, query("begin"))
        if state == "waiting":
            w.say(holder, query("begin"))
        if state == "behind a query":
            before = query("select 1")
        if state == "refused group":
            w.say(client, parse("bad") + b"H\x00\x00\x00\x04")
        heard = w.say(client, before + VIOLATIONS[name])
        if state == "waiting":
            w.say(holder, query("commit"))
            heard += client.kinds
        skipped = state == "refused group" and name == "a flush with contents"  # as the server skips it
        assert client.closed or skipped or name in ("a bind without names", "a parse without a name",
                                                    "a describe of nothing", "a close of length 4")
        if client.closed:
            assert heard.split()[-1] in ("E:08P01", "E:54000"), heard
        client.leave()
        w.settle()
        bystander_served(w)
        assert w.sessions[0].mini.committed == []


@given(
    garbage=st.binary(min_size=1, max_size=200), first=st.sampled_from(sorted(SCRIPTS)),
    cut=st.integers(0, 60))
def test_rubbish_never_reaches_the_reactor_as_an_exception(garbage: bytes, first: str, cut: int) -> None:
    with world() as w:
        client = w.client()
        steps = [step for step in SCRIPTS[first] if len(step) < 2_000]
        for step in steps[:-1]:
            w.say(client, step)
        w.say(client, (steps[-1][:cut] if steps else b"") + garbage)
        w.say(client, garbage)
        client.leave()
        w.settle()
        bystander_served(w)


SERVER_RUBBISH = st.one_of(
    st.binary(min_size=1, max_size=100),
    st.builds(
        message, st.sampled_from([bytes([k]) for k in b"ZCETDGHWnst123IAKNRSVcdv"]), st.binary(max_size=30)))


@given(
    rubbish=st.lists(SERVER_RUBBISH, min_size=1, max_size=5),
    when=st.sampled_from(["idle", "query", "group"]))
def test_a_server_that_talks_rubbish_never_raises_in_the_reactor(rubbish: list[bytes], when: str) -> None:
    with world() as w:
        client, other = w.client(), w.client()
        w.sessions[0].mini.mute = True
        if when == "query":
            w.say(client, query("select 1"))
        if when == "group":
            w.say(client, parse("select 1", "a") + bind((), "a") + SYNC + group("select 2") + SYNC)
        w.sessions[0].unsent += rubbish
        w.settle()
        w.sessions[0].mini.ended = True
        w.settle()
        w.open_session()
        assert w.say(other, query("select 2")) == "T D:2 C:SELECT 1 Z:I"


def test_an_over_long_message_that_must_be_seen_whole_is_refused_with_its_own_code() -> None:
    with world() as w:
        client = w.client()
        heard = w.say(client, b"P" + (17 << 20).to_bytes(4, "big") + b"name\0select 1")
        assert heard == "E:54000"
        bystander_served(w)


def test_no_memory_in_proportion_to_a_claimed_length() -> None:
    with world() as w:
        client = w.client()
        assert w.say(client, b"Q" + (1 << 29).to_bytes(4, "big") + b"select") == ""
        assert len(client.conn.buffer) + client.conn.missing < 65_536
        client.leave()
        w.settle()
        bystander_served(w)
