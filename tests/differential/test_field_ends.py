"""Faults that were reported about poolers: logins, cancels, limits, and connections that end."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pooler.demo.client import (
    FLUSH,
    SYNC,
    TERMINATE,
    Message,
    cancel_request,
    message,
    parse,
    query,
)
from pooler.demo.etcd import Etcd
from pooler.demo.process import free_ports
from tests.differential.conftest import Rig
from tests.differential.field import fresh_session, heard_until_end, login
from tests.differential.scripts import group
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.relays import Cut, Relay, RunRelay, as_sent
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


@pytest.fixture(scope="module")
def server_leg(run_relay: RunRelay, postgres_newest: Database) -> Relay:
    """Between the fleet and the server."""
    return run_relay(postgres_newest.port)


@pytest.fixture(scope="module")
def relayed(
    make_shared_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, server_leg: Relay
) -> RunningFleet:
    """One worker with one session, at the server through the relay."""
    more = {"pool": {"default_pool_size": 1, "query_wait_timeout": "8s"}}
    return make_shared_fleet(
        postgres_newest, etcd, permits=3, workers=1, hosts=(f"127.0.0.1:{server_leg.port}",), more=more)


@pytest.fixture
def clean_leg(server_leg: Relay) -> Iterator[Relay]:
    """The relay does nothing of its own before and after."""
    yield server_leg
    server_leg.answers, server_leg.piece_bytes = None, 0


def test_bytes_one_by_one_on_both_legs_change_nothing(
    relayed: RunningFleet, clean_leg: Relay, run_relay: RunRelay
) -> None:
    """R01."""
    asked = [query("select 1"), parse("select $1::text", "s") + group("select 2") + SYNC]
    transcripts = []
    fresh_session(relayed)
    with login(relayed) as first:  # logins are answered with what the last session to log in was told
        first.query("select 1")
    for piece in (0, 1):
        fresh_session(relayed)
        clean_leg.piece_bytes = piece
        client = login(relayed, run_relay(relayed.port, piece_bytes=piece).port)
        heard = []
        for sent in asked:
            client.send(sent)
            heard += client.until_ready()
        client.send(TERMINATE)
        heard += heard_until_end(client)
        transcripts.append([dict(client.session.parameters), heard])
        client.close()
    assert transcripts[0] == transcripts[1]


NOTICE = message(b"N", b"SNOTICE\0VNOTICE\0C00000\0Mgood morning\0\0")
STATUS = message(b"S", b"odd_parameter\0odd\0")


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_notice_in_a_login_is_no_failure(relayed: RunningFleet, clean_leg: Relay, where: str) -> None:
    """R23."""
    met = threading.Event()

    def answers(said: Message) -> bytes:
        if said.type == "R" and said.body == bytes(4):
            met.set()
            return NOTICE + STATUS + as_sent(said) if where == "before" else as_sent(said) + NOTICE + STATUS
        return as_sent(said)

    clean_leg.answers = answers
    fresh_session(relayed)
    with login(relayed) as client:
        client.send(query("select 1"))
        assert [said.type for said in client.until_ready()] == ["T", "D", "C", "Z"]
    assert met.is_set()


def table(fleet: RunningFleet) -> str:
    name = f"t_{secrets.token_hex(4)}"
    with login(fleet) as client:
        client.query(f"create table {name} (a int)")
    return name


@pytest.mark.parametrize("then", ["insert into {t} values (2)", "commit"])
def test_nothing_of_a_transaction_is_repeated_on_another_session(
    relayed: RunningFleet, clean_leg: Relay, then: str
) -> None:
    """R56. The connection breaks inside a transaction."""
    name = table(relayed)
    with login(relayed) as client:
        client.query("begin")
        client.query(f"insert into {name} values (1)")
        clean_leg.cut()
        with suppress(OSError):
            client.send(query(then.format(t=name)))
        heard = heard_until_end(client)
        assert [said.error().sqlstate for said in heard if said.type == "E"] in (["08006"], ["57P01"])
        assert "C" not in [said.type for said in heard]
    with login(relayed) as client:
        assert client.query(f"table {name}") == []


def test_a_commit_whose_answer_is_lost_is_not_said_to_have_worked(
    relayed: RunningFleet, clean_leg: Relay
) -> None:
    """R56. What became of it is not known, and nothing is repeated."""
    name = table(relayed)

    def answers(said: Message) -> bytes:
        if said.type == "C" and said.body == b"COMMIT\0":
            raise Cut
        return as_sent(said)

    with login(relayed) as client:
        fresh_session(relayed)
        clean_leg.answers = answers
        client.query("begin")
        client.query(f"insert into {name} values (1)")
        client.send(query("commit"))
        said = client.receive()
        assert said.error().sqlstate in ("08007", "08006")
        clean_leg.answers = None
    with login(relayed) as client:
        assert client.query(f"table {name}") == [["1"]]


def test_the_reason_of_the_server_is_told_once_also_in_the_middle_of_a_query(newest: Rig) -> None:
    """R38."""
    for pool in ("_one", "_session"):
        with newest.pooled(pool) as client, newest.superuser() as owner:
            ((pid,),) = client.query("begin; select pg_backend_pid()")
            client.send(query("select pg_sleep(60)"))
            active = f"select count(*) from pg_stat_activity where pid = {pid} and query like '%sleep%'"
            wait_until(lambda: owner.query(active) == [["1"]], "it runs", 10)  # noqa: B023
            owner.query(f"select pg_terminate_backend({pid})")
            told = [said.error().fields for said in heard_until_end(client) if said.type == "E"]
            assert [(each["S"], each["C"]) for each in told] == [("FATAL", "57P01")]


@pytest.mark.parametrize("limit", ["idle_in_transaction_session_timeout", "idle_session_timeout"])
def test_the_servers_own_idle_limit_is_told_to_whom_it_concerns(newest: Rig, limit: str) -> None:
    """R50."""
    transaction = limit.startswith("idle_in")
    with newest.pooled("_session") as client, newest.pooled("_one") as other:
        client.query(f"set {limit} = 200")
        if transaction:
            client.query("begin")
        told = [said.error() for said in heard_until_end(client) if said.type == "E"]
        assert [each.sqlstate for each in told] == ["25P03" if transaction else "57P05"]
        assert other.query("select 1") == [["1"]]


def test_sessions_that_died_while_idle_are_nobodys_error(newest: Rig) -> None:
    """R57."""
    for _ in range(5):
        with newest.pooled("") as one, newest.pooled("") as two, newest.superuser() as owner:
            one.query("begin")
            two.query("select 1")
            one.query("commit")
            owner.query(
                f"select pg_terminate_backend(pid) from pg_stat_activity where usename = "
                f"'{newest.database.user}' and state = 'idle'")
            wait_until(
                lambda owner=owner: owner.query(  # type: ignore[misc]
                    f"select count(*) from pg_stat_activity where usename = '{newest.database.user}'"
                ) == [["0"]], "they are gone", 10)
            for client in (one, two):
                assert client.query("select 2") == [["2"]]


LEAVING = {
    "half a query, then a reset": (query("insert into {t} values (2); commit  ")[:20], True),
    "a group without its Sync": (group("insert into {t} values (2)")[:-10], False),
    "a Terminate": (TERMINATE, False),
    "a Terminate behind a group": (group("insert into {t} values (2)") + TERMINATE, False),
    "a reset": (b"", True),
}


@pytest.mark.parametrize("name", LEAVING)
def test_a_client_that_leaves_in_a_transaction_leaves_nothing(newest: Rig, name: str) -> None:
    """R46."""
    with newest.straight() as owner:
        owner.query("set client_min_messages = error")
        owner.query("create table if not exists r46 (a int)")
        owner.query("truncate r46")
    client = newest.pooled("_one")
    client.query("begin")
    client.query("insert into r46 values (1)")
    said, reset = LEAVING[name]
    client.send(said.replace(b"{t}", b"r46"))
    if reset:
        client.abort()
    else:
        client.socket.shutdown(socket.SHUT_WR)
    with newest.pooled("_one") as other:
        assert other.query("table r46") == []
        assert other.query("select count(*) from pg_locks where relation = 'r46'::regclass "
                           "and mode like 'Row%'") == [["0"]]
    client.socket.close()


LEFT = {
    "a temporary table": ("create temp table left_over (a int)",
                          "select count(*) from pg_class where relname = 'left_over'"),
    "a held cursor": ("begin; declare c cursor with hold for select 1; commit",
                      "select count(*) from pg_cursors where is_holdable"),
    "a listener": ("listen ch", "select count(*) from pg_listening_channels()"),
    "a prepared statement": ("prepare q as select 1", "select count(*) from pg_prepared_statements"),
    "a lock": ("select pg_advisory_lock(49)", "select count(*) from pg_locks where locktype = 'advisory'"),
    "a setting": ("set work_mem = '9MB'", "select count(*) from pg_settings where name = 'work_mem' "
                  "and setting <> reset_val"),
}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("name", LEFT)
def test_session_pooling_leaves_nothing_to_the_next_client(newest: Rig, name: str, reset: bool) -> None:
    """R49."""
    leave, look = LEFT[name]
    client = newest.pooled("_session")
    client.query(leave)
    client.abort() if reset else client.close()
    wait_until(lambda: not _session_is_busy(newest), "its session is free again", 10)
    others = [newest.pooled("_session") for _ in range(3)]
    for other in others:
        assert other.query(look) == [["0"]]
        other.close()


def _session_is_busy(rig: Rig) -> bool:
    with rig.superuser() as owner:
        busy = (f"select count(*) from pg_stat_activity where usename = '{rig.database.user}' and "
                "state <> 'idle'")
        return owner.query(busy) != [["0"]]


# ---- cancels


def running(rig: Rig, text: str) -> bool:
    with rig.superuser() as owner:
        return owner.query(f"select count(*) from pg_stat_activity where query like '{text}%' "
                           "and state = 'active'") == [["1"]]


CANCELS = {
    "alone": (b"", False), "with a Terminate behind": (TERMINATE, False),
    "with noise behind": (b"x" * 1024, False), "closed at once": (b"", True),
}


@pytest.mark.parametrize("name", CANCELS)
def test_a_cancel_works_in_every_form(newest: Rig, name: str) -> None:
    """R22. And it is not answered."""
    behind, at_once = CANCELS[name]
    with newest.pooled("_one") as client:
        client.send(query("select pg_sleep(61)"))
        wait_until(lambda: running(newest, "select pg_sleep(61)"), "it runs", 10)
        with socket.create_connection(("127.0.0.1", newest.fleet.ports.listen), 10) as sock:
            sock.sendall(cancel_request(client.session.pid, client.session.key) + behind)
            if not at_once:
                with suppress(ConnectionResetError):
                    assert sock.recv(100) == b""
        assert client.until_ready()[-2].error().sqlstate == "57014"
        assert client.query("select 1") == [["1"]]


def test_a_cancel_with_a_wrong_or_an_old_key_does_nothing(newest: Rig) -> None:
    """R22, R20."""
    gone = newest.pooled("_one")
    gone.query("select 1")
    gone.close()
    with newest.pooled("_one") as client:
        client.send(query("select 'done' from pg_sleep(0.7)"))
        wait_until(lambda: running(newest, "select ''done'' from"), "it runs", 10)
        wrong = bytes([client.session.key[0] ^ 1, *client.session.key[1:]])
        for pid, key in ((client.session.pid, wrong), (gone.session.pid, gone.session.key), (0, b"\0" * 4)):
            with socket.create_connection(("127.0.0.1", newest.fleet.ports.listen), 10) as sock:
                sock.sendall(cancel_request(pid, key))
                with suppress(ConnectionResetError):
                    assert sock.recv(100) == b""
        assert [said.type for said in client.until_ready()] == ["T", "D", "C", "Z"]


def test_cancels_that_cannot_reach_the_server_cost_no_session_and_no_permit(
    relayed: RunningFleet, clean_leg: Relay
) -> None:
    """R66."""
    with login(relayed) as client:
        for _ in range(3):
            client.send(query("select 'done' from pg_sleep(0.5)"))
            port, clean_leg.target = clean_leg.target, free_ports()
            for _ in range(30):
                with socket.create_connection(("127.0.0.1", relayed.port), 10) as sock:
                    sock.sendall(cancel_request(client.session.pid, client.session.key))
                    with suppress(ConnectionResetError):
                        sock.recv(1)
            clean_leg.target = port
            assert client.until_ready()[-1].type == "Z"
            assert client.query("select 1") == [["1"]]
    assert relayed.fleet.command("ledger", "audit", relayed.database.dbname).returncode == 0


@pytest.mark.parametrize("extended", [False, True])
def test_a_cancel_of_a_waiting_client_ends_its_wait(newest: Rig, extended: bool) -> None:
    """R21. Its statement never runs, and it stays connected."""
    with newest.pooled("_one") as holder, newest.pooled("_one") as waiter:
        holder.query("begin")
        text = "create table r21 (a int)"
        waiter.send(group(text) + SYNC if extended else query(text))
        with socket.create_connection(("127.0.0.1", newest.fleet.ports.listen), 10) as sock:
            sock.sendall(cancel_request(waiter.session.pid, waiter.session.key))
            with suppress(ConnectionResetError):
                sock.recv(1)
        said = waiter.until_ready()
        assert [each.type for each in said] == ["E", "Z"]
        assert said[0].error().sqlstate == "57014"
        holder.query("commit")
        assert waiter.query("select count(*) from pg_class where relname = 'r21'") == [["0"]]


# ---- limits


def test_a_group_that_a_query_ends_leaves_nothing_to_the_next_client(rig: Rig) -> None:
    """PostgreSQL 18 answers the first command behind such a group and its Sync with XX000: no stranger's."""
    with rig.pooled("_one") as one, rig.pooled("_one") as two:
        one.send(group("select 1") + FLUSH)
        while one.receive().type != "C":
            pass
        one.send(query("select 2") + SYNC)
        assert one.until_ready()
        assert one.until_ready()[-1].type == "Z"
        two.send(parse("select 3") + SYNC)
        assert [said.type for said in two.until_ready()] == ["1", "Z"]
