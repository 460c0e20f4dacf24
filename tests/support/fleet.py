"""Fixture of a whole running fleet in front of a test's database; it leaves no process behind or fails."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.fleet import Fleet, FleetPlan
from pooler.demo.postgres import temporary_directory
from tests.support.postgres import Database


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """A fleet and the database it serves."""

    fleet: Fleet
    database: Database

    @property
    def config(self) -> Path:
        return self.fleet.config

    @property
    def port(self) -> int:
        """The shared port."""
        return self.fleet.ports.listen

    def dsn(self, port: int | None = None, **more: str) -> str:
        """Through the fleet as the application's role."""
        base = {"host": "127.0.0.1", "user": self.database.user, "password": self.database.password,
                "dbname": self.database.dbname, "connect_timeout": "10", "sslmode": "disable"}
        return psycopg.conninfo.make_conninfo(**{**base, "port": str(port or self.port), **more})

    def console(self, user: str = "admin") -> str:
        """To the admin console."""
        return self.dsn(user=user, password="console", dbname="pooler")

    def kill_worker(self, index: int) -> int:
        """SIGKILL; returns the pid it had."""
        pid = self.fleet.worker_pids()[index]
        os.kill(pid, signal.SIGKILL)
        return pid


MakeFleet = Callable[..., RunningFleet]


@pytest.fixture
def make_fleet(etcd_prefix: str) -> Iterator[MakeFleet]:
    """make_fleet(database, etcd, permits=10, workers=2, more={section: {…}}, env={…}) → a ready fleet."""
    yield from _fleets(etcd_prefix)


@pytest.fixture(scope="module")
def make_shared_fleet() -> Iterator[MakeFleet]:
    """The same for fleets that all tests of a module use: none of them stops or changes one. What it leaves
    open takes permits of another fleet that starts before the same database: let each have its own."""
    yield from _fleets(f"test-{secrets.token_hex(6)}")


def _fleets(etcd_prefix: str) -> Iterator[MakeFleet]:
    base = temporary_directory("fleet")
    running: list[RunningFleet] = []

    def make(
        database: Database, etcd: Etcd, *, env: Mapping[str, str] | None = None, start: bool = True,
        hosts: tuple[str, ...] = (), also: Mapping[str, str] | None = None, name: str = "",
        more: Mapping[str, Mapping[str, Any]] | None = None, **plan: Any,
    ) -> RunningFleet:
        sections = {**(more or {})}
        sections["etcd"] = {"prefix": etcd_prefix, **sections.get("etcd", {})}
        users = {database.user: database.password, "admin": "console", "stats": "console", **(also or {})}
        fleet = Fleet(FleetPlan(
            base / f"f{len(running)}", hosts or (database.address,), database.dbname, users,
            tuple(etcd.endpoints), (database.monitor, database.monitor_password),
            name=name or f"test{len(running)}", more=sections, **plan))
        fleet.write()
        made = RunningFleet(fleet, database)
        running.append(made)
        if start:
            fleet.start(env=env)
        return made

    yield make
    left = {each.fleet.plan.name: each.fleet.stop() for each in running}
    logs = {each.fleet.plan.name: each.fleet.log for each in running if each.fleet.log.exists()}
    for name, log in logs.items():
        print(f"--- log of fleet {name}\n{log.read_text(errors='replace')[-8000:]}")  # noqa: T201  shown on failure
    shutil.rmtree(base)
    assert not any(left.values()), f"processes were left behind: {left}"
