"""A policy gets fewer slots under load: idle sessions stay what they are in lower slots, the rest goes as it
falls idle, nobody gets one beyond what is left, and no client notices."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgpack
import psycopg
import pytest
import trio

from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.record import Alias, Kind
from coordinator.ledger.rules import session_of
from coordinator.store.api import Change, Put, Store, Txn, Won, unchanged
from coordinator.store.etcd import open_etcd
from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.load import Load
from tests.support.postgres import Database
from tests.support.wait import wait_until
from tests.support.watching import audit_is_clean, server_pids

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

PERMITS = 10
CLIENTS = 10
MORE = {"pool": {"query_wait_timeout": "60s", "server_idle_timeout": "1h", "server_lifetime": "2h"}}


@dataclass
class Policy:
    """The policy of a running fleet, as it stands in etcd."""

    etcd: Etcd
    keys: DbKeys
    number: int = 1

    def shrink(self, slots: int) -> int:
        """Another generation with so many slots is active; the revision since when."""
        self.number += 1
        revision: int = self._ask(self._publish, slots)
        return revision

    async def _publish(self, store: Store, slots: int) -> int:
        before = (await store.read(self.keys.policy(1))).entries[0]
        document = msgpack.unpackb(before.value) | {"generation": self.number, "serverSessionPermits": slots}
        document["executionClasses"] = {
            name: each | {"permits": min(slots, each["permits"])}
            for name, each in document["executionClasses"].items()}
        entry = (await store.read(self.keys.alias())).entries[0]
        outcome = await store.txn(Txn(
            (unchanged(entry.key, entry.mod_revision),),
            (Put(self.keys.policy(self.number), msgpack.packb(document)),
             Put(entry.key, Alias(self.number).encode()))))
        assert isinstance(outcome, Won)
        return outcome.revision

    def sessions(self) -> dict[int, int]:
        """pid by slot."""
        found: dict[int, int] = self._ask(self._sessions)
        return found

    async def _sessions(self, store: Store) -> dict[int, int]:
        entries = (await store.range(self.keys.sessions(Kind.MAIN))).entries
        return {session.slot: session.pid for session in map(session_of, entries)}

    def grants(self, after: int, held: set[int], slots: int) -> list[str]:
        """What was granted since, other than there may be, to who held these slots then."""
        return faults_of(self._ask(self._history, after), held, slots)

    async def _history(self, store: Store, after: int) -> list[Change]:
        """What was written to the slots since, in order."""
        last = Put(self.keys.sessions() + "end", b"")
        await store.txn(Txn(puts=(last,)))
        found: list[Change] = []
        async with store.watch(self.keys.sessions(), after=after) as changes:
            async for batch in changes:
                found += batch
                if any(change.key == last.key for change in batch):
                    break
        await store.txn(Txn(deletes=(last.key,)))
        return [change for change in found if change.key != last.key]

    def _ask(self, act: Callable[..., Any], *args: Any) -> Any:
        async def ask() -> Any:
            async with open_etcd(self.etcd.endpoints) as store:
                return await act(store, *args)

        return trio.run(ask)


def working(fleet: RunningFleet, clients: int) -> Load:
    """Clients that are in a transaction nearly all the time."""
    return Load(fleet.dsn(), clients, "select pg_sleep(0.02)", in_blocks=True, pause_seconds=0)


@pytest.fixture
def start(
    make_fleet: MakeFleet, etcd: Etcd, etcd_prefix: str, postgres_newest: Database
) -> Callable[[], tuple[RunningFleet, Policy]]:
    """A fleet of 10 permits and two workers, and its policy."""
    def make() -> tuple[RunningFleet, Policy]:
        fleet = make_fleet(postgres_newest, etcd, permits=PERMITS, workers=2, more=MORE)
        keys = FleetKeys(etcd_prefix, fleet.fleet.plan.name).db(fleet.fleet.plan.ledger)
        return fleet, Policy(etcd, keys)

    return make


def fill(fleet: RunningFleet, policy: Policy) -> dict[int, int]:
    """All permits have a session, all idle; pid by slot."""
    with ExitStack() as stack:
        for _ in range(PERMITS):
            stack.enter_context(psycopg.connect(fleet.dsn())).execute("select 1")
    sessions = policy.sessions()
    assert sorted(sessions) == list(range(PERMITS))
    return sessions


def is_full(sessions: dict[int, int]) -> bool:
    """Every permit has an open session."""
    return len(sessions) == PERMITS and all(sessions.values())


def coordinator_pid(fleet: RunningFleet) -> int:
    status = json.loads(fleet.fleet.command("fleet", "status", "--json").stdout)
    return next(int(each["pid"]) for each in status["processes"] if each["role"] == "coordinator")


def end(fleet: RunningFleet, *pids: int) -> None:
    """The server ends these sessions."""
    with psycopg.connect(fleet.database.dsn(), autocommit=True) as connection:
        for pid in pids:
            connection.execute("select pg_terminate_backend(%s)", (pid,))


def faults_of(history: list[Change], held: set[int], slots: int) -> list[str]:
    """Every grant of a slot that the policy does not have, or while such a slot was held."""
    faults = []
    for _, changes in groupby(history, lambda change: change.revision):
        before, grants = set(held), []
        for change in changes:
            slot = int(change.key.rpartition("/")[2])
            if change.entry is None:
                held.discard(slot)
            elif slot not in before:
                held.add(slot)
                session = session_of(change.entry)
                grants += [] if session.left_slots else [slot]
        if grants and max(before | set(grants)) >= slots:
            faults.append(f"{grants} were granted while {sorted(before)} were held")
    return faults


@pytest.mark.timeout(120)
def test_idle_sessions_go_on_in_lower_slots_as_the_same_backends(
    start: Callable[[], tuple[RunningFleet, Policy]]
) -> None:
    fleet, policy = start()
    sessions = fill(fleet, policy)
    end(fleet, *(sessions[slot] for slot in range(4)))
    wait_until(lambda: sorted(policy.sessions()) == [4, 5, 6, 7, 8, 9], "the low slots are free", 20)
    kept = server_pids(fleet)
    policy.shrink(6)
    wait_until(lambda: sorted(policy.sessions()) == list(range(6)), "all stand in low slots", 20)
    assert set(policy.sessions().values()) == kept == server_pids(fleet)
    with psycopg.connect(fleet.dsn()) as client:
        client.execute("select 1")
    assert server_pids(fleet) == kept
    wait_until(lambda: audit_is_clean(fleet), "the audit is clean", 30)


@pytest.mark.timeout(120)
def test_a_session_in_the_middle_of_a_transaction_goes_on_in_a_lower_slot(
    start: Callable[[], tuple[RunningFleet, Policy]]
) -> None:
    fleet, policy = start()
    with ExitStack() as stack:
        clients = [stack.enter_context(psycopg.connect(fleet.dsn())) for _ in range(PERMITS)]
        pids = {int(client.execute("select pg_backend_pid()").fetchall()[0][0]): client for client in clients}
        sessions = policy.sessions()
        assert set(sessions.values()) == set(pids)
        for slot in range(PERMITS - 2):
            pids[sessions[slot]].close()
        end(fleet, *(sessions[slot] for slot in range(PERMITS - 2)))
        wait_until(lambda: len(policy.sessions()) == 2, "two are left", 20)
        policy.shrink(3)
        wait_until(lambda: sorted(policy.sessions()) == [0, 1], "they have moved", 20)
        for slot in (8, 9):
            client = pids[sessions[slot]]
            assert client.execute("select pg_backend_pid()").fetchall() == [(sessions[slot],)]
            client.commit()
    wait_until(lambda: audit_is_clean(fleet), "the audit is clean", 30)


@pytest.mark.timeout(180)
def test_under_constant_traffic_the_rest_goes_as_it_falls_idle_and_it_grows_again_later(
    start: Callable[[], tuple[RunningFleet, Policy]]
) -> None:
    fleet, policy = start()
    load = working(fleet, CLIENTS)
    with load.running():
        wait_until(lambda: len(policy.sessions()) == PERMITS, "every permit is in use", 30)
        since = policy.shrink(4)
        held = set(range(PERMITS))
        wait_until(lambda: max(policy.sessions()) < 4, "the high slots are left", 40)
        load.goes_on()
        wait_until(lambda: len(server_pids(fleet)) <= 4, "no more than 4 sessions", 10)
        assert max(policy.sessions()) < 4
        assert policy.grants(since, held, 4) == []
        wait_until(lambda: audit_is_clean(fleet), "the audit is clean", 30)
        policy.shrink(PERMITS)
        wait_until(lambda: len(policy.sessions()) > 4, "it grows again", 30)
        load.goes_on()
    assert load.faults == []
    log = fleet.fleet.log.read_text()
    assert "session_permit_gone" not in log
    wait_until(lambda: audit_is_clean(fleet), "the audit is clean at the end", 30)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", ["coordinator", "worker"])
def test_who_is_killed_in_the_middle_of_it_leaves_nothing_behind(
    start: Callable[[], tuple[RunningFleet, Policy]], killed: str
) -> None:
    fleet, policy = start()
    load = working(fleet, CLIENTS)
    with load.running():
        wait_until(lambda: is_full(policy.sessions()), "every permit is in use", 30)
        low = [pid for slot, pid in policy.sessions().items() if slot < 2]
        policy.shrink(5)
        end(fleet, *low)  # room for some to move to
        if killed == "worker":
            fleet.kill_worker(0)
        else:
            os.kill(coordinator_pid(fleet), signal.SIGKILL)
        # one that was being opened by who is dead is proven unborn after twice authentication_timeout
        wait_until(lambda: max(policy.sessions()) < 5, "the high slots are left", 60)
        wait_until(lambda: len(server_pids(fleet)) <= 5, "no more than 5 sessions", 10)
    wait_until(lambda: audit_is_clean(fleet), "the audit is clean", 60)
    told = ("terminating connection", "server closed the connection")  # of a session that was ended here
    lost = [fault for fault in load.faults if not any(word in fault for word in told)]
    assert killed == "worker" or (lost == [] and len(load.faults) <= len(low)), load.faults
    assert "session_permit_gone" not in fleet.fleet.log.read_text()
