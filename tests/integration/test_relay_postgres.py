"""The relay in front of real PostgreSQL: what a client hears is what it hears without it, and nothing of one
client reaches another."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from pooler.demo.client import (
    FLUSH,
    SYNC,
    TERMINATE,
    Disconnected,
    Message,
    RawClient,
    ServerSaid,
    bind,
    cancel_request,
    close,
    describe,
    execute,
    message,
    parse,
    query,
)
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

GROUP = parse("select 1") + bind() + describe() + execute()
COPY_DONE = message(b"c")
TABLE = "create table if not exists u (a int primary key)"


def data(text: str) -> bytes:
    """A CopyData."""
    return message(b"d", text.encode())


def group(text: str, name: str = "", *values: str) -> bytes:
    return parse(text, name) + bind(values, name) + execute()


PI = message(b"F", (1610).to_bytes(4, "big") + b"\0\0\0\0\0\0")

# Each step waits for one ReadyForQuery per Query, FunctionCall or Sync in it, or (a tuple) for a type.
Step = bytes | tuple[bytes, str]
SCRIPTS: dict[str, list[Step]] = {
    "simple": [query("select 1"), query("select 'two'"), query("")],
    "several statements": [query("select 1; select 2; insert into u values (1); delete from u")],
    "several with an error": [query("insert into u values (1); select 1/0; select 2"), query("table u")],
    "transaction": [query("begin"), query("insert into u values (1)"), query("rollback"), query("table u")],
    "failed transaction": [query("begin"), query("select 1/0"), query("select 2"), query("commit")],
    "savepoint": [query("begin; savepoint s"), query("select 1/0"), query("rollback to s"), query("commit")],
    "notice": [query("do $$ begin raise notice 'hello'; end $$")],
    "long error": [query("do $$ begin raise exception '%', repeat('x', 3000000); end $$")],
    "fetch": [query("begin"), query("declare c cursor for select generate_series(1, 5)"),
              query("fetch 2 from c"), query("fetch all from c"), query("commit")],
    "pipelined queries": [query("select 1") + query("begin") + query("select 2") + query("commit")],
    "extended": [GROUP + SYNC],
    "groups": [(GROUP + SYNC) * 3],
    "a group undone by its error": [
        group("insert into u values (1)") + group("insert into u values (1)") + SYNC, query("table u")],
    "an error and the next group": [
        group("select 1/0") + group("select 2") + SYNC + group("select 3") + SYNC],
    "an error skips a query": [parse("bad") + query("select 1") + SYNC],
    "query then group": [query("set statement_timeout = 30000") + GROUP + SYNC],
    "group then query": [GROUP + query("select 2")],
    "flush": [(parse("select generate_series(1, 5)") + describe("S") + FLUSH, "T"),
              (bind((), "", "cur") + describe("P", "cur") + FLUSH, "T"), (execute("cur", 2) + FLUSH, "s"),
              (execute("cur", 2) + FLUSH, "s"), execute("cur") + SYNC],
    "begin by the extended protocol": [
        parse("begin", "b") + describe("S", "b") + bind((), "b") + describe() + execute() + SYNC,
        group("insert into u values (1)") + SYNC, group("rollback") + SYNC],
    "sync alone": [SYNC, SYNC + SYNC],
    "named": [parse("select $1::int", "s") + SYNC, bind(["5"], "s") + execute() + SYNC,
              describe("S", "s") + SYNC, close("S", "s") + SYNC, bind(["5"], "s") + SYNC],
    "missing names": [close("S", "nope") + close("P", "nope") + SYNC,
                      describe("S", "nope") + parse("select 1") + SYNC, bind((), "nope") + SYNC,
                      query("select 1")],
    "a failed parse": [parse("selec", "s") + SYNC, bind((), "s") + SYNC, parse("select 1", "s") + SYNC,
                       bind((), "s") + execute() + SYNC],
    "a closed name again": [parse("select 1", "s") + SYNC, close("S", "s") + parse("select 2", "s") + SYNC,
                            bind((), "s") + execute() + SYNC],
    "a skipped close": [parse("select 1", "s") + SYNC, bind((), "nope") + close("S", "s") + SYNC,
                        bind((), "s") + execute() + SYNC],
    "a portal named as the statement": [
        parse("select 3", "n") + SYNC, bind((), "n", "n") + close("P", "n") + SYNC,
        bind((), "n") + execute() + SYNC],
    "the unnamed statement": [parse("select $1::int") + SYNC, bind(["1"]) + execute() + SYNC,
                              bind(["2"]) + execute() + SYNC, query("select 1"), bind(["3"]) + SYNC],
    "null and empty": [parse("select $1::text is null, $2::text") + bind([None, ""]) + execute() + SYNC],
    "a function call": [PI, query("begin"), PI, query("commit")],
    "copy in": [(query("copy u from stdin"), "G"), data("1\n") + data("2\n") + COPY_DONE, query("table u"),
                query("delete from u")],
    "copy in pieces": [(query("copy u from stdin"), "G"), data("1") + data("1\n2") + data("\n") + COPY_DONE,
                       query("table u"), query("delete from u")],
    "copy at once": [query("copy u from stdin") + data("1\n") + COPY_DONE, query("delete from u")],
    "copy fails": [(query("copy u from stdin"), "G"), data("1\n") + message(b"f", b"no\0"), query("table u")],
    "copy of a bad row": [
        (query("copy u from stdin"), "G"), data("x\n") + data("1\n") + COPY_DONE, query("table u")],
    "copy, extended": [(parse("copy u from stdin") + bind() + execute() + SYNC, "G"),
                       data("1\n") + COPY_DONE + SYNC, query("delete from u")],
    "copy with syncs and flushes": [
        (parse("copy u from stdin") + bind() + execute() + SYNC, "G"),
        (data("1\n") + SYNC + FLUSH + data("2\n") + COPY_DONE + SYNC, "Z"), query("delete from u")],
    "copy aborted by a pipeline": [
        (parse("copy u from stdin") + bind() + execute() + SYNC + GROUP + SYNC + GROUP + SYNC, "D"), SYNC],
    "copy out": [query("copy (select generate_series(1, 9)) to stdout"),
                 parse("copy (select 1) to stdout") + bind() + execute() + SYNC],
    "big answers": [query("select repeat('x', 3000000)"),
                    query("select repeat('y', 2000) from generate_series(1, 2000)")],
    "big query": [query("select length('" + "x" * 2_000_000 + "')")],
    "big bind": [parse("select length($1)") + bind(["y" * 20_000_000]) + execute() + SYNC],
    "big parse": [parse("select 1 -- " + "z" * 1_000_000) + bind() + execute() + SYNC],
    "parameter status": [query("set application_name = 'mine'"), query("show application_name"),
                         query("set datestyle = 'german'; select 1"), query("show datestyle")],
    "deallocate all": [parse("select 1", "s") + SYNC, query("deallocate all"), bind((), "s") + SYNC],
    "a name in use": [parse("select 1", "s") + SYNC, parse("select 2", "s") + SYNC,
                      bind((), "s") + execute() + SYNC],
    "listen to oneself": [query("begin; listen ch; notify ch, 'x'; commit")],
    "stray copy": [data("1\n") + COPY_DONE + query("select 1")],
    "unknown type": [(message(b"m"), "E")],
    "terminate": [query("select 1") , (TERMINATE, "")],
    "killed by itself": [query("begin"), (query("select pg_terminate_backend(pg_backend_pid())"), "E")],
}
# where the pooler says something else than the server on purpose: compared by type and SQLSTATE only
OWN_WORDS = {"a name in use", "unknown type"}


def readies(sent: bytes) -> int:
    """How many ReadyForQuery this step ends with."""
    count = at = 0
    while at < len(sent):
        count += sent[at : at + 1] in (b"Q", b"F", b"S")
        at += 1 + int.from_bytes(sent[at + 1 : at + 5], "big")
    return count


def run(client: RawClient, steps: list[Step]) -> list[Message]:
    """All that the client hears."""
    heard: list[Message] = []
    with suppress(Disconnected, ConnectionResetError):
        for step in steps:
            sent, until = step if isinstance(step, tuple) else (step, "Z")
            left = 1 if isinstance(step, tuple) else readies(step) or 1  # the end of a COPY
            client.send(sent)
            if not until:
                client.receive()
            left = min(left, 1) if sent.startswith(b"P") and b"bad\0" in sent else left
            while left:
                heard.append(client.receive())
                left -= heard[-1].type == until
        return heard
    return [*heard, Message("end", b"")]


def shown(heard: list[Message], *, own_words: bool) -> list[tuple[str, object]]:
    """Comparable: errors without the place in the server's source, pids out of notifications."""
    found: list[tuple[str, object]] = []
    for said in heard:
        if said.type in "EN":
            fields = said.error().fields
            names = "SVC" if own_words else "SVCMDHP"
            found.append((said.type, {name: fields.get(name) for name in names}))
        elif said.type == "A":
            found.append(("A", said.body[4:]))
        else:
            found.append((said.type, said.body))
    return found


