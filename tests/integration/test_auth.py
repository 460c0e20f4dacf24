"""Logins through a fleet that asks the server for secrets: real drivers, and what an outsider learns."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg import sql

from pooler.demo.client import Login, RawClient, ServerSaid, message, startup
from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Role
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.rawclient import OpenRaw

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

HBA = """
# who comes how
host      all        /^clear_   all     password
host      all        /^hashed_  all     md5
host      all        banned     all     reject
hostssl   all        all        all     scram-sha-256
host      all        all        samehost scram-sha-256
"""
LENGTHS = (1, 999, 1024, 4097, 16_000, 60_000)


@dataclass(frozen=True, slots=True)
class Place:
    """The fleet and how to make users at its server."""

    fleet: RunningFleet
    database: Database

    def user(self, prefix: str = "u", password: str = "right", encryption: str = "scram-sha-256") -> str:
        name = f"{prefix}_{secrets.token_hex(4)}"
        self.database.server.create_role(Role(name, password, encryption=encryption))
        self.execute("GRANT ALL ON DATABASE {} TO {}", self.database.dbname, name)
        return name

    def execute(self, text: Any, *names: str) -> None:
        self.database.server.execute(sql.SQL(text).format(*map(sql.Identifier, names)))

    def connect(self, user: str, password: str = "right", **more: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.fleet.dsn(user=user, password=password, **more), autocommit=True)

    def refusal(self, user: str, password: str = "right", **more: Any) -> str:
        with pytest.raises(psycopg.OperationalError) as refused:
            self.connect(user, password, **more)
        return str(refused.value)


@pytest.fixture(scope="module")
def place(make_shared_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> Place:
    """One worker; everybody but the console's users is asked for at the server."""
    asker = f"asker_{secrets.token_hex(4)}"
    postgres_newest.server.create_role(Role(asker, "asking"))
    postgres_newest.server.execute(sql.SQL("ALTER ROLE {} SUPERUSER").format(sql.Identifier(asker)))
    fleet = make_shared_fleet(postgres_newest, etcd, permits=30, workers=1, start=False, more={
        "pool": {"server_idle_timeout": "1s"},  # each test is another user: none waits for its sessions
        "auth": {"type": "hba", "hba_file": "hba.conf", "user": asker,
                 "password": "asking", "failed_login_delay_max": 0}})
    folder = fleet.config.parent
    (folder / "hba.conf").write_text(HBA)
    fleet.fleet.start()
    return Place(fleet, postgres_newest)


# R25


def test_a_new_password_works_at_the_first_try_and_the_old_one_no_more(place: Place) -> None:
    user = place.user()
    with place.connect(user) as running:
        assert running.execute("select current_user").fetchone() == (user,)
        running.execute("begin")
        running.execute("select 1")  # holds its session
        place.execute("ALTER ROLE {} PASSWORD 'new'", user)
        with place.connect(user, "new") as another:
            another.execute("begin")
            pid = another.execute("select pg_backend_pid()").fetchone()
            assert pid != running.execute("select pg_backend_pid()").fetchone()
        assert "password authentication failed" in place.refusal(user, "right")
        running.execute("commit")
        assert running.execute("select 1").fetchone() == (1,)


def test_a_user_made_or_dropped_a_moment_ago_counts_at_once(place: Place) -> None:
    user = f"u_{secrets.token_hex(4)}"
    assert "password authentication failed" in place.refusal(user)
    place.database.server.create_role(Role(user, "right"))
    with place.connect(user):
        pass
    place.execute("ALTER ROLE {} NOLOGIN", user)
    assert "password authentication failed" in place.refusal(user)


# R81


def test_a_password_that_has_expired_is_refused_as_by_the_server(place: Place) -> None:
    user = place.user()
    with place.connect(user):
        pass
    place.execute("ALTER ROLE {} VALID UNTIL '2020-01-01'", user)
    through = place.refusal(user)
    with pytest.raises(psycopg.OperationalError) as straight:
        psycopg.connect(place.database.server.dsn(user, place.database.dbname, password="right"))
    said = f'FATAL:  password authentication failed for user "{user}"'
    assert said in through
    assert said in str(straight.value)


