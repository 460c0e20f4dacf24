"""What a client hears through the pool is what it hears from the server, however the bytes are cut."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.demo.client import FLUSH, SYNC, Inbox, Message, parse, query
from tests.relay.miniserver import MiniServer
from tests.relay.scripts import SCRIPTS
from tests.relay.world import Chop, bytewise, whole, world


def straight(steps: list[bytes]) -> tuple[list[Message], MiniServer]:
    """The same script without a pooler between."""
    server, inbox, heard = MiniServer(), Inbox(), []
    for step in steps:
        inbox.feed(server.feed(step))
        while (said := inbox.next()) is not None:
            heard.append(said)
    return heard, server


def through(steps: list[bytes], chop: Chop, sessions: int = 1) -> tuple[list[Message], list[MiniServer]]:
    """Through the pool; everything must be clean afterwards."""
    with world(sessions) as w:
        w.chop = chop
        client = w.client()
        for step in steps:
            w.send(client, step)
            w.settle()
        heard = client.take()
        assert not client.closed
        w.chop = whole
        client.leave()
        w.settle()
        w.check_idle()
        return heard, [session.mini for session in w.sessions]


def chopper(seed: int, biggest: int) -> Chop:
    """Pieces of 1 to `biggest` bytes."""
    random = Random(seed)

    def chop(data: bytes) -> Iterable[bytes]:
        at = 0
        while at < len(data):
            size = random.randint(1, biggest)
            yield data[at : at + size]
            at += size

    return chop


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_servers_own_transcript(name: str) -> None:
    expected, alone = straight(SCRIPTS[name])
    heard, (pooled,) = through(SCRIPTS[name], whole)
    assert heard == expected
    assert pooled.committed == alone.committed


def test_an_error_that_skips_half_a_query_waits_for_the_sync() -> None:
    for cut in range(1, len(query("select 1"))):
        with world() as w:
            one, two = w.client(), w.client()
            assert w.say(one, parse("bad") + FLUSH + query("select 1")[:cut]) == "E:42601"
            assert w.say(one, query("select 1")[cut:]) == ""
            assert w.say(two, query("select 2")) == "", "the session is not in step"
            assert w.say(one, SYNC) == "Z:I"
            assert two.kinds == "T D:2 C:SELECT 1 Z:I"
            w.check_idle()


SMALL = [name for name in SCRIPTS if not name.startswith("big")]


@pytest.mark.parametrize("name", SMALL)
def test_bytes_one_by_one_change_nothing(name: str) -> None:
    expected, alone = straight(SCRIPTS[name])
    heard, (pooled,) = through(SCRIPTS[name], bytewise)
    assert heard == expected
    assert pooled.committed == alone.committed


@given(
    name=st.sampled_from(sorted(SCRIPTS)), seed=st.integers(0, 2**32),
    biggest=st.sampled_from([3, 9, 40, 900]))
def test_any_cut_of_the_bytes_changes_nothing(name: str, seed: int, biggest: int) -> None:
    if name not in SMALL:
        biggest = 30_000 + biggest
    expected, alone = straight(SCRIPTS[name])
    heard, (pooled,) = through(SCRIPTS[name], chopper(seed, biggest))
    assert heard == expected
    assert pooled.committed == alone.committed


@given(names=st.lists(st.sampled_from(SMALL), min_size=2, max_size=4), seed=st.integers(0, 2**32))
def test_clients_side_by_side_hear_only_their_own(names: list[str], seed: int) -> None:
    """Several clients over fewer sessions, all cut at random: each hears its own transcript."""
    with world(len(names) - 1) as w:
        w.chop = chopper(seed, 25)
        random = Random(seed)
        left = {n: list(SCRIPTS[name]) for n, name in enumerate(names)}
        clients = [w.client() for _ in names]
        while left:
            n = random.choice(sorted(left))
            if clients[n].conn.ticket.waiting:
                n = next(k for k in left if not clients[k].conn.ticket.waiting)
            w.send(clients[n], left[n].pop(0))
            w.settle()
            if not left[n]:
                del left[n]
        for client, name in zip(clients, names, strict=True):
            assert client.take() == straight(SCRIPTS[name])[0]
            client.leave()
        w.settle()
        w.check_idle()
