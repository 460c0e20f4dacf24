"""Servers that let a client in and then do what no real server does: the client hears one clear error or is
closed, the next one is served, and of the session nothing is left, at the server or in the ledger.

Each case is a user of its own; all of them come at once, to one worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from chaos.script import Asked, Say, Script, Session, Then, facts
from chaos.words import answered, backend_key, columns, complete, error, message, parameter, ready, row
from coordinator.ledger.states import SessionState
from pooler.demo.client import Disconnected, RawClient, row_values
from tests.support.scripted import MakeScripted, ScriptedFleet, all_at_once
from tests.support.wait import wait_until

pytestmark = [pytest.mark.etcd]

FAULT = "fault"
FIN, RST, MUTE = Then.FIN, Then.RST, Then.MUTE
GROWTH_BYTES_MAX = 24 << 20
CLOSED = "closed"
UNKNOWN_OUTCOME, LOST = "08007", "08006"


def on_fault(*said: bytes, then: Then = Then.GO_ON) -> Script:
    """The query FAULT is answered with this, every other as it should be."""

    def answer(session: Session, asked: Asked) -> Say | None:
        return Say(b"".join(said), then) if asked.text == FAULT else None

    return Script([("Q", answer)])


def once_asked_for_facts(said: Say | Callable[[Session], Say]) -> Script:
    """The first session of it answers the question about itself with this."""
    done: list[bool] = []

    def answer(session: Session, asked: Asked) -> Say | None:
        if done:
            return None
        done.append(True)
        return said if isinstance(said, Say) else said(session)

    return Script([("facts", answer)])


def facts_with(at: int, value: str | None) -> Callable[[Session], Say]:
    def say(session: Session) -> Say:
        row_of_it = facts(session)
        row_of_it[at] = value
        return Say(answered([row_of_it]))

    return say


FATAL = error("57P01", "terminating connection due to administrator command", "FATAL")
GOOD = answered([["good"]])

# what the client of a query hears of it: a code, the good row, or that it was closed
QUERIES: dict[str, tuple[Script, set[str]]] = {
    "an end": (on_fault(then=FIN), {UNKNOWN_OUTCOME}),
    "a reset": (on_fault(then=RST), {UNKNOWN_OUTCOME}),
    "a fatal": (on_fault(FATAL, then=FIN), {"57P01"}),
    "a fatal and a reset": (on_fault(FATAL, then=RST), {"57P01", UNKNOWN_OUTCOME}),
    "a panic": (on_fault(error("XX000", "gone", "PANIC"), then=FIN), {"XX000"}),
    "an error and an end": (on_fault(error("22012", "division by zero"), then=FIN), {"22012"}),
    "half a tag and an end": (on_fault(complete("SELECT 1")[:7], then=FIN), {UNKNOWN_OUTCOME}),
    "half a row and an end": (on_fault(columns(1) + row(["abc"])[:8], then=FIN), {CLOSED}),
    "a row of 900 MB that never ends": (
        on_fault(columns(1) + b"D\x35\0\0\0" + bytes(3_000_000), then=FIN), {CLOSED}),
    "a tag of 900 MB that never ends": (on_fault(b"C\x35\0\0\0" + bytes(3_000_000)), {UNKNOWN_OUTCOME}),
    "a length of 0": (on_fault(b"C\0\0\0\0"), {UNKNOWN_OUTCOME}),
    "a length of 2": (on_fault(b"T\0\0\0\2"), {UNKNOWN_OUTCOME}),
    "a type that there is not": (on_fault(message(b"?")), {UNKNOWN_OUTCOME}),
    "a login": (on_fault(message(b"R", bytes(4)) + backend_key(7)), {UNKNOWN_OUTCOME}),
    "HTTP": (on_fault(b"HTTP/1.1 400 Bad Request\r\n\r\n", then=FIN), {UNKNOWN_OUTCOME}),
    "ready and nothing else": (on_fault(ready()), {UNKNOWN_OUTCOME}),
    "ready and then the answer": (on_fault(ready() + GOOD), {UNKNOWN_OUTCOME}),
    "the answer and ready twice": (on_fault(GOOD + ready()), {"good"}),
    "the answer twice": (on_fault(GOOD * 2), {"good"}),
    "the answer and half another": (on_fault(GOOD + GOOD[:10]), {"good"}),
    "the answer and a fatal": (on_fault(GOOD + FATAL, then=FIN), {"good"}),
    "the answer and an end": (on_fault(GOOD, then=FIN), {"good"}),
    "the answer and silence for ever": (on_fault(GOOD, then=MUTE), {"good"}),
    "a status that there is not": (on_fault(GOOD[:-1] + b"?"), {UNKNOWN_OUTCOME}),
    "a transaction that nobody began": (on_fault(GOOD[:-1] + b"T"), {"good"}),
    "silence": (on_fault(then=MUTE), {"57014"}),
    "half an answer and silence": (on_fault(columns(1) + row(["a"]), then=MUTE), {"57014"}),
    "parameters without a value": (on_fault(message(b"S", b"DateStyle\0")), {UNKNOWN_OUTCOME}),
    "parameters that change all the time": (
        on_fault(*(parameter("application_name", "x" * n) for n in range(500)), GOOD), {"good"}),
    "a copy that nobody asked for": (on_fault(message(b"G", b"\0\0\0"), then=MUTE), {"57014"}),
    "a copy both ways": (on_fault(message(b"W", b"\0\0\0"), then=MUTE), {"57014"}),
    "copy data without a copy": (on_fault(message(b"d", b"x"), message(b"c"), GOOD), {"good"}),
}

FACTS: dict[str, Script] = {
    "no answer": once_asked_for_facts(Say(b"", MUTE)),
    "an end": once_asked_for_facts(Say(b"", FIN)),
    "a reset": once_asked_for_facts(Say(b"", RST)),
    "an error": once_asked_for_facts(Say(error("42501", "permission denied") + ready())),
    "a fatal": once_asked_for_facts(Say(FATAL, FIN)),
    "no row": once_asked_for_facts(Say(answered([]))),
    "another row": once_asked_for_facts(Say(answered([["1", "2"]]))),
    "a row cut short": once_asked_for_facts(Say(message(b"D", b"\0\x0b\0\0\0\x01a") + ready())),
    "a pid that is no number": once_asked_for_facts(facts_with(0, "x")),
    "a pid that is another": once_asked_for_facts(facts_with(0, "999")),
    "a pid that is none": once_asked_for_facts(facts_with(0, None)),
    "a start that is beyond all numbers": once_asked_for_facts(facts_with(1, "9" * 5000)),
    "a start beyond those of the ledger": once_asked_for_facts(facts_with(1, "9" * 25)),
    "a negative pid": once_asked_for_facts(facts_with(0, "-7")),
    "a port that is no number": once_asked_for_facts(facts_with(7, "-")),
    "an address that is none": once_asked_for_facts(facts_with(6, "nowhere")),
    "another cluster": once_asked_for_facts(facts_with(2, "7300000000000000043")),
    "a cluster without a name": once_asked_for_facts(facts_with(2, None)),
    "rows without end": once_asked_for_facts(Say(answered([["x" * 1000]] * 1500))),
    "bytes behind the answer": once_asked_for_facts(lambda session: Say(answered([facts(session)]) + GOOD)),
    "a copy": once_asked_for_facts(Say(message(b"G", b"\0\0\0"))),
}

IDLE: dict[str, Say] = {
    "an end": Say(b"", FIN),
    "a reset": Say(b"", RST),
    "a fatal": Say(FATAL, FIN),
    "a fatal and no end": Say(FATAL, MUTE),
    "a fatal and a reset": Say(FATAL, RST),
    "an answer": Say(GOOD),
    "ready": Say(ready()),
    "half a row": Say(row(["stranger"])[:8]),
    "rubbish": Say(b"\0" * 20),
    "an error": Say(error("22012", "no")),
    "a fatal without fields": Say(message(b"E", b"VFATAL"), FIN),
}


@dataclass(frozen=True, slots=True)
class Heard:
    first: str  # a code, CLOSED, or the row's value
    then: str  # what the next query of the same client, or of one that came instead, was answered


def users_of(kind: str, cases: dict[str, object]) -> dict[str, str]:
    return {name: f"{kind}_{number}" for number, name in enumerate(cases)}


ASKING, FINDING, LYING = users_of("q", {**QUERIES}), users_of("f", {**FACTS}), users_of("i", {**IDLE})


@pytest.fixture(scope="module")
def fleet(make_scripted: MakeScripted) -> ScriptedFleet:
    more = {"pool": {"server_connect_timeout": "2s", "cancel_wait_timeout": "1s",
                     "client_login_timeout": "20s"},
            "users": {user: {"query_timeout": "2s"} for user in ASKING.values()}}
    made = make_scripted([*ASKING.values(), *FINDING.values(), *LYING.values()], more)
    made.scripts |= {ASKING[name]: script for name, (script, _) in QUERIES.items()}
    made.scripts |= {FINDING[name]: script for name, script in FACTS.items()}
    return made


def ask(client: RawClient, text: str) -> str:
    """The first error's code, else the value of the row; CLOSED where it was closed without a word."""
    heard = ""
    try:
        client.send(message(b"Q", text.encode() + b"\0"))
        while (said := client.receive()).type != "Z":
            if said.type == "E":
                return said.error().sqlstate
            if said.type == "D":
                heard = str(row_values(said.body)[0])
    except (Disconnected, ConnectionError):
        return CLOSED
    return heard


