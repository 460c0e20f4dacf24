"""Where a scenario happens: a PostgreSQL with exactly as many ordinary slots as the budget, etcd, a fleet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.cable import Cable
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
FLEET, LEASE_SECONDS = "chaos", 2.0
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
    cables: Sequence[Cable] = ()  # between the fleet and each etcd member

    @property
    def port(self) -> int:
        return self.fleet.ports.listen


@contextmanager
def world(
    *, permits: int, workers: int, others: Sequence[str] = (),
    more: Mapping[str, Mapping[str, Any]] | None = None, members: int = 1, cabled: bool = False,
) -> Iterator[World]:
    """Start it, stop it. Raises PartFailed.

    `others`: more roles with PASSWORD; `more`: of pooler.yaml; `members`: of etcd, which the fleet reaches
    over cables if `cabled`.
    """
    directory = temporary_directory("chaos")
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        server = start_server(directory, ends, permits=permits, others=others)
        parked = Parked(server, ADMIN_RESERVE, DBNAME)
        parked.park()
        ends.callback(parked.leave)
        etcd = start_etcd(directory, ends, members)
        cables = [Cable(member.client_port) for member in etcd.members] if cabled else []
        for cable in cables:
            ends.callback(cable.close)
        fleet = start_fleet(
            directory / "fleet", ends, [server], [cable.endpoint for cable in cables] or etcd.endpoints,
            workers=workers, permits=permits, others=others, more=more or {})
        watch = LedgerWatch(etcd.endpoints, FleetKeys("pooler", FLEET), fleet.plan.ledger)
        watch.start()
        yield World(directory, server, etcd, fleet, watch, parked, cables)


def start_server(
    directory: Path, ends: ExitStack, *, permits: int, others: Sequence[str] = (), reapers: int = REAPERS,
) -> Server:
    """With the roles and the demonstration's schema, and exactly the slots that are spoken for."""
    installation = newest()
    limits = Limits.exact(permits, ADMIN_RESERVE + reapers,
                          reserved=RESERVED if installation.version >= RESERVED_CONNECTIONS_SINCE else 0)
    server = Server.create(installation, directory / "server", limits=limits,
                           settings=schema.SETTINGS)
    ends.callback(server.stop, immediate=True)
    server.start()
    for name in (USER, *others):
        server.create_role(Role(name, PASSWORD))
    server.create_role(Role(MONITOR, PASSWORD, MONITOR_GRANTS))
    server.create_database(DBNAME, USER)
    schema.create_schema(server, DBNAME)
    return server


def start_etcd(directory: Path, ends: ExitStack, members: int = 1) -> Etcd:
    (directory / "etcd").mkdir()
    etcd = Etcd(directory / "etcd", members=members)
    ends.callback(etcd.kill)
    etcd.start()
    return etcd


def start_fleet(
    directory: Path, ends: ExitStack, servers: Sequence[Server], endpoints: Sequence[str], *, workers: int,
    permits: int, others: Sequence[str] = (), more: Mapping[str, Mapping[str, Any]],
) -> Fleet:
    """In front of the servers, the primary first; its log and its run directory are below `directory`."""
    fleet = Fleet(FleetPlan(
        directory, tuple(f"127.0.0.1:{server.port}" for server in servers), DBNAME,
        dict.fromkeys((USER, *others, CONSOLE), PASSWORD), tuple(endpoints), (MONITOR, PASSWORD),
        name=FLEET, workers=workers, permits=permits, admin_reserve=ADMIN_RESERVE,
        more={"etcd": {"lease_ttl": f"{LEASE_SECONDS:g}s"}, **more}))
    fleet.write()
    ends.callback(fleet.stop)
    fleet.start()
    return fleet
