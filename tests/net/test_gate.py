"""Every way to prove oneself other than by a stored password, and what a failure costs."""

from __future__ import annotations

import os
import pwd
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from pooler.errors import LoginRefused, PoolerError, ProtocolViolation
from pooler.net.failures import OUTSTANDING_MAX, FailedLogins
from pooler.net.gate import Gate, GateRules, Proven
from pooler.net.hba import Hba, read_hba
from pooler.net.hba_tokens import Files
from pooler.net.ident import IdentMaps, read_ident
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.tls import TlsFacts
from pooler.wire import messages, scram
from pooler.wire.auth import AuthType, Secret, md5_answer, md5_secret
from pooler.wire.scram import ClientExchange, Keys, Verifier
from pooler.wire.startup import Replication, StartupAsked
from tests.net.wires import Peer, connected

SECRET = Secret(scram=Verifier.derive(b"pw", b"saltsaltsalt"))
UNIX = PeerAddress("unix", 0)
TCP = PeerAddress("192.0.2.7", 5)
END_POINT = bytes(32)
ME = pwd.getpwuid(os.getuid()).pw_name


async def find_user(user: str, _database: str) -> Secret | None:
    return SECRET if user in ("ann", ME) else None


RULES = GateRules(AuthType.SCRAM, find_user, b"mock")


def tls(common_name: str = "", distinguished_name: str = "") -> TlsFacts:
    return TlsFacts(common_name, distinguished_name, END_POINT, "TLSv1.3", "x")


def asked(
    user: str = "ann", database: str = "db", replication: Replication = Replication.NONE
) -> StartupAsked:
    return StartupAsked(user, database, 0, {}, "", replication, (), False)


def memory(content: str) -> Files:
    return Files(lambda _: content, lambda _: True, lambda _: [])


def hba(*lines: str) -> Hba:
    return read_hba(Path("hba"), files=memory("\n".join(lines)))


def ident(*lines: str) -> IdentMaps:
    return read_ident(Path("ident"), files=memory("\n".join(lines)))


class Outcome:
    """What a gate said."""

    proven: Proven | None = None
    error: PoolerError | None = None

    async def run(self, gate: Gate) -> None:
        try:
            self.proven = await gate.prove()
        except PoolerError as error:
            self.error = error

    def refused(self, words: str, code: str = "28000") -> bool:
        assert isinstance(self.error, LoginRefused), (self.proven, self.error)
        return words in str(self.error) and self.error.code == code


@asynccontextmanager
async def at_gate(
    rules: GateRules, wanted: StartupAsked | None = None, address: PeerAddress = UNIX,
    facts: TlsFacts | None = None,
) -> AsyncIterator[tuple[Peer, Outcome]]:
    """A client at the gate; the block ends when the gate has decided."""
    outcome = Outcome()
    with connected() as (raw, peer):
        raw.tls = facts
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcome.run, Gate(raw, rules, wanted or asked(), address, b""))
            yield peer, outcome


async def silent(rules: GateRules, wanted: StartupAsked | None = None, **more: Any) -> Outcome:
    """The outcome for a client that is asked nothing."""
    async with at_gate(rules, wanted, **more) as (_, outcome):
        pass
    return outcome


async def test_any_lets_everybody_in_and_looks_nobody_up() -> None:
    async def never(*_: str) -> Secret | None:
        raise AssertionError

    outcome = await silent(GateRules(AuthType.ANY, never, b""), asked("whoever"))
    assert outcome.proven is not None
    assert outcome.proven.is_anybody


async def test_trust_lets_users_in_who_exist() -> None:
    rules = replace(RULES, auth_type=AuthType.TRUST)
    assert (await silent(rules)).proven
    assert (await silent(rules, asked("bob"))).refused('role "bob" does not exist')