# R24


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("prefix", ["u", "clear"])
def test_a_password_of_any_length_logs_in_and_a_wrong_one_as_long_does_not(
    place: Place, prefix: str, length: int
) -> None:
    password = "é" + "x" * (length - 2) if length > 2 else "x" * length
    user = place.user(prefix, password)
    with place.connect(user, password) as connection:
        assert connection.execute("select current_user").fetchone() == (user,)
    assert "password authentication failed" in place.refusal(user, password[:-1] + "y")
    assert "password authentication failed" in place.refusal(user, password + "x")


# Methods


@pytest.mark.parametrize("prefix", ["u", "hashed", "clear"])
def test_libpq_logs_in_by_each_method(place: Place, prefix: str) -> None:
    user = place.user(prefix, encryption="md5" if prefix == "hashed" else "scram-sha-256")
    if prefix == "hashed":
        place.execute("GRANT by_md5 TO {}", user)
    with place.connect(user) as connection:
        assert connection.execute("select current_user").fetchone() == (user,)
    assert "password authentication failed" in place.refusal(user, "wrong")


def test_asyncpg_logs_in_and_is_refused_with_its_own_class_of_error(place: Place) -> None:
    user = place.user()

    async def log_in(password: str) -> object:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=place.fleet.port, user=user, password=password,
            database=place.database.dbname, ssl=False)
        try:
            return await connection.fetchval("select current_user")
        finally:
            await connection.close()

    assert asyncio.run(log_in("right")) == user
    with pytest.raises(asyncpg.InvalidPasswordError):
        asyncio.run(log_in("wrong"))


def test_rules_send_away_whom_they_name(place: Place) -> None:
    assert 'pg_hba.conf rejects connection for host "127.0.0.1", user "banned"' in place.refusal("banned")


def test_a_password_that_needs_saslprep_logs_in(place: Place) -> None:
    user = place.user(password="I\u00adX \u2168")
    with place.connect(user, "IX IX"):
        pass


# search_path


@pytest.mark.parametrize("how", ["SET search_path = evil, pg_catalog", "SET SESSION search_path TO evil"])
def test_no_client_can_lead_the_question_to_another_table(place: Place, how: str) -> None:
    user, victim = place.user(), place.user()
    dsn = place.database.server.dsn("postgres", place.database.dbname)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS evil")
        connection.execute("GRANT ALL ON SCHEMA evil TO public")
        connection.execute("DROP TABLE IF EXISTS evil.pg_authid")
        connection.execute(
            "CREATE TABLE evil.pg_authid AS SELECT rolname, 'guess'::text AS rolpassword, "
            "true AS rolcanlogin, NULL::timestamptz AS rolvaliduntil FROM pg_catalog.pg_authid")
    asker = place.fleet.fleet.settings()["auth"]["user"]
    with place.connect(asker, "asking", options="-c search_path=evil,pg_catalog") as connection:
        connection.execute(how)
        assert "password authentication failed" in place.refusal(victim, "guess")
        with place.connect(victim):
            pass
    with place.connect(user, options="-c search_path=evil"):
        assert "password authentication failed" in place.refusal(victim, "guess")


# R39


@pytest.mark.parametrize(("code", "changed"), [
    ("3D000", {"dbname": "not_here"}), ("28P01", {"password": "wrong"}), ("28P01", {"user": "nobody_here"})])
def test_refusals_carry_the_codes_that_drivers_decide_on(
    place: Place, raw: OpenRaw, code: str, changed: dict[str, str]
) -> None:
    given = {"user": place.user(), "password": "right", "dbname": place.database.dbname, **changed}
    with pytest.raises(ServerSaid) as refused:
        raw(place.fleet.port).login(**given)
    assert refused.value.sqlstate == code
    assert (refused.value.fields["S"], refused.value.fields["V"]) == ("FATAL", "FATAL")


# R83


def transcript(place: Place, user: str, password: str, dbname: str) -> list[tuple[str, bytes]]:
    """All that is said to a client with this login, less what is random or its own name."""
    said: list[tuple[str, bytes]] = []
    with RawClient("127.0.0.1", place.fleet.port) as client:
        client.send(startup({"user": user, "database": dbname}))
        login = Login(user, password)
        while True:
            heard = client.receive()
            body = heard.body.replace(user.encode(), b"USER")
            said.append((heard.type, body if heard.type == "E" else body[:4]))
            if heard.type == "E":
                return said
            client.send(login.answer(heard.body))


