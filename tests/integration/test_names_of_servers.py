"""A server that is named: its address may change, and who says it may be slow or fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
import yaml

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.nameserver import NameServer
from tests.support.postgres import MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

NAME = "db.fleet.test"
WHERE = "select host(inet_server_addr())"
SLOW_SECONDS = 3.0
OTHERS_WAIT_SECONDS_MAX = 1.5  # on a busy machine; far below SLOW_SECONDS and below the resolver's patience


class Healthy:
    """A client that works without a pause on the session that it has; `slowest` of its answers so far."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self._stop = threading.Event()
        self.slowest = 0.0
        self.answers = 0
        self.failed: list[psycopg.Error] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(20)

    def _work(self) -> None:
        with psycopg.connect(self._fleet.dsn()) as client:  # all in one transaction: no other session will do
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    client.execute("select 1")
                except psycopg.Error as failed:
                    self.failed.append(failed)
                    return
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.answers += 1


@pytest.mark.timeout(120)
def test_a_new_address_is_used_and_a_slow_or_failing_resolver_holds_up_nobody_else(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd, name_server: NameServer, tmp_path: Path
) -> None:
    """R77."""
    low = f"{os.getpid() >> 8 & 255}.{max(1, os.getpid() & 255)}"
    old, new = f"127.54.{low}", f"127.55.{low}"
    server = make_server(settings={"listen_addresses": f"127.0.0.1,{old},{new}"})
    database = make_database(server)
    name_server.names[NAME] = old
    fleet = make_fleet(database, etcd, hosts=(f"{NAME}:{server.port}",), permits=6, workers=1, start=False)
    by_address = add_database_by_address(fleet)
    fleet.fleet.start(by=name_server.argv(tmp_path))
    healthy = Healthy(fleet)
    with healthy.at_work(), ExitStack() as stack:

        def where(dbname: str = database.dbname) -> str:
            """The address that one more session came to; it is in a transaction from here on."""
            client = stack.enter_context(psycopg.connect(fleet.dsn(dbname=dbname)))
            [address] = client.execute(WHERE).fetchone() or ["none"]
            return str(address)

        assert where() == old
        name_server.names[NAME] = new
        assert where() == new
        asked = name_server.asked
        name_server.open.clear()
        threading.Timer(SLOW_SECONDS, name_server.open.set).start()
        late = threading.Thread(target=where)
        late.start()
        wait_until(lambda: name_server.asked > asked, "the resolver is asked", 10)
        began = time.monotonic()
        assert where(by_address) == "127.0.0.1"
        assert time.monotonic() - began < OTHERS_WAIT_SECONDS_MAX
        assert not name_server.open.is_set()
        late.join(20)
        assert not late.is_alive()
        name_server.fails = True
        failing = threading.Thread(target=where)
        failing.start()
        wait_until(lambda: "cannot resolve" in fleet.fleet.log.read_text(), "a look-up has failed", 10)
        name_server.fails = False
        failing.join(20)
        assert not failing.is_alive()
        assert healthy.slowest < OTHERS_WAIT_SECONDS_MAX
    assert healthy.failed == []
    assert healthy.answers > 100


def add_database_by_address(fleet: RunningFleet) -> str:
    """Another database of the fleet, at the same server, with a ledger of its own."""
    folder, name = fleet.config.parent, fleet.database.dbname
    beside = f"{name}_beside"
    policy = yaml.safe_load((folder / "policies" / f"{name}.yaml").read_text())
    policy["database"] = f"{beside}-primary/write"
    (folder / "policies" / f"{beside}.yaml").write_text(yaml.safe_dump(policy))
    settings = yaml.safe_load(fleet.config.read_text())
    settings["databases"][beside] = {
        **settings["databases"][name], "hosts": [fleet.database.address],
        "policy": f"policies/{beside}.yaml"}
    fleet.config.write_text(yaml.safe_dump(settings))
    return beside