@pytest.fixture
def fleet(make_fleet: MakeFleet, postgres: Database, etcd: Etcd) -> RunningFleet:
    """One worker with few sessions."""
    return make_fleet(postgres, etcd, permits=3, workers=1, more={"pool": {"default_pool_size": 2}})


def straight(database: Database) -> RawClient:
    return RawClient("127.0.0.1", database.port, 30).login(database.user, database.password, database.dbname)


def pooled(fleet: RunningFleet) -> RawClient:
    base = fleet.database
    return RawClient("127.0.0.1", fleet.port, 30).login(base.user, base.password, base.dbname)


def test_every_script_is_answered_as_by_the_server_itself(fleet: RunningFleet) -> None:
    with straight(fleet.database) as setup:
        setup.query(TABLE)
    wrong = {}
    for name, steps in SCRIPTS.items():
        with straight(fleet.database) as client:
            expected = shown(run(client, steps), own_words=name in OWN_WORDS)
        with pooled(fleet) as client:
            heard = shown(run(client, steps), own_words=name in OWN_WORDS)
        if heard != expected:
            pairs = enumerate(zip(heard, expected, strict=False))
            at = next((n for n, (ours, theirs) in pairs if ours != theirs), -1)
            wrong[name] = (str(heard[at : at + 3])[:300], str(expected[at : at + 3])[:300])
        with pooled(fleet) as client:
            assert client.query("select 2") == [["2"]], name
    assert wrong == {}


