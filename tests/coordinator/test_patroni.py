"""Patroni's REST interface, spoken to by a scripted server: who leads, and every answer that is none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from coordinator import patroni
from coordinator.patroni import BODY_BYTES_MAX, Member, Patroni, PatroniFailed, leader_in


def member(name: str, role: str, host: Any = "10.0.0.11", port: Any = 5432) -> dict[str, Any]:
    return {"name": name, "role": role, "state": "running", "host": host, "port": port, "timeline": 3,
            "api_url": "http://10.0.0.11:8008/patroni", "lag": 0}


def cluster(*members: Any, **more: Any) -> bytes:
    return json.dumps({"members": list(members), "scope": "orders", **more}).encode()


def answer(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


LEADER = member("a", "leader")
GOOD = answer(cluster(LEADER, member("b", "replica", "10.0.0.12"), member("c", "sync_standby", "10.0.0.13")))


@dataclass
class Scripted:
    """A server that gives `answers` in turn, the last again and again; b"" says nothing and stays."""

    answers: list[bytes]
    url: str = ""
    asked: list[bytes] = field(default_factory=list)

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            self.asked.append(bytes(await stream.receive_some(4096)))
            said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            try:
                await stream.send_all(said)
                if not said:
                    await stream.receive_some(1)
            except trio.BrokenResourceError:
                return


@asynccontextmanager
async def scripted(*answers: bytes) -> AsyncIterator[Scripted]:
    """A running one on a free port of the loopback."""
    server = Scripted(list(answers))
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), server.serve, 0)
        server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        yield server
        nursery.cancel_scope.cancel()


async def test_the_leaders_address_is_read_out_of_one_get_of_the_cluster() -> None:
    async with scripted(GOOD) as server:
        assert (await Patroni([server.url]).cluster()).leader == "10.0.0.11:5432"
    assert server.asked[0].startswith(b"GET /cluster HTTP/1.1\r\n")


async def test_a_cluster_without_a_leader_says_so() -> None:
    async with scripted(answer(cluster(member("b", "replica"), member("s", "standby_leader")))) as server:
        assert (await Patroni([server.url]).cluster()).leader is None


async def test_who_does_not_answer_is_passed_over_and_who_did_is_asked_first_from_then_on() -> None:
    async with scripted(answer(b"down", "503 Service Unavailable")) as ill, scripted(GOOD) as well:
        asked = Patroni(["http://127.0.0.1:1", ill.url, well.url])
        for _ in range(2):
            assert (await asked.cluster()).leader == "10.0.0.11:5432"
    assert (len(ill.asked), len(well.asked)) == (1, 2)


async def test_where_nobody_answers_each_is_named_with_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patroni, "ANSWER_SECONDS_MAX", 0.2)
    async with scripted(b"") as silent, scripted(b"SSH-2.0-secret\r\n\r\n") as other:
        with pytest.raises(PatroniFailed) as failed:
            await Patroni([silent.url, other.url]).cluster()
    said = str(failed.value)
    assert "no answer within" in said
    assert "no HTTP" in said
    assert "secret" not in said


async def test_a_time_limit_holds_for_an_answer_that_never_ends(clock: MockClock) -> None:
    class Dripping(trio.abc.Stream):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            await trio.lowlevel.checkpoint()

        async def wait_send_all_might_not_block(self) -> None: ...

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            await trio.sleep(1)  # noqa: TID251 - on a clock that jumps
            return b"x"

        async def aclose(self) -> None:
            await trio.lowlevel.checkpoint()

    async def connect(host: str, port: int) -> Dripping:
        return Dripping()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio, "open_tcp_stream", connect)
        with pytest.raises(PatroniFailed, match="no answer within"):
            await Patroni(["http://db:8008"]).cluster()
    assert trio.current_time() < 3


HOSTILE: dict[str, bytes] = {
    "nothing": b"\0",
    "an end in the middle": answer(cluster(LEADER))[:-5],
    "too long": answer(b" " * (BODY_BYTES_MAX + 1)),
    "too long in pieces": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                           + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 9),
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000,
    "another status": answer(cluster(LEADER), "401 Unauthorized"),
    "a redirection": answer(b"", "302 Found", "Location: http://elsewhere/\r\n"),
    "no JSON": answer(b"<html>"),
    "JSON in depth": answer(b"[" * 100_000),
    "a list": answer(b"[1]"),
    "no members": answer(b"{}"),
    "members that are none": answer(cluster().replace(b"[]", b'"x"')),
    "two leaders": answer(cluster(LEADER, LEADER)),
    "no host": answer(cluster(member("a", "leader", None))),
    "a host with a command": answer(cluster(member("a", "leader", "db; rm -rf /"))),
    "a host with a line": answer(cluster(member("a", "leader", "db\nx"))),
    "a long host": answer(cluster(member("a", "leader", "d" * 300))),
    "no port": answer(cluster(member("a", "leader", "db", None))),
    "a port that is true": answer(cluster(member("a", "leader", "db", True))),
    "a port beyond": answer(cluster(member("a", "leader", "db", 1 << 16))),
    "a port of text": answer(cluster(member("a", "leader", "db", "5432"))),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_what_is_no_answer_is_none(case: str) -> None:
    async with scripted(HOSTILE[case]) as server:
        with pytest.raises(PatroniFailed) as failed:
            await Patroni([server.url]).cluster()
    assert len(str(failed.value)) < 200


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["members", "role", "host", "port"]), inner), max_leaves=10).map(
            lambda value: json.dumps(value).encode()))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    try:
        found = leader_in(body)
    except ValueError:
        return
    assert found is None or ":" in found


@pytest.mark.parametrize(("host", "address"), [
    ("db-2.example", "db-2.example:5432"), ("10.0.0.12", "10.0.0.12:5432"), ("fd00::12", "[fd00::12]:5432")])
def test_an_address_is_written_as_the_configuration_writes_it(host: str, address: str) -> None:
    assert leader_in(cluster(member("a", "leader", host))) == address


@pytest.mark.parametrize("url", [
    "ftp://db", "db:8008", "http://", "http://user:word@db:8008", "http://db/x", "http://db?x", "http://db:99999"])
def test_a_url_of_another_form_is_refused_without_its_login(url: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - that it is one, and what it does not say
        Member.parse(url)
    assert "word" not in str(refused.value)


def test_a_url_without_a_port_means_patronis_own() -> None:
    assert Member.parse("http://db") == Member("db", 8008, is_tls=False)
    assert Member.parse("https://db:8009/") == Member("db", 8009, is_tls=True)
