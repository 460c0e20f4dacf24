"""The first start of a ledger, and every start after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from coordinator.founding import Founder
from coordinator.http import not_ready
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Alias, Epoch, EpochState, LedgerHead, LedgerState
from coordinator.ledger.states import SessionState
from coordinator.policy import decode_policy, encode_policy, load_policy
from coordinator.rebuild import Rebuilder, order_rebuild
from coordinator.remembered import Remembered
from coordinator.spec import DatabaseSpec, Monitor
from coordinator.store.api import Put, Txn
from coordinator.store.memory import MemoryStore
from coordinator.view import View, Views
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import DB, NO_FENCE, FakeEyes, Server, row
from tests.ledger.ground import BACKEND, FLEET, KEYS

STANDBY = "127.0.0.1:5433"
HOSTS = (STANDBY, BACKEND.address)


GOOD = policy_text(db=DB)


def database(policy: str | None = GOOD, role: str = "write", monitor: bool = True) -> DatabaseSpec:
    login = Monitor("m", "p") if monitor else None
    return DatabaseSpec(DB, "shop", "app", HOSTS, role, policy, login)


class Start:
    """A host that starts: its views, its founder and what it sees."""

    def __init__(self, run_dir: Path, store: MemoryStore, *specs: DatabaseSpec) -> None:
        self.eyes = FakeEyes()
        self.eyes.servers[STANDBY] = Server(replace(BACKEND, in_recovery=True))
        known = Remembered(run_dir)
        self.views = Views(store, FLEET, [DB], known, ttl_seconds=5.0)
        self.founder = Founder(store, FLEET, {DB: specs}, self.eyes, remembered=known, now_us=lambda: 0)

    async def run(self) -> View:
        for _ in range(3):
            await self.views.refresh()
            await self.founder.found(self.views.views[DB])
        await self.views.refresh()
        return self.views.views[DB]


async def test_a_first_start_makes_head_epoch_and_policy_at_the_primary(tmp_path: Path) -> None:
    store = MemoryStore()
    view = await Start(tmp_path, store, database()).run()
    assert view.complete
    assert view.epoch is not None
    assert (view.epoch.number, view.epoch.backend) == (1, BACKEND)
    assert view.head is not None
    assert len(view.head.tag) == 8
    assert (view.state, not_ready({DB: view})) == ("ACTIVE", [])
    assert decode_policy(store.keyspace.entries[KEYS.policy(1)].value).server_session_permits == 4


async def test_a_second_start_changes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    await Start(tmp_path, store, database()).run()
    revision = store.keyspace.revision
    with capture_logs() as logs:
        await Start(tmp_path, store, database()).run()
    assert store.keyspace.revision == revision
    assert "policy_differs" not in [line["event"] for line in logs]


async def test_a_policy_file_that_differs_is_reported_once_and_the_active_one_holds(tmp_path: Path) -> None:
    store = MemoryStore()
    await Start(tmp_path, store, database()).run()
    with capture_logs() as logs:
        view = await Start(tmp_path, store, database(policy_text(9, db=DB))).run()
    assert [line["event"] for line in logs].count("policy_differs") == 1
    assert view.policy is not None
    assert view.policy.server_session_permits == 4


async def test_of_two_primaries_it_begins_at_the_one_that_was_promoted_last(tmp_path: Path) -> None:
    start = Start(tmp_path, MemoryStore(), database())
    start.eyes.servers[STANDBY] = Server(BACKEND)  # the first of the hosts, and stale
    start.eyes.servers[BACKEND.address] = Server(replace(BACKEND, timeline=2))
    view = await start.run()
    assert view.epoch is not None
    assert (view.epoch.backend.address, view.epoch.backend.timeline) == (BACKEND.address, 2)


async def test_a_read_ledger_begins_at_a_standby_where_there_is_one(tmp_path: Path) -> None:
    view = await Start(tmp_path, MemoryStore(), database(role="read")).run()
    assert view.epoch is not None
    assert view.epoch.backend.address == STANDBY


@pytest.mark.parametrize(
    ("spec", "missing", "why"),
    [
        (database(policy=None), "policy", "no policy file"),
        (database(policy="schema: x"), "policy", "schema: 'x'"),
        (database(policy=policy_text(db="other/write")), "policy", "the file is for 'other/write'"),
    ],
)
async def test_what_is_missing_is_said_once_and_shown_by_readyz(
    tmp_path: Path, spec: DatabaseSpec, missing: str, why: str
) -> None:
    with capture_logs() as logs:
        view = await Start(tmp_path, MemoryStore(), spec).run()
    assert not_ready({DB: view}) == [f"{DB}: no {missing} yet"]
    assert [why in line["why"] for line in logs if line["event"] == "policy_refused"] == [True]


async def test_a_policy_that_its_server_cannot_hold_is_not_published_until_it_fits(
    tmp_path: Path, clock: MockClock
) -> None:
    store = MemoryStore()
    start = Start(tmp_path, store, database())  # 4 permits and an admin reserve of 1
    start.eyes.server.max_connections, start.eyes.server.reserved_connections = 7, 3
    with capture_logs() as logs:
        view = await start.run()
    assert not_ready({DB: view}) == [f"{DB}: no policy yet"]
    (why,) = [line["why"] for line in logs if line["event"] == "policy_refused"]
    assert f"{BACKEND.address} has room for 4 sessions (max_connections 7, 3 of them reserved)" in why
    assert f"{DB} 5 sessions" in why
    start.eyes.server.max_connections = 8
    with trio.move_on_after(60):
        await trio.sleep_forever()
    assert (await start.run()).complete


async def test_a_policy_is_refused_where_another_ledger_has_taken_the_room(
    tmp_path: Path, clock: MockClock
) -> None:
    """Also one that this config does not know: it is of the same cluster."""
    start, other = Start(tmp_path, store := MemoryStore(), database()), FLEET.db("other/read")
    start.eyes.server.max_connections = 9
    backend = replace(BACKEND, address="127.0.0.1:9")
    await store.txn(Txn(puts=(
        Put(other.alias(), Alias(1).encode()),
        Put(other.epoch(), Epoch(1, EpochState.ACTIVE, backend, 0, "test").encode()),
        Put(other.policy(1), encode_policy(load_policy(policy_text(4, db="other/read"))[1])))))
    with capture_logs() as logs:
        await start.run()
    (why,) = [line["why"] for line in logs if line["event"] == "policy_refused"]
    assert "other/read 5" in why
    assert f"{DB} 5" in why


async def test_servers_out_of_reach_keep_no_policy_from_being_published(tmp_path: Path) -> None:
    start = Start(tmp_path, MemoryStore(), database())
    for server in start.eyes.servers.values():
        server.unreachable, server.max_connections = True, 1
    assert (await start.run()).policy is not None


async def test_without_a_primary_there_is_no_epoch_until_one_appears(tmp_path: Path) -> None:
    store = MemoryStore()
    start = Start(tmp_path, store, database())
    start.eyes.server.unreachable = True
    with capture_logs() as logs:
        view = await start.run()
    assert view.epoch is None
    (said,) = [line["why"] for line in logs if line["event"] == "no_backend_found"]
    assert "unreachable" in said
    assert f"{STANDBY}: is in recovery" in said
    start.eyes.server.unreachable = False
    assert (await start.run()).complete


async def test_without_a_monitor_the_first_host_is_taken_on_trust_with_a_warning(tmp_path: Path) -> None:
    with capture_logs() as logs:
        view = await Start(tmp_path, MemoryStore(), database(monitor=False)).run()
    assert view.epoch is not None
    assert view.epoch.backend.address == STANDBY
    assert "on trust" in next(line["why"] for line in logs if line["event"] == "no_backend_found")


async def test_sessions_that_were_there_before_the_ledger_are_named(tmp_path: Path) -> None:
    start = Start(tmp_path, MemoryStore(), database())
    start.eyes.server.rows = [row(1, 1), row(2, 2)]
    with capture_logs() as logs:
        await start.run()
    (said,) = [line for line in logs if line["event"] == "ledger_strangers_at_start"]
    assert said["sessions_by_role"] == {"app": 2}


@pytest.mark.parametrize(("user", "state"), [("app", "RECOVERING"), ("cron", "ACTIVE")])
async def test_a_ledger_that_finds_sessions_of_its_roles_counts_them_before_it_grants(
    tmp_path: Path, user: str, state: str
) -> None:
    store = MemoryStore()
    start = Start(tmp_path, store, replace(database(), dbname="app", users=("app",)))
    start.eyes.server.rows = [replace(row(7, 70), user=user)]
    assert (await start.run()).state == state
    ledger = Ledger(store, KEYS, FLEET, lambda: 0)
    rebuilder = Rebuilder(store, start.views, {DB: ledger}, {DB: (replace(database(), users=("app",)),)},
                          start.eyes, now_us=lambda: 0)
    for _ in range(2):
        await rebuilder.step(DB, NO_FENCE)
    await start.views.refresh()
    assert start.views.views[DB].state == "ACTIVE"
    held = [each.session for each in (await ledger.snapshot()).sessions]
    assert [(each.pid, each.state) for each in held] == (
        [(7, SessionState.UNKNOWN)] if user == "app" else [])


@pytest.mark.parametrize("loss", ["wiped", "rewound", "another"])
async def test_a_ledger_that_is_not_the_one_seen_before_is_lost_also_after_a_restart(
    tmp_path: Path, clock: MockClock, loss: str
) -> None:
    store = MemoryStore()
    start = Start(tmp_path, store, database())
    view = await start.run()
    if loss == "wiped":
        store.keyspace.entries.clear()
    elif loss == "rewound":
        store.keyspace.revision -= 2
    else:
        head = store.keyspace.entries[KEYS.ledger()]
        assert view.head is not None
        other = replace(view.head, incarnation="other").encode()
        store.keyspace.entries[KEYS.ledger()] = replace(head, value=other)
    for again in (start, Start(tmp_path, store, database())):
        view = await again.run()
        assert view.state == "LOST"
        assert "lost" in not_ready({DB: view})[0]
    assert (KEYS.ledger() in store.keyspace.entries) == (loss != "wiped")  # nobody founded it anew


async def test_two_hosts_that_start_at_once_found_one_ledger(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = Start(tmp_path / "a", store, database()), Start(tmp_path / "b", store, database())
    for start in (a, b):
        await start.views.refresh()
    assert await a.founder.found(a.views.views[DB])
    await b.founder.found(b.views.views[DB])
    assert (await a.run()).head == (await b.run()).head
    assert Alias.decode(store.keyspace.entries[KEYS.alias()].value).active == 1


async def test_a_generation_that_is_published_already_becomes_active_if_the_file_says_the_same(
    tmp_path: Path, clock: MockClock
) -> None:
    """An alias that is gone comes back; a file with other content under that number takes no place."""
    store = MemoryStore()
    await Start(tmp_path, store, database()).run()
    await store.txn(Txn(deletes=(KEYS.alias(),)))
    other = await Start(tmp_path, store, database(policy_text(3, db=DB))).run()
    assert other.alias is None
    assert (await Start(tmp_path, store, database()).run()).alias == Alias(1)


@pytest.mark.parametrize(("hosts", "kept"), [(HOSTS, 2), (HOSTS[1:], 0)])
async def test_what_a_founded_policy_keeps_for_a_failover_depends_on_its_hosts(
    tmp_path: Path, clock: MockClock, hosts: tuple[str, ...], kept: int
) -> None:
    spec = replace(database(policy_text(20, db=DB)), hosts=hosts)
    view = await Start(tmp_path, MemoryStore(), spec).run()
    assert view.policy is not None
    assert (view.policy.failover_slots, view.policy.resolved.hosts) == (kept, hosts)


def at(generation: int, slots: int) -> str:
    return policy_text(slots, db=DB).replace("generation: 1", f"generation: {generation}")


@pytest.mark.parametrize("loss", ["wiped", "restored"])
async def test_a_rebuild_keeps_the_policy_that_was_in_force_whatever_the_file_says(
    tmp_path: Path, clock: MockClock, loss: str
) -> None:
    store = MemoryStore()
    start = Start(tmp_path, store, database(at(1, 3)))
    await start.run()
    older = store.keyspace.clone()
    second = encode_policy(load_policy(at(2, 2))[1])
    await store.txn(Txn(puts=(Put(KEYS.policy(2), second), Put(KEYS.alias(), Alias(2, previous=1).encode()))))
    seen = await start.run()
    assert seen.policy is not None
    assert seen.policy.server_session_permits == 2
    if loss == "wiped":
        store.keyspace.entries.clear()
    else:
        store.keyspace = older
    again = Start(tmp_path, store, database(at(1, 3)))  # of a later life
    assert (await again.run()).state == "LOST"
    await order_rebuild(store, FLEET, DB, again.views._access[DB].memory.seen, who="me", evidence="x",
                        now_us=lambda: 5)
    view = await again.run()
    assert view.state == "RECOVERING"
    assert view.policy is not None
    assert (view.policy.generation, view.policy.server_session_permits) == (2, 2)
    assert store.keyspace.entries[KEYS.policy(2)].value == second


async def test_a_policy_that_was_published_since_is_not_put_back_by_what_a_host_remembers(
    tmp_path: Path, clock: MockClock
) -> None:
    store = MemoryStore()
    known = Remembered(tmp_path)
    known.keep_policy(DB, 1, encode_policy(load_policy(at(1, 3))[1]))
    start = Start(tmp_path, store, database(at(2, 2)))
    head = LedgerHead("i", LedgerState.RECOVERING, "t", rebuilt="1-x")
    second = encode_policy(load_policy(at(2, 2))[1])
    await store.txn(Txn(puts=(Put(KEYS.ledger(), head.encode()), Put(KEYS.policy(2), second),
                              Put(KEYS.alias(), Alias(2).encode()))))
    view = await start.run()
    assert view.alias == Alias(2)
