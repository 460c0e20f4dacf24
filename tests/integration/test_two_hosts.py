"""Two supervisors on two loopback addresses are two hosts of one fleet: the budget holds over both, and the
whole death of either is reconciled by the other."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from coordinator.ledger.keys import FleetKeys
from pooler.demo.etcd import Etcd
from pooler.demo.ledgerwatch import LedgerWatch
from pooler.demo.postgres import Limits, Server
from pooler.demo.process import free_ports, started_at
from pooler.demo.serverlog import overlap_max, refusals_from_log, sessions_from_log
from pooler.wire.cancel_keys import SECRET_BYTES_SHORT, ordinal_of
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.load import Clients
from tests.support.postgres import Database, MakeServer, make_database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

FLEET, ADDRESSES = "twohosts", {"host-a": "127.0.0.1", "host-b": "127.0.0.2"}
PERMITS, CLIENTS = 8, 10
ADMIN_RESERVE = REAPERS = 1
MORE = {"etcd": {"lease_ttl": "2s"}, "pool": {"query_wait_timeout": "20s", "server_idle_timeout": "2s"}}


@dataclass
class Hosts:
    """Both, by name; `host-a` was first, and so leads."""

    fleets: dict[str, RunningFleet]
    watch: LedgerWatch
    server: Server

    @property
    def database(self) -> Database:
        return self.fleets["host-a"].database

    def dsn(self, host: str) -> str:
        return self.fleets[host].dsn(host=ADDRESSES[host])

    def held(self) -> Counter[str]:
        """Main permits by the host of their owner."""
        return Counter(each.host for each in self.watch.now().values() if each.kind == "main")

    def held_by_worker(self) -> Counter[str]:
        """The same by the boot id of their owner."""
        return Counter(each.owner for each in self.watch.now().values() if each.kind == "main")

    def clients_by_worker(self, loads: Iterable[Returning]) -> Counter[str]:
        """Where the clients of these loads are, by the boot id of their worker."""
        boots = {each.ordinal: each.boot_id for each in self.watch.workers()}
        return Counter(boots[ordinal] for load in loads for ordinal in load.ordinals.values())

    def kill(self, host: str) -> None:
        """SIGKILL to each process of a host, as nearly at once as can be."""
        fleet = self.fleets[host].fleet
        processes = {pid: started_at(pid) for pid in fleet.processes()}
        assert len(processes) >= 4
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert fleet.child is not None
        fleet.child.wait(10)
        wait_until(lambda: not any(started_at(pid) == at for pid, at in processes.items()), "it is dead", 10)


@pytest.fixture
def hosts(make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd, etcd_prefix: str) -> Hosts:
    server = make_server(18, limits=Limits.exact(PERMITS, ADMIN_RESERVE + REAPERS),
                         settings={"authentication_timeout": "3s"})
    database = make_database(server)
    fleets = {}
    for name, address in ADDRESSES.items():
        port = free_ports()
        more = {**MORE, "fleet": {"listen": f"{address}:{port}", "host_name": name}}
        fleets[name] = make_fleet(database, etcd, permits=PERMITS, admin_reserve=ADMIN_RESERVE, workers=2,
                                  name=FLEET, more=more)
        object.__setattr__(fleets[name].fleet.ports, "listen", port)
    ledger = fleets["host-a"].fleet.plan.ledger
    watch = LedgerWatch(etcd.endpoints, FleetKeys(etcd_prefix, FLEET), ledger)
    return Hosts(fleets, watch, server)


class Returning(Clients):
    """Clients of one host that work without a pause; those whose host is killed come again."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, CLIENTS)
        self.done = 0
        self.ordinals = dict[int, int]()  # of the worker of each that came in

    def work(self, number: int) -> None:
        while not self.over.wait(0.05):
            with suppress(psycopg.Error), psycopg.connect(self.dsn, autocommit=True) as connection:
                key = connection.info.backend_pid.to_bytes(4, "big") + bytes(SECRET_BYTES_SHORT)
                ordinal = ordinal_of(key)
                assert ordinal is not None
                self.ordinals[number] = ordinal
                while not self.over.is_set():
                    connection.execute("select pg_sleep(0.002)")
                    self.done += 1