def goes_on(fleet: ScriptedFleet, user: str, client: RawClient) -> str:
    """What the next query is answered, by another client if this one was closed or has a transaction."""
    said = ask(client, "next")
    if said != "next":  # what is left of the first answer is read now, and the end
        with fleet.connect(user) as another:
            said = ask(another, "next")
    return said


@pytest.fixture(scope="module")
def heard(fleet: ScriptedFleet) -> dict[str, Heard]:
    def come(user: str) -> Heard:
        with fleet.connect(user) as client:
            client.send(b"")
            return Heard(ask(client, FAULT), goes_on(fleet, user, client))

    found = all_at_once({name: partial(come, user) for name, user in ASKING.items()})
    fleet.check_honest_served()
    return found


@pytest.mark.parametrize("name", QUERIES)
def test_the_client_hears_one_clear_word_of_it_and_the_next_is_served(
    name: str, heard: dict[str, Heard]
) -> None:
    assert heard[name].first in QUERIES[name][1], heard[name]
    assert heard[name].then == "next", heard[name]


@pytest.fixture(scope="module")
def found(fleet: ScriptedFleet) -> dict[str, str]:
    def come(user: str) -> str:
        with fleet.connect(user) as client:
            return ask(client, "next")

    return all_at_once({name: partial(come, user) for name, user in FINDING.items()})