async def test_a_unix_user_comes_in_under_the_same_name() -> None:
    rules = replace(RULES, auth_type=AuthType.PEER)
    outcome = await silent(rules, asked(ME))
    assert outcome.proven is not None
    assert outcome.proven.owed == messages.AUTHENTICATION_OK
    assert (await silent(rules)).refused('Peer authentication failed for user "ann"')


async def test_a_unix_user_comes_in_by_a_map() -> None:
    rules = replace(RULES, auth_type=AuthType.PEER, ident_map="m", ident=ident(f"m {ME} ann"))
    assert (await silent(rules)).proven
    assert (await silent(rules, asked(ME))).refused("Peer authentication failed")


async def test_peer_is_for_unix_sockets_though_a_proxy_may_stand_behind_one() -> None:
    rules = replace(RULES, auth_type=AuthType.PEER)
    assert (await silent(rules, asked(ME), address=TCP)).refused("for unix sockets only")


async def test_a_certificate_lets_its_name_in() -> None:
    rules = replace(RULES, auth_type=AuthType.CERT)
    assert (await silent(rules, facts=tls("ann", "CN=ann,O=x"))).proven
    assert (await silent(rules, facts=tls("bob", "CN=bob"))).refused(
        'certificate authentication failed for user "ann"')
    assert (await silent(rules, facts=tls())).refused("requires a valid client certificate")
    assert (await silent(rules)).refused("requires a valid client certificate")


async def test_a_certificate_without_a_common_name_is_nobodys() -> None:
    rules = replace(RULES, auth_type=AuthType.CERT, ident_map="m", ident=ident("m /.* all"))
    assert (await silent(rules, facts=tls("", "O=x"))).refused("certificate authentication failed")


async def test_a_certificates_name_is_mapped() -> None:
    rules = replace(RULES, auth_type=AuthType.CERT, ident_map="m",
                    ident=ident(r"m /^(.*)@example\.org$ \1"))
    assert (await silent(rules, facts=tls("ann@example.org", "CN=x"))).proven
    assert (await silent(rules, facts=tls("bob@example.org", "CN=x"))).refused("certificate")


async def test_a_rule_may_go_by_the_distinguished_name() -> None:
    rules = replace(RULES, auth_type=AuthType.HBA, ident=ident('m "CN=x,O=y" ann'),
                    hba=hba("hostssl all all all cert map=m clientname=DN"))
    assert (await silent(rules, address=TCP, facts=tls("x", "CN=x,O=y"))).proven
    assert (await silent(rules, address=TCP, facts=tls("x", "CN=x,O=z"))).refused("certificate")


async def test_rules_choose_the_method_and_say_who_is_not_let_in() -> None:
    rules = replace(RULES, auth_type=AuthType.HBA, hba=hba(
        "local db all trust", "host all bob all reject", "hostssl all all all trust"))
    assert (await silent(rules)).proven
    assert (await silent(rules, address=TCP, facts=tls())).proven
    assert (await silent(rules, asked("bob"), address=TCP)).refused(
        'pg_hba.conf rejects connection for host "192.0.2.7", user "bob", database "db", no encryption')
    assert (await silent(rules, address=TCP)).refused(
        'no pg_hba.conf entry for host "192.0.2.7", user "ann", database "db", no encryption')
    assert (await silent(rules, asked(database="x"))).refused('no pg_hba.conf entry for host "[local]"')
    assert (await silent(rules, asked(replication=Replication.PHYSICAL))).refused(
        'no pg_hba.conf entry for replication connection, host "[local]", user "ann", no encryption')


async def test_a_rule_may_ask_for_a_certificate_besides_a_password() -> None:
    rules = replace(RULES, auth_type=AuthType.HBA, hba=hba(
        "hostssl signed all all password clientcert=verify-ca",
        "hostssl named all all password clientcert=verify-full"))
    for database, facts, lets_in in [
        ("signed", tls("x", "CN=x"), True), ("signed", tls(), False),
        ("named", tls("ann", "CN=ann"), True), ("named", tls("x", "C=x"), False)
    ]:
        async with at_gate(rules, asked(database=database), TCP, facts) as (peer, outcome):
            if lets_in:
                assert await peer.frame() == (b"R", b"\0\0\0\x03")
                await peer.send(messages.password(b"pw"))
        assert (outcome.proven is not None) is lets_in, (database, facts)


