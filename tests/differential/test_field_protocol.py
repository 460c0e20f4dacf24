"""Faults that were reported about poolers: framing, the extended protocol, prepared statements, COPY.

The numbers are those of docs/compatibility.md's list of field reports.
"""

from __future__ import annotations

import secrets
import struct
from contextlib import suppress
from pathlib import Path
from select import select

import pytest

from pooler.demo.client import (
    FLUSH,
    SYNC,
    Disconnected,
    RawClient,
    bind,
    close,
    describe,
    execute,
    message,
    parse,
    query,
)
from tests.differential.compare import same
from tests.differential.conftest import Rig
from tests.differential.script import Write
from tests.differential.scripts import (
    BINARY_COPY,
    COPY,
    COPY_DONE,
    EXTENDED,
    GROUP,
    PI,
    PREPARED,
    TWO,
    bind_raw,
    data,
    group,
    run,
)

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


def worker_rss_kib(rig: Rig) -> int:
    """Resident memory of the only worker."""
    (pid,) = rig.fleet.worker_pids().values()
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in each)
    return int(line.split()[1])


BAD_MESSAGES = {
    "a negative length": b"Q" + struct.pack("!i", -1),
    "a length below its own": b"Q" + struct.pack("!i", 3),
    "more than a gigabyte": b"Q" + struct.pack("!i", 0x4000_0001) + b"x" * 100,
    "a long Sync": b"S" + struct.pack("!i", 70_000),
    "an unknown type": message(b"m"),
    "noise": b"\x01" + bytes(range(7, 70)),
}


@pytest.mark.parametrize("pool", ["_one", "_session"])
@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_bad_length_or_type_ends_that_client_alone(newest: Rig, name: str, pool: str) -> None:
    """R02. And no memory in proportion to what a length claims."""
    before = worker_rss_kib(newest)
    with newest.pooled(pool) as client:
        client.send(BAD_MESSAGES[name])
        heard = []
        with suppress(Disconnected, ConnectionResetError):
            while True:
                heard.append(client.receive())
        assert [said.error().fields.get("S") for said in heard] in ([], ["FATAL"])
        if name == "an unknown type":
            assert heard[0].error().sqlstate == "08P01"
    with newest.pooled(pool) as client:
        assert client.query("select 1") == [["1"]]
    assert worker_rss_kib(newest) - before < 32_768


def test_a_portal_is_read_in_portions_and_nobody_has_its_session_meanwhile(rig: Rig) -> None:
    """R03."""
    same(rig, TWO["one reads in portions"])


LIBPQ = [query("begin"), parse("select $1::int", "p") + describe("S", "p") + SYNC, run("p", "1"),
         query("rollback")]


@pytest.mark.parametrize("steps", [
    EXTENDED["begin by the extended protocol"],
    [parse("begin", "b") + describe("S", "b") + FLUSH, bind((), "b") + describe() + execute() + SYNC,
     group("insert into u values (1)") + SYNC,
     parse("commit") + describe("S") + FLUSH, bind() + describe() + execute() + SYNC, query("delete from u")],
    LIBPQ,
])
def test_begin_and_commit_by_the_extended_protocol_answer_every_describe(
    rig: Rig, steps: list[bytes]
) -> None:
    """R04."""
    same(rig, steps)


def test_a_function_call_gets_a_session_like_any_other_request(rig: Rig) -> None:
    """R05. As the first message of all, and large objects in a transaction."""
    same(rig, [PI, query("begin"), PI, query("commit")])
    same(rig, EXTENDED["large objects"])


def test_groups_sent_at_once_are_answered_one_by_one_for_many_clients(newest: Rig) -> None:
    """R06. Twenty clients on two sessions."""
    asked = (group("select 1") + SYNC + group("select 'slept' from pg_sleep(0.05)") + SYNC
             + group("select 2") + SYNC)
    clients = [newest.pooled() for _ in range(20)]
    for client in clients:
        client.send(asked)
    for client in clients:
        heard = [client.until_ready() for _ in range(3)]
        assert [[said.type for said in each] for each in heard] == [["1", "2", "D", "C", "Z"]] * 3
        assert [each[2].body[6:] for each in heard] == [b"1", b"slept", b"2"]
        client.close()


def test_a_failed_pipeline_leaves_nothing(rig: Rig) -> None:
    """R07."""
    same(rig, [group("insert into u values (1)") + group("insert into u values (1)") + SYNC,
               query("select count(*) from u")])


def test_an_error_skips_to_its_sync_and_no_further(rig: Rig) -> None:
    """R08."""
    same(rig, [group("select 1/0") + group("select 2") + SYNC + group("select 3") + SYNC])


