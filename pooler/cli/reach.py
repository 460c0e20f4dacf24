"""Reaching a fleet's ledger in etcd, by its config or by --etcd and --fleet; no coordinator need be alive."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote

import trio

from coordinator.admin import NoAdminPermit, admin_permits
from coordinator.admin_eyes import AdminEyes, admin_eyes
from coordinator.ledger.access import Memory
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import LedgerState
from coordinator.opening import doors, open_store
from coordinator.remembered import MemoryUnreadable, Remembered
from coordinator.spec import CoordinatorSpec, DatabaseSpec, EtcdSpec, Monitor
from coordinator.store.api import Store
from pooler.errors import FleetUnreachable, LedgerLost, NoPermit, UsageFault
from pooler.settings import Address, Settings, coordinator_spec, find_config, load
from pooler.settings_models import FLEET_NAME

ANSWER_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Where:
    """How a command was told where the ledger is. With `etcd` and `fleet` no config is read; `monitor`, a
    DSN, is then the login of its looks."""

    config: Path | None
    etcd: str | None = None
    fleet: str | None = None
    prefix: str = "pooler"
    monitor: str | None = None

    def spec(self) -> CoordinatorSpec:
        """What a coordinator there would be. Raises UsageFault, FleetUnreachable."""
        if self.monitor is not None and self.etcd is None:
            raise UsageFault("--monitor: goes with --etcd; a config names the monitor itself")
        if self.etcd is None and self.fleet is None:
            return spec_of(load(find_config(self.config)))
        if self.etcd is None or self.fleet is None:
            raise UsageFault("--etcd and --fleet belong together: give both, or a config")
        if not re.fullmatch(FLEET_NAME, self.fleet):
            raise UsageFault(f'--fleet: "{self.fleet}" is no fleet\'s name: a to z, 0 to 9 and -, at most 24')
        return CoordinatorSpec(
            fleet=self.fleet, prefix=self.prefix, host=socket.gethostname(), machine_id="", run_dir="",
            socket="", lease_ttl_seconds=5.0, etcd=EtcdSpec(endpoints=_endpoints(self.etcd)),
            databases=() if self.monitor is None else (_by_monitor(self.monitor),))


@dataclass(slots=True)
class Reached:
    """An open store and what the command knows of the fleet."""

    spec: CoordinatorSpec
    store: Store
    keys: FleetKeys
    databases: tuple[str, ...]  # every ledger of the fleet
    memories: dict[str, Memory] = field(default_factory=dict)

    def db(self, name: str) -> str:
        """The ledger that DB means: its name, or a config database that points to it. Raises UsageFault."""
        if name in self.databases:
            return name
        for each in self.spec.databases:  # also of a ledger that is wiped
            if name in (each.name, each.db):
                return each.db
        known = sorted({*self.databases, *(each.name for each in self.spec.databases)})
        names = ", ".join(known) or "none: was the fleet ever started?"
        raise UsageFault(f"no ledger {name}; known: {names}")

    def ledger(self, db: str) -> Ledger:
        """A ledger to read and to write through; with what this host's coordinator remembers of it.

        Raises FleetUnreachable if that cannot be read.
        """
        if db not in self.memories:
            self.memories[db] = Memory(remembered(self.run_dir).seen(db) if self.run_dir else None)
        return Ledger(self.store, self.keys.db(db), self.keys, now_us, memory=self.memories[db])

    async def whole_ledger(self, db: str) -> Ledger:
        """The same, for who acts on what it says or lacks.

        Raises LedgerLost if it is not the one this host remembers, or is being rebuilt; StoreUnavailable.
        """
        ledger = self.ledger(db)
        head = (await ledger.snapshot()).head
        if ledger.lost:
            raise LedgerLost(
                f"the ledger {db} is lost: etcd was wiped or restored to an older state, and what it says "
                f"proves nothing. Nothing was done. `pooler ledger rebuild {db} --evidence '…'` makes it "
                f"anew from what the workers and the server hold")
        if head is not None and head.state is not LedgerState.ACTIVE:
            raise LedgerLost(f"the ledger {db} is being rebuilt (`pooler ledger rebuild`): nothing was done; "
                             "try again when it is ACTIVE")
        return ledger

    def specs_of(self, db: str) -> Sequence[DatabaseSpec]:
        """The config's databases that share this ledger; none with --etcd."""
        return self.spec.ledgers().get(db, ())

    @property
    def run_dir(self) -> Path | None:
        """The session tables of this host, where there are any."""
        return Path(self.spec.run_dir) if self.spec.run_dir else None

    @asynccontextmanager
    async def eyes(self, db: str) -> AsyncIterator[AdminEyes | None]:
        """A look at the servers by their monitors, under admin permits of this ledger; None where no config
        names a monitor. Raises NoPermit when none is free.
        """
        if not any(each.monitor for each in self.spec.databases):
            yield None
            return
        door = doors(self.spec, lambda _: "")  # a session's name is its permit's
        try:
            async with (
                admin_permits(
                    self.store, self.keys, self.ledger(db), host=self.spec.host,
                    machine_id=self.spec.machine_id, run_dir=self.run_dir,
                    ttl_seconds=self.spec.lease_ttl_seconds, now_us=now_us) as permits,
                admin_eyes(permits, door, provider_identity=self.spec.node_identity == "provider") as eyes,
            ):
                yield eyes
        except* NoAdminPermit as refused:
            raise NoPermit(str(first_of(refused)), "full") from None