def test_the_greeting_tells_what_the_server_tells(fleet: RunningFleet) -> None:
    with straight(fleet.database) as direct, pooled(fleet) as client:
        told = dict(direct.session.parameters)
        assert client.session.parameters == told


def only_session(make_fleet: MakeFleet, postgres: Database, etcd: Etcd) -> RunningFleet:
    return make_fleet(postgres, etcd, permits=3, workers=1, more={"pool": {"default_pool_size": 1}})


LEAVINGS = {
    "a setting": ("set work_mem = '9MB'", "show work_mem", "4MB"),
    "a setting by function": ("select set_config('work_mem', '9MB', false)", "show work_mem", "4MB"),
    "a setting of a tenant": (
        "select set_config('app.tenant', 't1', false)",
        "select coalesce(current_setting('app.tenant', true), '')", ""),
    "a search path": ("set search_path = pg_catalog", "show search_path", '"$user", public'),
    "a temporary table": (
        "create temp table t1 (a int)", "select count(*) from pg_class where relname = 't1'", "0"),
    "an advisory lock": (
        "select pg_advisory_lock(77)", "select count(*) from pg_locks where locktype = 'advisory'", "0"),
    "an advisory lock in a long text": (
        "select pg_advisory_lock(77) /* " + "x" * 300_000 + " */",
        "select count(*) from pg_locks where locktype = 'advisory'", "0"),
    "a listener": ("listen ch", "select count(*) from pg_listening_channels()", "0"),
    "a held cursor": (
        "begin; declare c cursor with hold for select 1; commit", "select count(*) from pg_cursors", "0"),
    "a prepared statement": ("prepare q as select 1", "select count(*) from pg_prepared_statements", "0"),
    "what a block of code leaves": (
        "do $$ begin perform set_config('work_mem', '9MB', false); end $$", "show work_mem", "4MB"),
    "a role": ("set role pg_monitor", "select current_user = session_user", "t"),
}


def test_nothing_a_client_leaves_is_found_by_the_next(
    make_fleet: MakeFleet, postgres: Database, etcd: Etcd
) -> None:
    fleet = only_session(make_fleet, postgres, etcd)
    found = {}
    for name, (leave, look, expected) in LEAVINGS.items():
        with pooled(fleet) as one, pooled(fleet) as two:
            with suppress(ServerSaid):  # a role that one may not take
                one.query(leave)
            said = two.query(look)
            if said != [[expected]]:
                found[name] = said
    assert found == {}


