"""Servers that let nobody in, or in a way that no real server does: what a client hears of it, and that it
costs neither a permit nor anybody else anything.

Each case is a user of its own; all of them come at once, to one worker.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from functools import partial

import pytest

from chaos.script import PASSWORD, VERIFIER, Asked, Say, Script, Session, Then, greeting
from chaos.words import backend_key, complete, error, message, parameter, ready, request, row
from pooler.demo.client import ServerSaid
from tests.support.scripted import MakeScripted, ScriptedFleet, all_at_once

pytestmark = [pytest.mark.etcd]

LOGIN_SECONDS = 3.0
FIN, RST, MUTE = Then.FIN, Then.RST, Then.MUTE


def at_startup(data: bytes, then: Then = Then.GO_ON) -> Script:
    return Script([("startup", Say(data, then))])


def at_password(data: bytes, then: Then = Then.GO_ON, login: str = "md5") -> Script:
    return Script([("password", Say(data, then))], login)


def challenge(salt: str = "c2FsdA==", rounds: str = "4096", nonce: str | None = None) -> Script:
    """The first answer of a SCRAM exchange, to the client's nonce unless another is given."""

    def answer(session: Session, asked: Asked) -> Say:
        own = asked.body.rpartition(b"r=")[2].decode()
        return Say(request(11, f"r={own + 'more' if nonce is None else nonce},s={salt},i={rounds}".encode()))

    return Script([("password", answer)], "scram")


def final(words: bytes) -> Script:
    """The last answer of a SCRAM exchange is this, though the proof was right."""

    def answer(session: Session, asked: Asked) -> Say | None:
        if session.memo is None:
            session.memo = "asked"
            return None
        return Say(words)

    return Script([("password", answer)], "scram")


def greeted(*instead: bytes) -> Script:
    return Script([("startup", Say(request(0) + b"".join(instead)))])


def with_key(key: bytes) -> Script:
    def answer(session: Session, asked: Asked) -> Say:
        return Say(greeting(session).replace(backend_key(session.pid), key))

    return Script([("startup", answer)])


def with_front(words: bytes) -> Script:
    return Script([("startup", lambda session, asked: Say(words + greeting(session)))])


FULL = error("53300", "sorry, too many clients already", "FATAL")

# what it does: (its script, the code the client must hear, words it must hear)
REFUSED: dict[str, tuple[Script, str, str]] = {
    "a fatal": (at_startup(FULL, FIN), "53300", "too many clients"),
    "a fatal in two pieces": (at_startup(FULL[:9]), "08P01", "no answer within"),
    "a panic": (at_startup(error("XX000", "the disk is gone", "PANIC"), FIN), "XX000", "the disk is gone"),
    "an error": (
        at_startup(error("57P03", "the database system is starting up", "ERROR"), FIN), "57P03", "starting"),
    "a warning for an error": (at_startup(error("57P03", "soon", "WARNING"), FIN), "57P03", "soon"),
    "a severity that there is not": (at_startup(error("57P03", "soon", "SAD"), FIN), "57P03", "soon"),
    "no severity": (at_startup(message(b"E", b"C57P03\0Msoon\0\0"), FIN), "57P03", "soon"),
    "no fields": (at_startup(message(b"E", b"\0"), FIN), "08P01", "without a word"),
    "fields without an end": (at_startup(message(b"E", b"SFATAL"), FIN), "08P01", "has no end"),
    "words that are not UTF-8": (
        at_startup(message(b"E", b"SFATAL\0C57P03\0M\xe9\xff\xe8\0\0"), FIN), "57P03", ""),
    "a fatal and no end": (at_startup(FULL), "53300", "too many clients"),
    "a fatal and a flood": (at_startup(FULL + b"x" * 100_000, FIN), "53300", "too many clients"),
    "a bare text": (
        at_startup(b"Ecould not fork new process: no memory\n\0", FIN), "53300", "could not fork"),
    "an end": (at_startup(b"", FIN), "08P01", "closed the connection during the login"),
    "a reset": (at_startup(b"", RST), "08P01", "reset"),
    "silence": (at_startup(b"", MUTE), "08P01", "no answer within"),
    "half a message": (at_startup(request(0)[:7], FIN), "08P01", "closed the connection during the login"),
    "another protocol": (at_startup(b"HTTP/1.1 400 Bad Request\r\n\r\n", FIN), "08P01", "invalid length"),
    "a length of 0": (at_startup(b"R\0\0\0\0"), "08P01", "invalid length"),
    "a length of 3": (at_startup(b"R\0\0\0\3"), "08P01", "invalid length"),
    "a length of 1 GiB": (at_startup(b"R\x40\0\0\0"), "08P01", "invalid length"),
    "a negative length": (at_startup(b"R\xff\xff\xff\xff"), "08P01", "invalid length"),
    "a type that there is not": (at_startup(message(b"?")), "08P01", "message type b'?'"),
    "an answer to no query": (at_startup(row(["1"]) + complete("SELECT 1")), "08P01", "message type b'D'"),
    "ready before it let us in": (at_startup(ready()), "08P01", "message type b'Z'"),
    "an authentication request without a code": (
        at_startup(message(b"R", b"\0")), "08P01", "message type b'R'"),
    "Kerberos": (at_startup(request(7)), "28000", "authentication method 7"),
    "an authentication that there is not": (at_startup(request(4_000_000)), "28000", "method 4000000"),
    "a negative authentication": (at_startup(request(-1)), "28000", "method 4294967295"),
    "an MD5 salt of three bytes": (at_startup(request(5, b"abc")), "28000", "method 5"),
    "no SASL mechanism": (at_startup(request(10, b"\0")), "28000", "no SASL mechanism"),
    "SCRAM for a bound connection only": (
        at_startup(request(10, b"SCRAM-SHA-256-PLUS\0\0")), "28000", "mechanism"),
    "a SASL step before its time": (at_startup(request(11, b"r=a,s=b,i=1")), "28000", "method 11"),
    "a wrong password": (at_password(error("28P01", "no", "FATAL"), FIN), "28P01", "no"),
    "an MD5 challenge again and again": (at_password(request(5, b"salt")), "08P01", "another authentication"),
    "a nonce that is not ours": (challenge(nonce="another"), "08P01", "nonce"),
    "no nonce of the server's own": (challenge(nonce=""), "08P01", "nonce"),
    "a salt that is no base64": (challenge(salt="*"), "08P01", "base64"),
    "no iterations": (challenge(rounds="0"), "08P01", "iteration count"),
    "negative iterations": (challenge(rounds="-4096"), "08P01", "iteration count"),
    "iterations for a week": (challenge(rounds="10000001"), "08P01", "iteration count"),
    "iterations that are no number": (challenge(rounds="4096x"), "08P01", "iteration count"),
    "a wrong signature": (
        final(request(12, b"v=" + b"A" * 43 + b"=")), "08P01", "does not know the password"),
    "a signature that is no base64": (final(request(12, b"v=*")), "08P01", "base64"),
    "a refusal in the exchange": (final(request(12, b"e=other-error")), "08P01", "refused or skipped"),
    "in without a signature": (final(request(0) + ready()), "08P01", "left the SASL exchange"),
    "a row in the greeting": (greeted(row(["1"])), "08P01", "in its greeting"),
    "a parameter without a value": (greeted(message(b"S", b"DateStyle\0")), "08P01", "has no end"),
    "a parameter of 2 MiB": (greeted(parameter("a", "x" * 2_000_000)), "08P01", "invalid length"),
    "parameters without end": (
        greeted(*(parameter(f"a{n}", "x" * 1_000) for n in range(1_100)), ready()), "08P01", "said too much"),
    "notices without end": (
        at_startup(error("00000", "x" * 1_000, "NOTICE", b"N") * 1_100), "08P01", "said too much"),
    "a cancel key of 3 bytes": (with_key(message(b"K", b"abc")), "08P01", "cancel key of 3"),
    "a cancel key of 300 bytes": (with_key(message(b"K", bytes(304))), "08P01", "cancel key of 304"),
}