@pytest.mark.parametrize("name", FACTS)
def test_a_session_that_does_not_say_what_it_is_is_replaced_unheard(name: str, found: dict[str, str]) -> None:
    assert found[name] == "next"


@pytest.fixture(scope="module")
def lay(fleet: ScriptedFleet) -> dict[str, tuple[str, str]]:
    def come(name: str) -> tuple[str, str]:
        user = LYING[name]
        with fleet.connect(user) as client, fleet.connect(user) as other:
            assert ask(client, "before") == "before"
            alive = fleet.server.alive(user)
            assert fleet.server.push(user, IDLE[name]) == alive
            wait_until(lambda: fleet.server.alive(user) < alive, f"{name}: the session is closed", 20)
            return ask(client, "next"), ask(other, "next")

    return all_at_once({name: partial(come, name) for name in IDLE})


@pytest.mark.parametrize("name", IDLE)
def test_what_an_idle_session_says_is_heard_by_nobody(name: str, lay: dict[str, tuple[str, str]]) -> None:
    assert lay[name] == ("next", "next")


def test_a_client_that_leaves_a_server_that_answers_nothing_costs_a_permit_for_moments(
    fleet: ScriptedFleet
) -> None:
    user = ASKING["silence"]
    for _ in range(5):
        client = fleet.connect(user)
        client.send(message(b"Q", FAULT.encode() + b"\0"))
        client.abort()
    with fleet.connect(user) as client:
        assert ask(client, "next") == "next"


def test_afterwards_the_ledger_holds_what_is_open_and_nothing_else(
    heard: dict[str, Heard], found: dict[str, str], lay: dict[str, tuple[str, str]], fleet: ScriptedFleet
) -> None:
    users = [*ASKING.values(), *FINDING.values(), *LYING.values()]

    def are_equal() -> bool:
        held = fleet.watch.now().values()
        return all(session.state is SessionState.OPEN for session in held) and all(
            sum(session.user == user for session in held) == fleet.server.alive(user) for user in users)

    wait_until(are_equal, "what is held is what is open", 30)
    fleet.check_honest_served()
    fleet.workers_never_failed()