def holds_whole_budget(hosts: Hosts, host: str) -> bool:
    """Whether all its permits can be used through one host at the same time."""
    with suppress(psycopg.Error), ExitStack() as stack:
        for _ in range(PERMITS):
            stack.enter_context(psycopg.connect(hosts.dsn(host))).execute("select 1")
        return hosts.held()[host] == PERMITS
    return False


def proofs(fleet: RunningFleet) -> Counter[str]:
    found = Counter[str]()
    for line in fleet.fleet.log.read_text(errors="replace").splitlines():
        if "session_permit_released" in line:
            said: dict[str, Any] = json.loads(line)
            found[f"{said['proof']} seen by {said['observer']}"] += 1
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("dead", "alive"), [("host-a", "host-b"), ("host-b", "host-a")],
                         ids=["the leader's", "the other's"])
def test_the_budget_holds_over_both_and_a_dead_hosts_permits_come_back_by_the_other(
    hosts: Hosts, dead: str, alive: str
) -> None:
    loads = {name: Returning(hosts.dsn(name)) for name in ADDRESSES}
    with ExitStack() as stack:
        stack.enter_context(psycopg.connect(hosts.server.dsn()))  # in the place of the admin reserve
        stack.enter_context(loads[dead].running())
        with loads[alive].running():
            wait_until(lambda: min(load.done for load in loads.values()) > 300, "both hosts serve", 40)
            assert set(hosts.held()) == set(ADDRESSES), "each has sessions of the one budget"
            hosts.kill(dead)
            before = loads[alive].done
            wait_until(lambda: not any(each.host == dead and each.pid for each in hosts.watch.now().values()),
                       "the other one has proven its sessions gone", 40)
            wait_until(lambda: loads[alive].done > before + 300, "the other one serves on", 40)
        wait_until(lambda: any(word.endswith(f"seen by {alive}") for word in proofs(hosts.fleets[alive])),
                   "the other one tells of it", 10)
        hosts.fleets[dead].fleet.start()
        after = loads[dead].done
        wait_until(lambda: loads[dead].done > after + 100, "it serves again", 40)
    wait_until(lambda: holds_whole_budget(hosts, alive), "one host can have all of it", 40)
    command = hosts.fleets[alive].fleet.command
    wait_until(lambda: command("ledger", "audit", hosts.database.dbname).returncode == 0, "it is clean", 40)
    ours = [each for each in sessions_from_log(hosts.server.log) if each.user == hosts.database.user]
    assert overlap_max(ours)[0] == PERMITS, "all of the budget was in use, and never more"
    assert refusals_from_log(hosts.server.log) == []


def share_evenly(held: Counter[str], clients: Counter[str]) -> bool:
    """Whether all is in use and no worker, of either host, has two more than one that could use another.

    How many clients a worker has is for the kernel to say, which gives each to whom it finds awake.
    """
    short = [each for each in clients if held[each] < clients[each]]
    return held.total() == PERMITS and all(held[most] - held[each] < 2 for each in short for most in held)


@pytest.mark.timeout(240)
def test_whom_another_host_left_no_permit_gets_its_share_within_seconds(hosts: Hosts) -> None:
    first, second = (Returning(hosts.dsn(host)) for host in ADDRESSES)
    held = list[Counter[str]]()

    def even() -> bool:
        held.append(hosts.held_by_worker())
        clients = hosts.clients_by_worker((first, second))
        return clients.total() == 2 * CLIENTS and share_evenly(held[-1], clients)

    with first.running():
        wait_until(lambda: hosts.held() == {"host-a": PERMITS}, "one host has them all", 30)
        with second.running():
            wait_until(even, "both have their share", 10)
            before = first.done, second.done
            wait_until(lambda: first.done > before[0] + 300 and second.done > before[1] + 300,
                       "both serve", 20)
            wait_until(even, "both have their share still", 2)
            assert all(each.total() <= PERMITS for each in held)
    ours = [each for each in sessions_from_log(hosts.server.log) if each.user == hosts.database.user]
    assert overlap_max(ours)[0] == PERMITS, "all of the budget was in use, and never more"
    assert refusals_from_log(hosts.server.log) == []