LET_IN: dict[str, Script] = {
    "trust": Script(), "md5": Script(login="md5"), "scram": Script(login="scram"),
    "no cancel key": with_key(b""),
    "a cancel key of 256 bytes": with_key(backend_key(77, bytes(256))),
    "a cancel key of no bytes": with_key(backend_key(77, b"abcd")),
    "an odd NegotiateProtocolVersion": with_front(message(b"v", struct.pack("!ii", 99, -5) + b"x")),
    "notices and parameters before it let us in": with_front(
        error("00000", "hello", "NOTICE", b"N") + parameter("early", "1")),
}


@dataclass(frozen=True, slots=True)
class Heard:
    code: str
    words: str
    seconds: float
    rows: list[list[str | None]]


@pytest.fixture(scope="module")
def users() -> dict[str, str]:
    """The user of each case."""
    return {name: f"case_{number}" for number, name in enumerate([*REFUSED, *LET_IN])}


@pytest.fixture(scope="module")
def fleet(make_scripted: MakeScripted, users: dict[str, str]) -> ScriptedFleet:
    more = {"pool": {"server_connect_timeout": "1s", "client_login_timeout": f"{LOGIN_SECONDS:g}s"}}
    made = make_scripted(list(users.values()), more)
    scripts = {name: script for name, (script, _, _) in REFUSED.items()} | LET_IN
    made.scripts |= {users[name]: script for name, script in scripts.items()}
    return made


@pytest.fixture(scope="module")
def heard(fleet: ScriptedFleet, users: dict[str, str]) -> dict[str, Heard]:
    """What the client of each case was told."""

    def come(user: str) -> Heard:
        began = time.monotonic()
        try:
            with fleet.connect(user) as client:
                rows = client.query("select 1")
        except ServerSaid as said:
            return Heard(said.sqlstate, str(said), time.monotonic() - began, [])
        return Heard("", "", time.monotonic() - began, rows)

    found = all_at_once({name: partial(come, user) for name, user in users.items()})
    fleet.check_honest_served()
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_who_cannot_be_let_in_is_told_why_in_time(name: str, heard: dict[str, Heard]) -> None:
    _, code, words = REFUSED[name]
    said = heard[name]
    assert said.code
    assert not code or said.code == code, said
    assert words in said.words
    assert said.seconds < LOGIN_SECONDS + 3
    assert PASSWORD.decode() not in said.words
    assert VERIFIER.secret() not in said.words


@pytest.mark.parametrize("name", LET_IN)
def test_what_is_odd_but_no_fault_is_let_in(name: str, heard: dict[str, Heard]) -> None:
    assert heard[name].rows == [["select 1"]], heard[name]


def test_afterwards_no_refused_login_has_left_a_session_or_a_permit(
    heard: dict[str, Heard], fleet: ScriptedFleet, users: dict[str, str]
) -> None:
    fleet.wait_until_gone([users[name] for name in REFUSED])
    fleet.check_honest_served()
    fleet.workers_never_failed()