def test_a_query_and_a_group_in_one_write_are_both_answered(rig: Rig) -> None:
    """R09. And the SET holds for the group."""
    same(rig, [query("set statement_timeout = 30000") + group("show statement_timeout") + SYNC])


@pytest.mark.parametrize("pool", ["_one", ""])
def test_two_clients_may_use_one_name(rig: Rig, pool: str) -> None:
    """R10."""
    same(rig, [Write(parse("select 1", "s1") + SYNC, 0), Write(parse("select 2", "s1") + SYNC, 1),
               *[Write(run("s1"), n % 2) for n in range(100)]], pool)


FORGETTING = [query("deallocate all"), query("discard all"), group("deallocate all") + SYNC,
              group("discard all") + SYNC]


@pytest.mark.parametrize("forget", FORGETTING)
def test_a_client_that_forgets_all_statements_forgets_its_own(newest: Rig, forget: bytes) -> None:
    """R11."""
    with newest.pooled("_one") as one, newest.pooled("_one") as two:
        for client in (one, two):
            client.send(parse("select 5", "a") + SYNC)
            client.until_ready()
        two.send(forget)
        assert "E" not in [said.type for said in two.until_ready()]
        one.send(run("a"))
        assert [said.type for said in one.until_ready()] == ["2", "D", "C", "Z"]
        two.send(run("a"))
        assert two.until_ready()[0].error().sqlstate == "26000"


def test_deallocate_by_name_is_about_the_clients_own_name(rig: Rig) -> None:
    """R12."""
    same(rig, [parse("select 1", "pdo_1") + SYNC, query("deallocate pdo_1"), bind((), "pdo_1") + SYNC,
               parse("select 2", "pdo_1") + bind((), "pdo_1") + execute() + SYNC])


def test_execute_by_text_of_a_statement_of_the_protocol_is_refused_the_same_each_time(newest: Rig) -> None:
    """R12. A statement of the protocol has another name on the session."""
    with newest.pooled("_one") as client:
        client.send(parse("select 1", "pdo_1") + SYNC)
        client.until_ready()
        for _ in range(3):
            client.send(query("execute pdo_1"))
            assert client.until_ready()[0].error().sqlstate == "26000"
            client.send(run("pdo_1"))
            assert [said.type for said in client.until_ready()] == ["2", "D", "C", "Z"]


@pytest.mark.parametrize("steps", [
    PREPARED["a name in use"], PREPARED["missing names"],
    [describe("S", "nope") + parse("select 1") + SYNC, query("select 1")]])
def test_errors_about_names_are_the_servers(rig: Rig, steps: list[bytes]) -> None:
    """R13."""
    same(rig, steps)


def test_a_closed_portal_leaves_the_statement_of_its_name(rig: Rig) -> None:
    """R14."""
    same(rig, PREPARED["a portal named as the statement"])


@pytest.mark.parametrize("steps", [
    EXTENDED["null and empty"], EXTENDED["formats mixed"], EXTENDED["a thousand parameters"],
    EXTENDED["formats of results without parameters"],
    [parse("select $1::int8, $2::text", "s") + SYNC,
     bind_raw([1, 0], [struct.pack("!q", 5), b""], [1], "s") + execute() + SYNC,
     bind_raw([1, 0], [None, None], [], "s") + execute() + SYNC]])
def test_parameters_pass_as_they_are(rig: Rig, steps: list[bytes]) -> None:
    """R15."""
    same(rig, steps)


def test_a_describe_alone_finds_its_statement_on_another_session(rig: Rig) -> None:
    """R16."""
    same(rig, [
        Write(parse("select $1::int4", "d") + SYNC, 0), Write(query("begin"), 1),
        Write(describe("S", "d") + SYNC, 0), Write(close("S", "d") + SYNC, 0),
        Write(describe("S", "d") + SYNC, 0), Write(query("rollback"), 1)], "")


def test_syncs_and_flushes_in_copy_hold_no_session_and_no_memory(newest: Rig) -> None:
    """R17."""
    with newest.superuser() as owner, newest.pooled("_one") as one, newest.pooled("_one") as two:
        owner.query("create table if not exists r17 (a int); grant all on r17 to public")

        def round_() -> None:
            one.send(group("copy r17 from stdin"))
            one.send(FLUSH)
            while one.receive().type != "G":
                pass
            one.send(data("1\n") + SYNC + FLUSH + data("2\n") + COPY_DONE + SYNC)
            assert [said.type for said in one.until_ready()] == ["C", "Z"]
            assert two.query("select 1") == [["1"]]

        for _ in range(100):
            round_()
        before = worker_rss_kib(newest)
        for _ in range(700):
            round_()
        assert worker_rss_kib(newest) - before < 4_096
        assert owner.query("select count(*) from r17") == [["1600"]]
        owner.query("drop table r17")