async def test_the_owner_of_the_process_enters_the_console_over_a_unix_socket() -> None:
    rules = replace(RULES, owner_databases=frozenset({"pgbouncer"}))
    outcome = await silent(rules, asked("pgbouncer", "pgbouncer"))
    assert outcome.proven is not None
    assert outcome.proven.is_owner
    for wanted, address in [(asked("ann", "pgbouncer"), UNIX), (asked("pgbouncer", "db"), UNIX),
                            (asked("pgbouncer", "pgbouncer"), TCP)]:
        async with at_gate(rules, wanted, address) as (peer, outcome):
            assert (await peer.frame()).body[:4] == b"\0\0\0\x0a"
            await peer.send(messages.password(b"x"))
        assert isinstance(outcome.error, ProtocolViolation)


async def bind_and_answer(peer: Peer, end_point: bytes) -> None:
    assert (await peer.frame()).body == b"\0\0\0\x0aSCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0"
    exchange = ClientExchange(nonce="clientnonce", end_point=end_point)
    await peer.send(messages.sasl_initial_response(scram.MECHANISM_PLUS, exchange.first()))
    salt, rounds = exchange.challenge((await peer.frame()).body[4:])
    keys = Keys.from_salted(scram.salted_password(b"pw", salt, rounds))
    await peer.send(messages.sasl_response(exchange.final(keys)))


async def test_over_tls_a_client_may_bind_its_proof_to_the_connection() -> None:
    async with at_gate(RULES, facts=tls()) as (peer, outcome):
        await bind_and_answer(peer, END_POINT)
    assert outcome.proven is not None
    assert outcome.proven.secret.keys is not None
    async with at_gate(RULES, facts=tls()) as (peer, outcome):
        await bind_and_answer(peer, b"\1" * 32)
    assert outcome.refused("SCRAM channel binding check failed")


async def test_a_client_whose_offer_of_binding_was_taken_away_is_refused() -> None:
    async with at_gate(RULES, facts=tls()) as (peer, outcome):
        await peer.frame()
        first = ClientExchange(nonce="clientnonce", could_bind=True).first()
        await peer.send(messages.sasl_initial_response(scram.MECHANISM, first))
    assert outcome.refused("SCRAM channel binding negotiation error")


async def test_pam_judges_the_password() -> None:
    def check(user: str, word: bytes) -> bool:
        return (user, word) == ("bob", b"pw")

    rules = replace(RULES, auth_type=AuthType.PAM, check_pam=check)
    for password, lets_in in [(b"pw", True), (b"other", False), (b"", False)]:
        async with at_gate(rules, asked("bob")) as (peer, outcome):
            assert await peer.frame() == (b"R", b"\0\0\0\x03")
            await peer.send(messages.password(password))
        assert (outcome.proven is not None) is lets_in
    assert outcome.refused('password authentication failed for user "bob"', "28P01")


NEW = Secret(md5=md5_secret(b"new", "ann"))
OLD = Secret(md5=md5_secret(b"old", "ann"))


@pytest.mark.parametrize("kind", [AuthType.MD5, AuthType.PASSWORD])
@pytest.mark.parametrize(("password", "lets_in"), [(b"new", True), (b"third", False)])
async def test_a_secret_found_wrong_is_asked_for_again_and_the_newer_one_counts(
    kind: AuthType, password: bytes, lets_in: bool
) -> None:
    found_wrong: list[Secret | None] = []

    async def ask_again(_user: str, _database: str, wrong: Secret | None) -> Secret | None:
        found_wrong.append(wrong)
        return NEW

    async def find_old(_user: str, _database: str) -> Secret | None:
        return OLD

    rules = GateRules(kind, find_old, b"mock", ask_again=ask_again)
    async with at_gate(rules) as (peer, outcome):
        body = (await peer.frame()).body
        answer = md5_answer(md5_secret(password, "ann"), body[4:]) if kind is AuthType.MD5 else password
        await peer.send(messages.password(answer))
    assert (outcome.proven is not None) is lets_in
    assert found_wrong == [OLD]


