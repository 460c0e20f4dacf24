"""One fleet for each version of PostgreSQL and each test process, with a pool of every mode."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from pooler.demo.client import RawClient
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import Fleet, FleetPlan
from pooler.demo.postgres import Server, temporary_directory
from tests.differential.players import WAIT_SECONDS, Watch
from tests.support.postgres import VERSIONS, Database, create_server, make_database

if not os.environ.get("POOLER_DIFFERENTIAL_SCRIPT"):
    collect_ignore = ["test_kept_script.py"]
PERMITS = 8
POOLS = {  # suffix of the database's name: its mode and its number of sessions
    "": ("transaction", 2),
    "_one": ("transaction", 1),
    "_session": ("session", 5),
    "_statement": ("statement", 2),
}


@dataclass(frozen=True, slots=True)
class Rig:
    """A server and a fleet in front of it."""

    database: Database
    fleet: Fleet
    watch: Watch

    def straight(self, **startup: str) -> RawClient:
        """At the server itself, over its local socket."""
        base = self.database
        return RawClient(str(base.server.directory), base.port, WAIT_SECONDS).login(
            base.user, base.password, base.dbname, **startup)

    def pooled(self, pool: str = "", **startup: str) -> RawClient:
        """Through one of POOLS."""
        base = self.database
        return RawClient("127.0.0.1", self.fleet.ports.listen, WAIT_SECONDS).login(
            base.user, base.password, base.dbname + pool, **startup)

    def superuser(self) -> RawClient:
        """At the server, in the same database."""
        return local_superuser(self.database)


def local_superuser(database: Database) -> RawClient:
    """Over the local socket, where it is trusted."""
    server = database.server
    return RawClient(str(server.directory), server.port, 30).login("postgres", "", database.dbname)


def fleet_plan(database: Database, etcd: Etcd, **more: Any) -> FleetPlan:
    """Written into a directory of its own; `more` are sections of pooler.yaml."""
    sections: dict[str, Any] = {
        "etcd": {"prefix": f"diff-{secrets.token_hex(6)}"}, "pool": {"query_wait_notify": 0}, **more}
    return FleetPlan(
        temporary_directory("diff"), (database.address,), database.dbname,
        {database.user: database.password, "admin": "console"}, tuple(etcd.endpoints),
        (database.monitor, database.monitor_password), name="differential", workers=1, permits=PERMITS,
        more=sections)


class PooledFleet(Fleet):
    """A fleet whose database has a pool of every mode, each under a ledger of its own."""

    def write(self) -> None:
        super().write()
        for pool in POOLS:
            policy = {**self._policy(), "database": f"{self.plan.dbname}{pool}-primary/write"}
            (self.plan.directory / _policy_file(self.plan.dbname + pool)).write_text(yaml.safe_dump(policy))

    def settings(self) -> dict[str, Any]:
        values = super().settings()
        (entry,) = values["databases"].values()
        name = self.plan.dbname
        values["databases"] = {
            name + pool: {**entry, "policy": _policy_file(name + pool), "pool_mode": mode, "pool_size": size}
            for pool, (mode, size) in POOLS.items()}
        return values


def _policy_file(name: str) -> str:
    return f"policies/{name}.yaml"


@pytest.fixture(scope="session")
def make_rig(etcd: Etcd) -> Iterator[Callable[[int], Rig]]:
    """version → its rig, made when first asked for, with a server of its own: its fleet lives on beside
    whatever tests come next."""
    rigs: dict[int, Rig] = {}
    base = temporary_directory("rig")
    with ExitStack() as running:
        running.callback(shutil.rmtree, base)

        def start_server(version: int) -> Server:
            server = create_server(base / str(version), version)
            running.callback(server.stop, immediate=True)
            return server

        def make(version: int) -> Rig:
            if version not in rigs:
                database = make_database(start_server(version))
                fleet = PooledFleet(fleet_plan(database, etcd))
                running.callback(shutil.rmtree, fleet.plan.directory)
                fleet.write()
                running.callback(_stop, fleet)
                fleet.start()
                watch = running.enter_context(closing(Watch(local_superuser(database))))
                rigs[version] = Rig(database, fleet, watch)
            return rigs[version]

        yield make


def _stop(fleet: Fleet) -> None:
    left = fleet.stop()
    if fleet.log.exists():
        print(f"--- log of the fleet\n{fleet.log.read_text(errors='replace')[-4000:]}")  # noqa: T201  shown on failure
    assert not left, f"processes were left behind: {left}"


@pytest.fixture(params=VERSIONS, ids=lambda version: f"pg{version}")
def rig(request: pytest.FixtureRequest, make_rig: Callable[[int], Rig]) -> Rig:
    """Once for each version."""
    return make_rig(request.param)


@pytest.fixture
def newest(make_rig: Callable[[int], Rig]) -> Rig:
    """At the newest version."""
    return make_rig(VERSIONS[-1])
