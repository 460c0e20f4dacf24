"""Logins to real servers: every method, both kinds of socket, what a session is told about itself."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest
from psycopg import sql

from coordinator.ledger.states import Proof
from pooler.demo.postgres import Limits, Role, Server
from pooler.demo.serverlog import sessions_from_log
from pooler.net.dial import DialFailed, Dialled, Outcome, Target, dial, hang_up
from pooler.net.facts import FactsRefused, session_facts
from pooler.wire import scram
from pooler.wire.auth import ServerSecret, md5_secret
from pooler.wire.scram import Verifier
from tests.support.postgres import Database, MakeServer
from tests.support.wait import wait_until

pytestmark = pytest.mark.postgres


def target_at(at: Database, **changes: object) -> Target:
    secret = ServerSecret(plain=at.password.encode())
    target = Target("127.0.0.1", at.port, at.user, at.dbname, "pooler:test:m1.1", secret)
    return replace(target, **changes)  # type: ignore[arg-type]


async def opened(target: Target) -> Dialled:
    return await dial(target, connect_timeout_seconds=10)


async def closed(session: Dialled) -> None:
    assert await hang_up(session.sock, timeout_seconds=10) is Proof.EOF


async def refused(target: Target) -> DialFailed:
    with pytest.raises(DialFailed) as failed:
        await dial(target, connect_timeout_seconds=10)
    return failed.value


def member_of(database: Database, group: str, encryption: str) -> Role:
    role = Role(f"{group}_{secrets.token_hex(4)}", "pw", (group,), encryption)
    database.server.create_role(role)
    return role


async def test_by_scram_with_the_password_and_with_recovered_keys(postgres: Database) -> None:
    await closed(await opened(target_at(postgres)))
    stored = postgres.server.execute(sql.SQL("SELECT rolpassword FROM pg_authid WHERE rolname = {}").format(
        sql.Literal(postgres.user)))[0][0]
    verifier = Verifier.parse(stored)
    salted = scram.salted_password(postgres.password.encode(), verifier.salt, verifier.iterations)
    keys = scram.Keys.from_salted(salted)
    assert verifier.matches(postgres.password.encode())
    await closed(await opened(target_at(postgres, secret=ServerSecret(keys=keys))))


async def test_by_trust(postgres: Database) -> None:
    role = member_of(postgres, "trusted", "scram-sha-256")
    await closed(await opened(target_at(postgres, user=role.name, secret=ServerSecret())))


async def test_by_md5_with_the_password_and_with_its_hash(postgres: Database) -> None:
    role = member_of(postgres, "by_md5", "md5")
    for secret in (ServerSecret(plain=b"pw"), ServerSecret(md5=md5_secret(b"pw", role.name))):
        await closed(await opened(target_at(postgres, user=role.name, secret=secret)))


async def test_by_a_unix_socket(postgres: Database) -> None:
    session = await opened(target_at(postgres, host=str(postgres.server.directory), secret=ServerSecret()))
    facts = await session_facts(session, "socket:1")
    assert (facts.client_address, facts.client_port) == ("", 0)
    assert (facts.server_address, facts.server_port) == ("", 0)
    await closed(session)


async def test_long_passwords(postgres: Database) -> None:
    role = Role(f"long_{secrets.token_hex(4)}", "é" * 200 + "x" * 500)
    postgres.server.create_role(role)
    secret = ServerSecret(plain=role.password.encode())
    await closed(await opened(target_at(postgres, user=role.name, secret=secret)))


async def test_wrong_logins_end_with_the_servers_own_words(postgres: Database) -> None:
    wrong = await refused(target_at(postgres, secret=ServerSecret(plain=b"wrong")))
    assert (wrong.outcome, wrong.code, wrong.is_permanent) == (Outcome.ENDED, "28P01", True)
    missing = await refused(target_at(postgres, database="no_such_database"))
    assert (missing.outcome, missing.code) == (Outcome.ENDED, "3D000")
    option = await refused(target_at(postgres, parameters={"no_such_setting": "1"}))
    assert (option.outcome, option.code) == (Outcome.ENDED, "42704")
    assert b"no_such_setting" in option.server_error


async def test_a_login_without_a_secret_leaves_nothing_behind(postgres: Database) -> None:
    tag = f"pooler:test:{secrets.token_hex(4)}"
    failed = await refused(target_at(postgres, secret=ServerSecret(), application_name=tag))
    assert (failed.outcome, failed.proof) == (Outcome.ENDED, Proof.EOF)
    assert postgres.server.execute(sql.SQL("SELECT count(*) FROM pg_stat_activity WHERE usename = {}").format(
        sql.Literal(postgres.user))) == [(0,)]


async def test_what_a_session_is_told_is_what_the_server_shows(postgres: Database) -> None:
    session = await opened(target_at(postgres, options="-c search_path=public"))
    facts = await session_facts(session, postgres.address)
    shown = postgres.server.execute(sql.SQL(
        "SELECT pid, (extract(epoch from backend_start) * 1000000)::bigint, application_name, client_port, "
        "(extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint, "
        "(SELECT system_identifier::text FROM pg_control_system()), "
        "(SELECT timeline_id FROM pg_control_checkpoint()) "
        "FROM pg_stat_activity WHERE pid = {}").format(sql.Literal(session.pid)))
    assert shown == [(facts.pid, facts.backend_start_us, "pooler:test:m1.1", facts.client_port,
                      facts.backend.postmaster_start_us, facts.backend.system_identifier,
                      facts.backend.timeline)]
    assert facts.pid == session.pid
    assert (facts.backend.address, facts.backend.in_recovery) == (postgres.address, False)
    assert (facts.client_address, facts.client_port) == session.sock.plain.getsockname()
    assert (facts.server_address, facts.server_port) == ("127.0.0.1", postgres.port)
    await closed(session)


@pytest.mark.parametrize(("asked", "expected"), [(1_000, "1s"), (None, "0")])
async def test_the_check_interval_is_set_where_it_was_asked_for(
    postgres: Database, asked: int | None, expected: str
) -> None:
    session = await opened(target_at(postgres))
    await session_facts(session, postgres.address, check_interval_ms=asked)
    await session.sock.send_all(b"Q\0\0\0\x2aSHOW client_connection_check_interval\0")
    answer = b""
    while not answer.endswith(b"Z\0\0\0\x05I"):
        answer += await session.sock.recv()
    assert len(expected).to_bytes(4, "big") + expected.encode() in answer
    await closed(session)


async def test_a_question_the_server_refuses_leaves_the_session_open(postgres: Database) -> None:
    session = await opened(target_at(postgres, options="-c statement_timeout=1"))
    await session.sock.send_all(b"Q\0\0\0\x0aBEGIN\0")
    answer = b""
    while not answer.endswith(b"Z\0\0\0\x05T"):
        answer += await session.sock.recv()
    await session.sock.send_all(b"Q\0\0\0\x08xx;\0")
    while not answer.endswith(b"Z\0\0\0\x05E"):
        answer += await session.sock.recv()
    with pytest.raises(FactsRefused) as failed:
        await session_facts(session, postgres.address)
    assert failed.value.code == "25P02"
    await closed(session)


async def test_a_standby_says_that_it_is_one(
    make_server: MakeServer, make_standby: Callable[[Server], Server]
) -> None:
    primary = make_server()
    primary.create_role(Role("app", "pw"))
    standby = make_standby(primary)
    target = Target("127.0.0.1", standby.port, "app", "postgres", "t", ServerSecret(plain=b"pw"))
    session = await opened(target)
    facts = await session_facts(session, target.address)
    assert (facts.backend.in_recovery, facts.backend.timeline) == (True, 1)
    await closed(session)
    standby.promote()
    session = await opened(target)
    facts = await session_facts(session, target.address)
    assert (facts.backend.in_recovery, facts.backend.timeline) == (False, 2)
    await closed(session)


async def test_a_full_server_says_so_and_one_that_is_stopped_never_started(make_server: MakeServer) -> None:
    server = make_server(limits=Limits.exact(1, 0))
    server.create_role(Role("app", "pw"))
    wait_until(lambda: all(s.end for s in sessions_from_log(server.log)), "what made the role is gone", 10)
    target = Target("127.0.0.1", server.port, "app", "postgres", "t", ServerSecret(plain=b"pw"))
    session = await opened(target)
    full = await refused(target)
    assert (full.outcome, full.code, full.is_permanent) == (Outcome.ENDED, "53300", False)
    await closed(session)
    await closed(await opened(target))  # the end of file came after the slot was free
    server.stop()
    assert (await refused(target)).outcome is Outcome.NEVER_STARTED
