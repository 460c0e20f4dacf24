"""Servers that let nobody in for a while: who waits is served once they do, and nothing is lost meanwhile."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from chaos.script import PASSWORD, Asked, Say, Script, Session, Then
from chaos.words import error, request
from pooler.demo.client import RawClient, ServerSaid, query
from tests.support.scripted import DBNAME, MakeScripted, ScriptedFleet, all_at_once
from tests.support.wait import wait_until

pytestmark = [pytest.mark.etcd]

FAILURES = int(os.environ.get("POOLER_CONNECT_FAILURES", "20"))  # of each kind; the field report had 1,000
CLIENTS, POOL = 50, 10
CLOSED_SECONDS, LOGINS_MAX = 3.0, 20
FIN, RST = Then.FIN, Then.RST
HOLD = "hold"

FAULTS: dict[str, Script] = {
    "a reset": Script([("startup", Say(b"", RST))]),
    "a wrong password": Script([("password", Say(error("28P01", "no", "FATAL"), FIN))], "md5"),
    "an error once it let us in": Script(
        [("startup", Say(request(0) + error("53300", "full", "FATAL"), FIN))]),
    "an end before it is ready": Script([("startup", Say(request(0), FIN))]),
    "an end when asked what it is": Script([("facts", Say(b"", FIN))]),
    "it starts up": Script([("startup", Say(error("57P03", "starting up", "FATAL"), FIN))]),
}
USERS = {name: f"fault_{number}" for number, name in enumerate(FAULTS)}
WORKS = Script([("Q", lambda session, asked: Say(b"") if asked.text == HOLD else None)])


@pytest.fixture(scope="module")
def fleet(make_scripted: MakeScripted) -> ScriptedFleet:
    return make_scripted([*USERS.values(), "waits"], {"pool": {
        "default_pool_size": POOL, "server_login_retry": "300ms", "client_login_timeout": "30s"}})


def test_all_who_wait_for_a_server_that_starts_up_are_served_when_it_has(fleet: ScriptedFleet) -> None:
    """R58. And it is not asked by everybody."""
    until = time.monotonic() + CLOSED_SECONDS

    def answer(session: Session, asked: Asked) -> Say | None:
        closed = time.monotonic() < until
        return Say(error("57P03", "the database system is starting up", "FATAL"), FIN) if closed else None

    fleet.scripts["waits"] = Script([("startup", answer)])

    def come(number: int) -> list[list[str | None]]:
        with fleet.connect("waits", 30) as client:
            return client.query(f"select {number}")

    with ThreadPoolExecutor(CLIENTS) as threads:
        assert list(threads.map(come, range(CLIENTS))) == [[[f"select {n}"]] for n in range(CLIENTS)]
    assert fleet.server.started["waits"] <= LOGINS_MAX + POOL


@pytest.mark.slow
def test_sessions_that_could_not_be_opened_leave_the_whole_pool_to_be_used(fleet: ScriptedFleet) -> None:
    """R66."""
    fleet.scripts |= {USERS[name]: script for name, script in FAULTS.items()}

    def fail(user: str) -> None:
        end = time.monotonic() + 3 * FAILURES
        while fleet.server.started[user] < FAILURES:
            assert time.monotonic() < end, f"only {fleet.server.started[user]} logins"
            with RawClient("127.0.0.1", fleet.running.port, 60) as client, pytest.raises(ServerSaid):
                client.login(user, PASSWORD.decode(), DBNAME)

    all_at_once({name: partial(fail, user) for name, user in USERS.items()})
    fleet.wait_until_gone(list(USERS.values()))
    fleet.scripts |= dict.fromkeys(USERS.values(), WORKS)
    with ExitStack() as stack:
        for user in USERS.values():
            for _ in range(POOL):
                stack.enter_context(fleet.connect(user, 30)).send(query(HOLD))
        wait_until(lambda: all(fleet.server.alive(user) == POOL for user in USERS.values()),
                   "every pool has all of its sessions", 30)
        assert [fleet.held(user) for user in USERS.values()] == [POOL] * len(USERS)
    fleet.check_honest_served()
    fleet.workers_never_failed()
