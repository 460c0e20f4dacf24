"""on_ledger_loss: a worker that is cut off from the ledger serves on, or, if told so, grants nothing more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg
import pytest

from tests.support.etcd import MakeEtcd
from tests.support.fleet import MakeFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

LEASE_SECONDS = 2.0
STILL_SECONDS = 2.0


class Client:
    """One that asks all the time on one connection."""

    def __init__(self, dsn: str) -> None:
        self.done = 0
        self.faults: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(dsn,))
        self._thread.start()

    def _work(self, dsn: str) -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                while not self._over.wait(0.01):
                    connection.execute("select 1")
                    self.done += 1
        except psycopg.Error as fault:
            self.faults.append(str(fault))

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def stands_still(self) -> Callable[[], bool]:
        """Whether nothing has been answered for a while."""
        last, since = self.done, time.monotonic()

        def asked() -> bool:
            nonlocal last, since
            if self.done != last:
                last, since = self.done, time.monotonic()
            return time.monotonic() - since > STILL_SECONDS

        return asked


@pytest.mark.timeout(180)
@pytest.mark.parametrize("choice", ["serve", "stop"])
def test_without_the_ledger_it_serves_on_or_stops_when_its_lease_is_over_and_goes_on_with_the_next(
    make_etcd: MakeEtcd, make_fleet: MakeFleet, postgres_newest: Database, choice: str
) -> None:
    etcd = make_etcd()
    fleet = make_fleet(postgres_newest, etcd, workers=1, more={
        "failover": {"on_ledger_loss": choice}, "etcd": {"lease_ttl": f"{LEASE_SECONDS:g}s"},
        "pool": {"query_wait_timeout": "60s"}})
    with psycopg.connect(fleet.dsn()) as held:
        held.execute("select 1")
        client = Client(fleet.dsn())
        try:
            wait_until(lambda: client.done > 50, "it is served", 20)
            etcd.stop()
            stopped_at = client.done
            if choice == "stop":
                wait_until(client.stands_still(), "it waits", 30)
            else:
                until = time.monotonic() + 2 * LEASE_SECONDS
                wait_until(lambda: time.monotonic() > until, "its lease is over", 30)
            held.execute("select 1")  # who has a session goes on with it
            etcd.start()
            now = client.done
            wait_until(lambda: client.done > now + 50, "it is served", 40)
        finally:
            client.end()
        assert client.faults == []
        assert stopped_at < now