async def fail(rules: GateRules, address: PeerAddress = TCP) -> tuple[Outcome, float]:
    """A login with a wrong password; the outcome and the seconds until it was there."""
    began = trio.current_time()
    async with at_gate(replace(rules, auth_type=AuthType.PASSWORD), address=address) as (peer, outcome):
        await peer.frame()
        await peer.send(messages.password(b"wrong"))
    return outcome, trio.current_time() - began


async def test_failures_of_an_address_are_answered_ever_later_and_others_at_once(
    autojump_clock: MockClock
) -> None:
    rules = replace(RULES, failures=FailedLogins(2, 10.0))
    waits = [(await fail(rules))[1] for _ in range(5)]
    assert waits[:2] == [0, 0]
    assert waits[2] < waits[3] < waits[4]
    assert (await fail(rules, PeerAddress("192.0.2.8", 1)))[1] == 0
    assert (await fail(rules, UNIX))[1] == 0


async def test_a_success_is_never_held_up(autojump_clock: MockClock) -> None:
    failures = FailedLogins(0, 10.0)
    rules = replace(RULES, auth_type=AuthType.TRUST, failures=failures)
    for _ in range(9):
        assert failures.failed("192.0.2.7", trio.current_time()) > 0
        failures.answered("192.0.2.7")
    began = trio.current_time()
    assert (await silent(rules, address=TCP)).proven
    assert trio.current_time() == began


async def test_too_many_failures_at_once_shut_an_address_out_until_they_are_answered() -> None:
    failures = FailedLogins(0, 10.0)
    for _ in range(OUTSTANDING_MAX):
        failures.failed("192.0.2.7", trio.current_time())
    rules = replace(RULES, auth_type=AuthType.TRUST, failures=failures)
    outcome = await silent(rules, address=TCP)
    assert outcome.refused("too many failed logins from this address", "53300")
    assert (await silent(rules, address=PeerAddress("192.0.2.8", 1))).proven
    failures.answered("192.0.2.7")
    assert (await silent(rules, address=TCP)).proven


async def test_a_client_that_is_let_go_during_its_delay_is_no_longer_outstanding(
    autojump_clock: MockClock
) -> None:
    failures = FailedLogins(0, 10.0)
    for _ in range(OUTSTANDING_MAX - 1):
        failures.failed("192.0.2.7", trio.current_time())
    with trio.move_on_after(1) as scope:
        await fail(replace(RULES, failures=failures))
    assert scope.cancelled_caught  # client_login_timeout came first
    assert not failures.refuses("192.0.2.7")


@pytest.mark.parametrize("user", ["stored_plain", "nobody"])
async def test_who_has_no_scram_secret_is_shown_the_configured_iterations(user: str) -> None:
    async def find(name: str, _database: str) -> Secret | None:
        return Secret(plain=b"pw") if name == "stored_plain" else None

    rules = GateRules(AuthType.SCRAM, find, b"mock", scram_iterations=7_000)
    async with at_gate(rules, asked(user)) as (peer, outcome):
        await peer.frame()
        exchange = ClientExchange(nonce="clientnonce")
        await peer.send(messages.sasl_initial_response(scram.MECHANISM, exchange.first()))
        salt, rounds = exchange.challenge((await peer.frame()).body[4:])
        assert rounds == 7_000
        keys = Keys.from_salted(scram.salted_password(b"pw", salt, rounds))
        await peer.send(messages.sasl_response(exchange.final(keys)))
    assert (outcome.proven is not None) is (user == "stored_plain")
