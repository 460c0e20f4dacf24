"""The runbook of SESSION_UNKNOWN, command by command, on a real fleet with a worker that was stopped."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from tests.cli.conftest import Done, Pooler
from tests.repo.sources import ROOT
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

PAGE = ROOT / "docs" / "session-unknown.md"


def commands() -> list[list[str]]:
    """Every command of the page, in its order."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines() if line.strip()]


@dataclass
class Stuck:
    """A fleet with one session in SESSION_UNKNOWN: its worker is stopped, and the session lives."""

    fleet: RunningFleet
    pooler: Pooler
    client: psycopg.Connection[Any]
    permit: str
    owner: str

    def run(self, words: list[str]) -> Done:
        """A command of the page, with this fleet's names in the place of the page's."""
        places = {"orders": self.fleet.database.dbname, "main/17.4711": self.permit,
                  "3f9c21aa": self.owner[:8], "10.0.0.11:5432": self.fleet.database.address}
        return self.pooler(*(places.get(word, word) for word in words), "-c", self.fleet.config)


@pytest.fixture
def stuck(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd, pooler: Pooler
) -> Iterator[Stuck]:
    database = make_database(make_server())
    database.server.execute(f'GRANT pg_signal_backend TO "{database.monitor}"')
    fleet = make_fleet(database, etcd, permits=4, workers=1, more={
        "etcd": {"lease_ttl": "2s"}, "pool": {"query_wait_timeout": "2s", "default_pool_size": 1}})
    with given_up(fleet) as client:
        (pid,) = client.execute("select pg_backend_pid()").fetchone() or (0,)
        worker = fleet.fleet.worker_pids()[0]
        os.kill(worker, signal.SIGSTOP)
        try:
            wait_until(lambda: unknown(fleet, pid), "its session is unknown", 20)
            (row,) = unknown(fleet, pid)
            yield Stuck(fleet, pooler, client, row["permit"], row["owner"])
        finally:
            os.kill(worker, signal.SIGCONT)


@contextmanager
def given_up(fleet: RunningFleet) -> Iterator[psycopg.Connection[Any]]:
    """A client whose connection will not last."""
    connection = psycopg.connect(fleet.dsn())
    try:
        yield connection
    finally:
        connection.close()


def unknown(fleet: RunningFleet, pid: int) -> list[dict[str, Any]]:
    shown = fleet.fleet.command("ledger", "show", fleet.database.dbname, "--state", "unknown", "--json")
    return [row for row in json.loads(shown.stdout)["permits"] if row["pid"] == pid]


def pids(database: Database) -> set[int]:
    rows = database.server.execute(f"SELECT pid FROM pg_stat_activity WHERE usename = '{database.user}'")
    return {int(pid) for pid, in rows}


@pytest.mark.timeout(240)
def test_every_command_of_the_runbook_does_what_the_page_says(stuck: Stuck) -> None:
    says: dict[tuple[str, ...], Callable[[Done], object]] = {
        ("ledger", "show"): lambda done: done.code == 0 and "1 unknown (oldest " in done.out
        and f"waits for absent on {stuck.fleet.database.address}" in done.out and stuck.permit in done.out,
        ("ledger", "explain"): lambda done: done.code == 0 and "not known to have ended" in done.out
        and "to end: it is idle in transaction" in done.out and "in a transaction: ticket " in done.out,
        ("ledger", "watch"): lambda done: done.code == 0 and f"{stuck.permit}: SESSION_UNKNOWN" in done.out,
        ("fleet", "fence"): lambda done: done.code == 0 and "0 left" in done.out,
        # the fence has freed it by then, with proof, and its worker has nothing left
        ("ledger", "resolve", "--dead"): lambda done: done.code == 1 and "no worker is there" in done.err,
        ("ledger", "resolve"): lambda done: done.code in (0, 1) and (
            "no such permit" in done.out or "nothing to resolve" in done.err),
        ("ledger", "audit"): lambda done: done.code == 0 and done.out.endswith("clean\n")
        and "by an operator" in done.out,
        ("fleet", "freeze"): lambda done: done.code == 0 and "frozen" in done.out,
        ("fleet", "thaw"): lambda done: done.code == 0 and "thawed" in done.out,
    }
    met = set()
    for words in commands():
        kind = (*words[:2], "--dead") if "--dead" in words else tuple(words[:2])
        met.add(kind)
        done = stuck.run(words)
        assert says[kind](done), f"{' '.join(words)}: {done}"
    assert met == set(says)


def unknown_of(stuck: Stuck) -> list[str]:
    done = stuck.run(["ledger", "show", "orders", "--state", "unknown", "--json"])
    return [row["permit"] for row in json.loads(done.out)["permits"]]


def test_a_session_that_can_be_seen_is_freed_on_nobodys_word_nor_is_its_worker_dead(stuck: Stuck) -> None:
    for words in commands():
        if words[:2] == ["ledger", "resolve"]:
            done = stuck.run(words)
            why = "is not dead: its process" if "--dead" in words else "it can be seen"
            assert (done.code, why in done.out + done.err) == (1, True), done
    assert unknown_of(stuck) == [stuck.permit]


def test_while_frozen_nobody_grows_and_sessions_serve_on(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, pooler: Pooler
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=1, more={
        "pool": {"query_wait_timeout": "2s"}})
    db = postgres_newest.dbname
    with psycopg.connect(fleet.dsn()) as held, given_up(fleet) as more:
        held.execute("select 1")
        frozen = pooler("fleet", "freeze", db, "--evidence", "a test", "-c", fleet.config)
        assert (frozen.code, "frozen" in frozen.out) == (0, True)
        held.execute("select 1")
        with pytest.raises(psycopg.Error, match="froze"):
            more.execute("select 1")
        assert "; frozen by " in pooler("ledger", "show", db, "-c", fleet.config).out
        assert pooler("ledger", "audit", db, "-c", fleet.config).code == 0  # a command may look
        again = pooler("fleet", "freeze", db, "-c", fleet.config)
        assert (again.code, "is frozen already" in again.out) == (0, True)
        assert pooler("fleet", "thaw", db, "-c", fleet.config).code == 0
        with psycopg.connect(fleet.dsn()) as grown:
            grown.execute("select 1")


def test_an_audit_goes_by_etcd_alone_with_a_monitor_and_says_what_it_cannot_see_without(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd, etcd_prefix: str, pooler: Pooler
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=1)
    with psycopg.connect(fleet.dsn(), autocommit=True) as client:
        client.execute("select 1")
        where = ("--etcd", etcd.endpoints[0], "--fleet", "test0", "--prefix", etcd_prefix)
        ledger = fleet.fleet.plan.ledger
        blind = pooler("ledger", "audit", ledger, *where)
        assert (blind.code, f"not audited: {postgres_newest.address}" in blind.out) == (1, True)
        login = (f"user={postgres_newest.monitor} password={postgres_newest.monitor_password} "
                 f"dbname={postgres_newest.dbname}")
        seeing = pooler("ledger", "audit", ledger, *where, "--monitor", login)
        assert (seeing.code, seeing.out.splitlines()[-1]) == (0, "clean"), seeing
        wrong = pooler("ledger", "audit", ledger, *where, "--monitor", "postgresql://a:b c@/x=y?secret")
        assert (wrong.code, "secret" in wrong.err) == (2, False)
        watched = pooler("ledger", "watch", ledger, *where, "--for", "2s", "--json")
        changes = [told for line in watched.out.splitlines() if "is" in (told := json.loads(line))]
        assert changes[0]["is"]["state"].startswith("OPEN")