def test_an_outsider_learns_neither_users_nor_databases(place: Place) -> None:
    user, dbname = place.user(), place.database.dbname
    known = transcript(place, user, "wrong", dbname)
    assert [kind for kind, _ in known] == ["R", "R", "E"]
    assert b"28P01" in known[-1][1]
    assert transcript(place, "nobody_here", "wrong", dbname) == known
    assert transcript(place, user, "wrong", "not_here") == known
    assert transcript(place, "nobody_here", "wrong", "not_here") == known
    assert b'database "not_here" does not exist' in transcript(place, user, "right", "not_here")[-1][1]


def test_an_outsider_learns_nothing_from_the_time_either(place: Place) -> None:
    user = place.user()

    def seconds(name: str) -> float:
        began = time.monotonic()
        transcript(place, name, "wrong", place.database.dbname)
        return time.monotonic() - began

    taken = [(seconds(user), seconds("nobody_here")) for _ in range(25)]
    known, unknown = (statistics.median(column) for column in zip(*taken, strict=True))
    assert known < 2 * unknown + 0.005
    assert unknown < 2 * known + 0.005


# R82


def sasl(mechanism: bytes, size: int, data: bytes) -> bytes:
    return message(b"p", mechanism + b"\0" + struct.pack("!i", size) + data)


FIRST = b"n,,n=,r=clientnonce"
MALFORMED = {
    "a length beyond the packet": sasl(b"SCRAM-SHA-256", 1_000, FIRST),
    "no data": sasl(b"SCRAM-SHA-256", -1, b""),
    "a huge length": sasl(b"SCRAM-SHA-256", 0x7FFFFFFF, FIRST),
    "no mechanism": sasl(b"", len(FIRST), FIRST),
    "a mechanism that was not offered": sasl(b"SCRAM-SHA-256-PLUS", len(FIRST), FIRST),
    "a mechanism without an end": message(b"p", b"SCRAM-SHA-256"),
    "a nonce of 64 kB": sasl(b"SCRAM-SHA-256", 65_555, b"n,,n=,r=" + b"x" * 65_547),
    "a message of 1 GB": b"p" + struct.pack("!i", 1 << 30),
    "a query": message(b"Q", b"select 1\0"),
    "not UTF-8": sasl(b"SCRAM-SHA-256", 12, b"n,,n=,r=\xff\xfe\xfd\xfc"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_login_ends_its_own_connection_only(place: Place, raw: OpenRaw, what: str) -> None:
    user = place.user()
    with place.connect(user) as witness:
        client = raw(place.fleet.port)
        client.send(startup({"user": user, "database": place.database.dbname}))
        assert client.receive().type == "R"
        client.send(MALFORMED[what])
        assert client.receive().error().sqlstate == "08P01"
        assert client.is_closed()
        assert witness.execute("select 1").fetchone() == (1,)


def test_a_proof_that_is_none_and_an_answer_before_its_question_are_refused(
    place: Place, raw: OpenRaw
) -> None:
    hello = startup({"user": place.user(), "database": place.database.dbname})
    client = raw(place.fleet.port)
    client.send(hello)
    client.receive()
    client.send(sasl(b"SCRAM-SHA-256", len(FIRST), FIRST))
    nonce = client.receive().body[4:].partition(b",")[0]
    client.send(message(b"p", b"c=biws," + nonce + b",p=!not base64!"))
    assert client.receive().error().sqlstate == "08P01"
    early = raw(place.fleet.port)
    early.send(message(b"p", b"right\0") + hello)
    assert early.is_closed()


def test_a_thousand_random_logins_leave_the_worker_as_it_was(place: Place) -> None:
    user = place.user()
    chance = random.Random(82)
    hello = startup({"user": user, "database": place.database.dbname})
    pids = place.fleet.fleet.worker_pids()
    with place.connect(user) as witness:
        for _ in range(1_000):
            good = bytearray(sasl(b"SCRAM-SHA-256", len(FIRST), FIRST))
            for _ in range(chance.randint(1, 6)):
                good[chance.randrange(len(good))] = chance.randrange(256)
            with socket.create_connection(("127.0.0.1", place.fleet.port), 20) as client:
                client.sendall(hello + bytes(good))
                client.shutdown(socket.SHUT_WR)
                assert client.recv(65_536)[:1] in (b"R", b"E", b"")
        assert witness.execute("select 1").fetchone() == (1,)
    assert place.fleet.fleet.worker_pids() == pids
