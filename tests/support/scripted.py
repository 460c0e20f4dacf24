"""Fixture of a fleet in front of a scripted server: each user has a pool, and a script, of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pytest

from chaos.script import PASSWORD, Script, Session
from chaos.scripted_server import ScriptedServer
from coordinator.ledger.keys import FleetKeys
from pooler.demo.client import RawClient
from pooler.demo.etcd import Etcd
from pooler.demo.ledgerwatch import LedgerWatch
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

DBNAME, MONITOR, HONEST = "scripted", "monitor", "honest"
GONE_SECONDS = 30.0
T = TypeVar("T")


@dataclass
class ScriptedFleet:
    """`scripts` by user, where a user's is not the honest one."""

    server: ScriptedServer
    running: RunningFleet
    watch: LedgerWatch
    scripts: dict[str, Script] = field(default_factory=dict)

    def script_for(self, session: Session) -> Script:
        return self.scripts.get(session.user, Script())

    def connect(self, user: str, seconds: float = 10) -> RawClient:
        """Logged in. Raises ServerSaid."""
        client = RawClient("127.0.0.1", self.running.port, seconds)
        try:
            return client.login(user, PASSWORD.decode(), DBNAME)
        except BaseException:
            client.close()
            raise

    def held(self, user: str) -> int:
        """Permits of a user's pool, whatever their state."""
        return sum(session.user == user for session in self.watch.now().values())

    def check_honest_served(self) -> None:
        """Whoever else comes is served."""
        with self.connect(HONEST) as client:
            assert client.query("select 7") == [["select 7"]]

    def wait_until_gone(self, users: Sequence[str]) -> None:
        """No session of theirs is left at the server, and no permit in the ledger."""
        wait_until(lambda: not any(map(self.server.alive, users)), "the server's sessions end", GONE_SECONDS)
        wait_until(lambda: not any(each.user in users for each in self.watch.now().values()),
                   "the permits are free", GONE_SECONDS)

    def workers_never_failed(self) -> None:
        """Not one of them found a bug of ours."""
        log = self.running.fleet.log.read_text(errors="replace")
        assert "something_failed" not in log, log[log.index("something_failed") - 300 :][:3000]
        assert "Traceback" not in log


def all_at_once(cases: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run each in a thread; name: what it returned."""
    with ThreadPoolExecutor(len(cases)) as threads:
        running = {name: threads.submit(case) for name, case in cases.items()}
        return {name: each.result() for name, each in running.items()}


MakeScripted = Callable[..., ScriptedFleet]


@pytest.fixture(scope="module")
def make_scripted(make_shared_fleet: MakeFleet, etcd: Etcd) -> Iterator[MakeScripted]:
    """make_scripted(users, more={section: {…}}) → a fleet of one worker in front of a scripted server."""
    with ExitStack() as running:

        def make(users: Sequence[str], more: Mapping[str, Mapping[str, Any]] | None = None) -> ScriptedFleet:
            server = running.enter_context(ScriptedServer())
            word = PASSWORD.decode()
            database = Database(cast(Any, None), DBNAME, HONEST, word, MONITOR, word)
            running_fleet = make_shared_fleet(
                database, etcd, hosts=(server.address,), workers=1, permits=500,
                also=dict.fromkeys(users, word), more={"auth": {"type": "trust"}, **(more or {})})
            plan = running_fleet.fleet.plan
            watch = LedgerWatch(
                etcd.endpoints[0], FleetKeys(plan.more["etcd"]["prefix"], plan.name), plan.ledger)
            made = ScriptedFleet(server, running_fleet, watch)
            server.script_for = made.script_for
            return made

        yield make
