"""Where a scenario happens: a PostgreSQL with exactly as many ordinary slots as the budget, etcd, a fleet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.ledger.keys import FleetKeys
from pooler.demo import schema
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import Fleet, FleetPlan
from pooler.demo.ledgerwatch import LedgerWatch
from pooler.demo.parts import Parked
from pooler.demo.postgres import (
    MONITOR_GRANTS,
    RESERVED_CONNECTIONS_SINCE,
    Limits,
    Role,
    Server,
    newest,
    temporary_directory,
)

DBNAME, USER, MONITOR, CONSOLE = "shop", "shop_web", "pooler_monitor", "stats"
PASSWORD = "chaos-password"  # of a server on loopback that lives as long as the scenario
ADMIN_RESERVE, REAPERS, RESERVED = 2, 1, 3


@dataclass(slots=True)
class World:
    """Everything that runs."""

    directory: Path
    server: Server
    etcd: Etcd
    fleet: Fleet
    watch: LedgerWatch
    parked: Parked

    @property
    def port(self) -> int:
        return self.fleet.ports.listen


@contextmanager
def world(
    *, permits: int, workers: int, others: Sequence[str] = (),
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[World]:
    """Start it, stop it. `others`: more roles with PASSWORD; `more`: of pooler.yaml. Raises PartFailed."""
    directory = temporary_directory("chaos")
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        installation = newest()
        limits = Limits.exact(permits, ADMIN_RESERVE + REAPERS,
                              reserved=RESERVED if installation.version >= RESERVED_CONNECTIONS_SINCE else 0)
        server = Server.create(installation, directory / "server", limits=limits, settings=schema.SETTINGS)
        ends.callback(server.stop, immediate=True)
        server.start()
        for name in (USER, *others):
            server.create_role(Role(name, PASSWORD))
        server.create_role(Role(MONITOR, PASSWORD, MONITOR_GRANTS))
        server.create_database(DBNAME, USER)
        schema.create_schema(server, DBNAME)
        parked = Parked(server, ADMIN_RESERVE, DBNAME)
        parked.park()
        ends.callback(parked.leave)
        (directory / "etcd").mkdir()
        etcd = Etcd(directory / "etcd")
        ends.callback(etcd.kill)
        etcd.start()
        fleet = Fleet(FleetPlan(
            directory / "fleet", (f"127.0.0.1:{server.port}",), DBNAME,
            dict.fromkeys((USER, *others, CONSOLE), PASSWORD),
            tuple(etcd.endpoints), (MONITOR, PASSWORD), name="chaos", workers=workers, permits=permits,
            admin_reserve=ADMIN_RESERVE, more={"etcd": {"lease_ttl": "2s"}, **(more or {})}))
        fleet.write()
        ends.callback(fleet.stop)
        fleet.start()
        watch = LedgerWatch(etcd.endpoints[0], FleetKeys("pooler", "chaos"), fleet.plan.ledger)
        watch.start()
        yield World(directory, server, etcd, fleet, watch, parked)
