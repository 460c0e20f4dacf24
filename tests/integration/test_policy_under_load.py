"""A policy is published, promoted and rolled back while clients work: none of them hears of it, and what is
held is never more than the larger generation allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import trio
import yaml

from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.record import Alias, Kind
from coordinator.ledger.rules import session_of
from coordinator.policy import decode_document
from coordinator.store.api import Put, Store, Txn
from coordinator.store.etcd import open_etcd
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import http_get
from tests.integration.test_shrink import working
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until
from tests.support.watching import audit_is_clean, server_pids

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

SMALL, LARGE, CLIENTS = 4, 8, 8
MORE = {"pool": {"default_pool_size": 20, "query_wait_timeout": "60s", "server_idle_timeout": "1h",
                 "server_lifetime": "2h"}}


@dataclass
class Ground:
    """A fleet, its policies in etcd and at the server."""

    fleet: RunningFleet
    etcd: Etcd
    keys: DbKeys
    most: int = 0
    over: Event = field(default_factory=Event)

    def policy(self, *words: object, code: int = 0) -> str:
        """A `pooler policy` command that must end so; what it printed."""
        done = self.fleet.fleet.command("policy", *map(str, words))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def publish(self, generation: int, slots: int, code: int = 0) -> str:
        """As the active one, with another number of permits; what the command printed."""
        document = self._ask(self._document) | {"generation": generation, "serverSessionPermits": slots}
        document["executionClasses"] = {"interactive": {"permits": slots, "maxQueue": 5000}}
        file = Path(self.fleet.fleet.plan.directory) / f"generation-{generation}.yaml"
        file.write_text(yaml.safe_dump(document))
        return self.policy("publish", file, code=code)

    async def _document(self, store: Store) -> dict[str, Any]:
        alias = Alias.decode((await store.read(self.keys.alias())).entries[0].value)
        return decode_document((await store.read(self.keys.policy(alias.granting))).entries[0].value)

    def generations(self) -> list[int]:
        """Of the sessions of clients that there are."""
        found: list[int] = self._ask(self._generations)
        return found

    async def _generations(self, store: Store) -> list[int]:
        entries = (await store.range(self.keys.sessions(Kind.MAIN))).entries
        return [session_of(entry).policy_generation for entry in entries]

    def held_at_most(self, after: int) -> int:
        """The most slots that were held at once since this revision, at which none was."""
        most: int = self._ask(self._held_at_most, after)
        return most

    async def _held_at_most(self, store: Store, after: int) -> int:
        last, prefix = self.keys.sessions(Kind.MAIN) + "end", self.keys.sessions(Kind.MAIN)
        await store.txn(Txn(puts=(Put(last, b""),)))
        held: set[str] = set()
        most = 0
        async with store.watch(prefix, after=after) as changes:
            async for batch in changes:
                for change in sorted(batch, key=lambda each: (each.revision, each.entry is not None)):
                    if change.key == last:
                        await store.txn(Txn(deletes=(last,)))
                        return most
                    (held.discard if change.entry is None else held.add)(change.key)
                    most = max(most, len(held))
        raise AssertionError("the watch ended")

    def revision(self) -> int:
        """Of etcd, now."""
        async def ask(store: Store) -> int:
            return (await store.read(self.keys.alias())).revision

        now: int = self._ask(ask)
        return now

    def _ask(self, act: Callable[..., Any], *args: Any) -> Any:
        async def ask() -> Any:
            async with open_etcd(self.etcd.endpoints) as store:
                return await act(store, *args)

        return trio.run(ask)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Meanwhile `most` becomes the most sessions that the server shows at once."""
        def look() -> None:
            while not self.over.wait(0.05):
                self.most = max(self.most, len(server_pids(self.fleet)))

        thread = Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()

    def told_by_workers(self) -> set[float]:
        """The generation in the metrics of each worker."""
        fleet = self.fleet.fleet
        ports = range(fleet.ports.worker_http, fleet.ports.worker_http + fleet.plan.workers)
        pages = [http_get(port, "/metrics")[1] for port in ports]
        return {float(line.split()[-1]) for page in pages for line in page.splitlines()
                if line.startswith("pooler_policy_generation{")}