def send_cancel(port: int, pid: int, key: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(cancel_request(pid, key))
        with suppress(OSError):
            sock.recv(1)


def test_a_cancel_stops_the_query_it_is_aimed_at(fleet: RunningFleet) -> None:
    with pooled(fleet) as client:
        client.send(query("select pg_sleep(60)"))
        with straight(fleet.database) as look:
            running = "select count(*) from pg_stat_activity where query like 'select pg_sleep%'"
            while look.query(running) == [["0"]]:
                pass
        send_cancel(fleet.port, client.session.pid, client.session.key)
        assert [said.type for said in client.until_ready()][-2:] == ["E", "Z"]
        assert client.query("select 1") == [["1"]]


def test_300_late_cancels_never_hit_the_next_client(
    make_fleet: MakeFleet, postgres: Database, etcd: Etcd
) -> None:
    """One session, handed from the cancelled client to another one that runs at once."""
    fleet = only_session(make_fleet, postgres, etcd)
    hits = 0
    with pooled(fleet) as one, pooled(fleet) as two, ThreadPoolExecutor(4) as threads:
        cancel = partial(send_cancel, fleet.port, one.session.pid, one.session.key)
        for _ in range(300):
            one.send(query("select pg_sleep(0.002)"))
            two.send(query("select pg_sleep(0.004)"))
            late = [threads.submit(cancel) for _ in range(2)]
            one.until_ready()
            hits += any(said.type == "E" for said in two.until_ready())
            for each in late:
                each.result()
    assert hits == 0


def test_a_cancel_of_a_waiting_client_ends_its_wait_and_its_statement_never_runs(
    make_fleet: MakeFleet, postgres: Database, etcd: Etcd
) -> None:
    fleet = only_session(make_fleet, postgres, etcd)
    with straight(fleet.database) as setup:
        setup.query(TABLE)
    with pooled(fleet) as one, pooled(fleet) as two:
        one.query("begin")
        two.send(query("insert into u values (4711)"))
        send_cancel(fleet.port, two.session.pid, two.session.key)
        (said, _) = two.until_ready()
        assert said.error().sqlstate == "57014"
        one.query("commit")
        assert two.query("select * from u where a = 4711") == []


@pytest.mark.parametrize(
    "leave", ["half a query", "reset in a transaction", "terminate in a transaction", "no sync"])
def test_a_client_that_leaves_commits_nothing_and_holds_nothing(
    leave: str, make_fleet: MakeFleet, postgres: Database, etcd: Etcd
) -> None:
    fleet = only_session(make_fleet, postgres, etcd)
    with straight(fleet.database) as setup:
        setup.query(TABLE)
        setup.query("delete from u")
    client = pooled(fleet)
    if leave == "no sync":
        client.send(group("insert into u values (1)") + FLUSH)
        while client.receive().type != "C":
            pass
    else:
        client.query("begin")
        client.query("insert into u values (1)")
        if leave == "half a query":
            client.send(query("commit; select 12345678")[:12])
    if leave == "terminate in a transaction":
        client.close()
    else:
        client.abort()
    with pooled(fleet) as other:
        assert other.query("table u") == []
        locks = "select count(*) from pg_locks where relation = 'u'::regclass and mode like 'Row%'"
        assert other.query(locks) == [["0"]]


def test_the_last_word_of_a_server_that_ends_a_transaction_is_passed_on_alone(fleet: RunningFleet) -> None:
    with pooled(fleet) as client, straight(fleet.database) as killer:
        client.query("begin")
        ((pid,),) = client.query("select pg_backend_pid()")
        killer.query(f"select pg_terminate_backend({pid})")
        heard = []
        with suppress(Disconnected, ConnectionResetError):
            while True:
                heard.append(client.receive())
    assert [said.error().sqlstate for said in heard] == ["57P01"]
    with pooled(fleet) as client:
        assert client.query("select 1") == [["1"]]


def test_sessions_that_die_while_idle_are_nobodys_error(fleet: RunningFleet) -> None:
    with pooled(fleet) as client, straight(fleet.database) as killer:
        client.query("select 1")
        theirs = "from pg_stat_activity where usename = current_user and pid <> pg_backend_pid()"
        assert killer.query(f"select pg_terminate_backend(pid) {theirs}")
        wait_until(lambda: not killer.query(f"select pid {theirs}"), "they are gone", 10)
        assert client.query("select 2") == [["2"]]