def test_copy_in_keeps_its_session_while_others_ask(newest: Rig) -> None:
    """R18."""
    with newest.pooled("_one") as one, newest.pooled("_one") as two:
        one.query("create table if not exists r18 (a int)")
        one.send(query("copy r18 from stdin"))
        assert one.receive().type == "G"
        two.send(query("select count(*) from r18"))
        two.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            two.receive()
        two.socket.settimeout(10)
        one.send(data("1\n") + COPY_DONE)
        one.until_ready()
        assert [said.body[6:] for said in two.until_ready() if said.type == "D"] == [b"1"]
        one.query("drop table r18")


@pytest.mark.parametrize("steps", [
    [query("copy (select generate_series(1, 3)) to stdout"), group("copy (select 1) to stdout") + SYNC],
    COPY["copy in pieces"], COPY["copy in one big piece"], COPY["copy of a big row"], COPY["copy in binary"],
    [query("copy w from stdin"), data("y" * 20_000_000 + "\n") + COPY_DONE,
     query("select length(a) from w; truncate w")],
    [group("copy u from stdin (format binary)") + FLUSH, data(BINARY_COPY[:15]) + data(BINARY_COPY[15:])
     + COPY_DONE + SYNC, query("table u; delete from u")]])
def test_copy_in_both_directions_passes_unchanged(rig: Rig, steps: list[bytes]) -> None:
    """R19."""
    same(rig, steps)


def test_errors_cost_no_session(newest: Rig) -> None:
    """R40. Neither alone nor in a transaction."""
    for pool in ("_one", "_session"):
        with newest.pooled(pool) as client:
            pid = client.query("select pg_backend_pid()")
            for _ in range(200):
                client.send(query("select 1/0") + query("begin") + query("select 1/0") + query("rollback"))
                for _ in range(4):
                    client.until_ready()
            assert client.query("select pg_backend_pid()") == pid


def test_big_requests_and_answers_several_at_once(newest: Rig) -> None:
    """R41. 65,535 parameters, a 20 MB value, a 50 MB row, a 10 MB text, on connections side by side."""
    word = secrets.token_hex(1)
    most = (parse("select cardinality(array[" + ",".join(f"${n}::text" for n in range(1, 65_536)) + "])")
            + bind_raw([], [b"1"] * 65_535, []) + execute() + SYNC)
    asked = {
        most: b"65535",
        parse("select length($1)") + bind([word * 10_000_000]) + execute() + SYNC: b"20000000",
        query(f"select length('{word * 5_000_000}')"): b"10000000",
    }
    with newest.pooled() as first, newest.pooled() as second:
        for client in (first, second):
            for sent, expected in asked.items():
                client.send(sent)
                assert [said.body[6:] for said in client.until_ready() if said.type == "D"] == [expected]
        for client in (first, second):
            client.send(query("select repeat('z', 50000000)"))
        for client in (first, second):
            rows = [said for said in client.until_ready() if said.type == "D"]
            assert [len(said.body) for said in rows] == [50_000_006]


def test_a_client_in_step_is_served_after_group_and_query(newest: Rig) -> None:
    """R09, R13. What follows an error is served as if nothing had been."""
    with newest.pooled("_one") as client:
        for _ in range(50):
            client.send(parse("bad") + GROUP + SYNC + query("select 7"))
            assert [said.type for said in client.until_ready()] == ["E", "Z"]
            assert [said.type for said in client.until_ready()] == ["T", "D", "C", "Z"]


def test_half_a_request_holds_no_session(newest: Rig) -> None:
    """R43. And a small answer that nobody reads costs no session."""
    with newest.pooled("_one") as slow, newest.pooled("_one") as other:
        whole = parse("select 1 -- " + "x" * 30_000, "slow")
        slow.send(whole[:20_000])
        for _ in range(20):
            assert other.query("select 1") == [["1"]]
        slow.send(whole[20_000:] + SYNC)
        assert [said.type for said in slow.until_ready()] == ["1", "Z"]
        pid = other.query("select pg_backend_pid()")
        leaver: RawClient = newest.pooled("_one")
        leaver.send(query("select generate_series(1, 200)"))
        assert select([leaver.socket], [], [], 10)[0], "it is answered, and reads nothing of that"
        assert other.query("select pg_backend_pid()") == pid
        leaver.abort()
        assert other.query("select pg_backend_pid()") == pid


def test_a_parse_in_a_failed_block_is_refused_though_the_session_has_its_text(rig: Rig) -> None:
    known = parse("select 1", "a") + parse("rollback", "r") + SYNC
    again = [parse("select 1", "a") + SYNC, parse("rollback", "r") + SYNC, run("r"), run("a")]
    closed = close("S", "a") + close("S", "r") + SYNC
    same(rig, [known, closed, query("begin"), query("select 1/0"), *again])