@pytest.fixture
def start(
    make_fleet: MakeFleet, etcd: Etcd, etcd_prefix: str, postgres_newest: Database
) -> Callable[..., Ground]:
    """A fleet with few permits for many clients; `role` of its database. Those who read have sessions that
    are renewed: with as many executions as sessions nobody needs one more."""
    def make(role: str = "write") -> Ground:
        pool = MORE["pool"] | ({} if role == "write" else {"server_lifetime": "3s"})
        fleet = make_fleet(postgres_newest, etcd, permits=SMALL, workers=2, more={"pool": pool}, start=False)
        settings = yaml.safe_load(fleet.config.read_text())
        settings["databases"][postgres_newest.dbname]["role"] = role
        if role != "write":
            settings.pop("services", None)
        fleet.config.write_text(yaml.safe_dump(settings))
        keys = FleetKeys(etcd_prefix, fleet.fleet.plan.name).db(fleet.fleet.plan.ledger)
        fleet.fleet.start()
        return Ground(fleet, etcd, keys)

    return make


@pytest.mark.timeout(240)
def test_publish_promote_and_roll_back_under_clients_that_never_stop(start: Callable[..., Ground]) -> None:
    on = start()
    db, load, since = on.fleet.database.dbname, working(on.fleet, CLIENTS), on.revision()
    with load.running(), on.counted():
        load.goes_on()
        assert "(max_connections " in on.publish(9, 50_000, code=1)  # the server has no room for it
        assert f'ALTER DATABASE "{db}" CONNECTION LIMIT' in on.publish(2, LARGE)
        on.policy("shadow", db, 2)
        load.goes_on()
        assert on.policy("promote", db, 2).startswith(f"{on.fleet.fleet.plan.ledger}: generation 2 is active")
        wait_until(lambda: len(on.generations()) > SMALL, "it grows without a restart", 30)
        wait_until(lambda: on.told_by_workers() == {2}, "the workers tell the generation", 10)
        on.policy("rollback", db)
        assert set(on.generations()) <= {1}
        wait_until(lambda: on.told_by_workers() == {1}, "the workers tell the one before", 10)
        load.goes_on()
        assert len(on.generations()) <= SMALL
        on.policy("promote", db, 2)
        on.publish(3, SMALL)
        on.policy("promote", db, 3)
        wait_until(lambda: len(on.generations()) <= SMALL, "it shrinks", 40)
        load.goes_on()
        on.policy("rollback", db)
        assert set(on.generations()) <= {1, 2}
        load.goes_on()
        shown = json.loads(on.policy("show", db, "--json"))
        assert (shown["active"], shown["generations"]) == (2, [1, 2, 3])
    assert load.faults == []
    assert on.held_at_most(since) <= LARGE
    assert on.most <= LARGE
    assert "session_permit_gone" not in on.fleet.fleet.log.read_text()
    wait_until(lambda: audit_is_clean(on.fleet), "the audit is clean", 30)


@pytest.mark.timeout(240)
def test_a_takeover_of_reads_and_its_end_under_clients_that_never_stop(start: Callable[..., Ground]) -> None:
    on = start("read")
    db, load, since = on.fleet.database.dbname, working(on.fleet, CLIENTS), on.revision()
    with load.running(), on.counted():
        load.goes_on()
        on.publish(2, LARGE)
        on.policy("shadow", db, 2)
        on.policy("takeover", db, 2, "--fraction", "0.5")
        wait_until(lambda: {1, 2} <= set(on.generations()), "both generations grant", 40)
        load.goes_on()
        on.policy("rollback", db)
        assert set(on.generations()) <= {1}
        load.goes_on()
        assert len(on.generations()) <= SMALL
    assert load.faults == []
    assert on.held_at_most(since) <= LARGE
    assert on.most <= LARGE
    wait_until(lambda: audit_is_clean(on.fleet), "the audit is clean", 30)