def remembered(run_dir: Path) -> Remembered:
    """What this host knows of its ledgers. Raises FleetUnreachable if that cannot be read."""
    try:
        return Remembered(run_dir)
    except MemoryUnreadable as fault:
        raise FleetUnreachable(str(fault)) from None


def first_of(group: BaseExceptionGroup[NoAdminPermit]) -> NoAdminPermit:
    """One of the group's exceptions."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


@asynccontextmanager
async def reach(where: Where) -> AsyncIterator[Reached]:
    """Open the ledger's store. Raises UsageFault, FleetUnreachable; later asking raises StoreUnavailable."""
    spec = where.spec()
    keys = FleetKeys(spec.prefix, spec.fleet)
    async with open_store(spec) as store:
        snapshot = None
        with trio.move_on_after(ANSWER_SECONDS_MAX):
            snapshot = await store.range(keys.ledgers())
        if snapshot is None:
            raise FleetUnreachable(f"etcd at {', '.join(spec.etcd.endpoints)} did not answer in "
                                   f"{ANSWER_SECONDS_MAX:g} s")
        found = tuple(unquote(entry.key.removeprefix(keys.ledgers())) for entry in snapshot.entries)
        yield Reached(spec, store, keys, found)


def spec_of(settings: Settings) -> CoordinatorSpec:
    """The coordinator's specification, with an embedded etcd as the running one. Raises FleetUnreachable."""
    spec = CoordinatorSpec.parse(coordinator_spec(settings))
    if not spec.etcd.embedded:
        return spec
    ports = Path(spec.run_dir) / "etcd-ports.json"
    try:
        port = int(json.loads(ports.read_text(encoding="utf-8"))["client"])
    except (OSError, ValueError, KeyError, TypeError):
        raise FleetUnreachable(
            f"the embedded etcd of fleet {spec.fleet} was never started ({ports} is not there): "
            "start the fleet, or give --etcd and --fleet") from None
    endpoint = f"127.0.0.1:{port}"
    return replace(spec, etcd=replace(spec.etcd, embedded=False, endpoints=(endpoint,)))


def say_lost(db: str) -> None:
    """For commands that only show."""
    print(f"{db}: this ledger is lost (etcd was wiped or restored): what is shown proves nothing; "
          "see pooler ledger rebuild", file=sys.stderr, flush=True)


def now_us() -> int:
    """The wall clock, as stored in records: shown, never compared."""
    return time.time_ns() // 1000


def operator_name() -> str:
    """Who runs this command, for what is kept of it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _by_monitor(dsn: str) -> DatabaseSpec:
    """A database whose monitor this is, at whatever host. Raises UsageFault, without the DSN: it may hold a
    password."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        given = conninfo_to_dict(dsn)
    except ProgrammingError:
        raise UsageFault("--monitor: is no DSN (postgresql://monitor@/orders, or user=monitor dbname=orders)"
                         ) from None
    user = str(given.get("user") or getpass.getuser())
    tls = {name: str(value) for name, value in given.items() if name.startswith("ssl")}
    password = str(given.get("password") or os.environ.get("PGPASSWORD") or "")
    dbname = str(given.get("dbname") or user)
    return DatabaseSpec("", "", dbname, (), monitor=Monitor(user, password, tls))


def _endpoints(text: str) -> tuple[str, ...]:
    plain = [part.strip().removeprefix("http://").rstrip("/") for part in text.split(",")]
    try:
        return tuple(str(Address.parse(part)) for part in plain)
    except ValueError as fault:
        raise UsageFault(f"--etcd: {fault}") from None
