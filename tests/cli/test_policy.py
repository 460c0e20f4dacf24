"""`pooler policy` as anybody types it, against a store in memory and servers that a test makes up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.ledger.notes import GrowthStop, ShadowCount
from coordinator.ledger.record import Alias, Kind
from coordinator.policy import decode_policy
from coordinator.spec import CoordinatorSpec, DatabaseSpec, Monitor
from coordinator.store.api import Put
from coordinator.store.memory import MemoryStore
from pooler.cli import reach
from pooler.cli.main import run
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import FakeEyes, Server, make_spec
from tests.ledger.ground import BACKEND, KEYS, found, session, write

DB = KEYS.database
CONFIG = """\
fleet: {name: test, workers: 1, listen: "127.0.0.1:6432"}
services: {primary: {worker_ports: 6440, database_role: write, pool_mode: transaction}}
etcd: {endpoints: ["127.0.0.1:1"]}
databases:
  orders: {hosts: ["127.0.0.1:5432"], dbname: app, policy: policy.yaml, user: app, password: x, pool_size: 3,
           monitor: {user: watcher, password: secret}}
  reports: {hosts: ["127.0.0.1:5432"], dbname: Reports, policy: policy.yaml, user: 'a"b', password: x}
auth: {type: trust}
"""


class Ground:
    """What every command here reaches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = MemoryStore(found())
        self.eyes = FakeEyes({BACKEND.address: Server(max_connections=100, reserved_connections=3)})
        self.role = "write"
        self.hosts: tuple[str, ...] = (BACKEND.address,)
        self.monitor: Monitor | None = Monitor("watcher", "secret")
        self.config = folder / "pooler.yaml"
        self.config.write_text(CONFIG)
        (folder / "policy.yaml").write_text(policy_text(db=DB))

    def file(self, generation: int, slots: int = 8, **more: object) -> str:
        """A policy file."""
        text = policy_text(slots, db=DB).replace("generation: 1", f"generation: {generation}")
        path = self.folder / f"generation-{generation}.yaml"
        path.write_text(text + "".join(f"{name}: {value}\n" for name, value in more.items()))
        return str(path)

    def spec(self) -> CoordinatorSpec:
        each = DatabaseSpec(DB, "orders", "app", self.hosts, self.role, None, self.monitor)
        return make_spec(self.folder, databases=(each,))

    @property
    def alias(self) -> Alias:
        return Alias.decode(self.store.keyspace.entries[KEYS.alias()].value)

    def command(self, *words: object) -> int:
        """With the config."""
        return run(["policy", *map(str, words), "-c", str(self.config)])


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    ground = Ground(tmp_path)

    @asynccontextmanager
    async def open_store(spec: CoordinatorSpec) -> AsyncIterator[MemoryStore]:
        yield ground.store

    @asynccontextmanager
    async def eyes(self: reach.Reached, db: str) -> AsyncIterator[Any]:
        yield ground.eyes

    monkeypatch.setattr(reach, "open_store", open_store)
    monkeypatch.setattr(reach.Where, "spec", lambda self: ground.spec())
    monkeypatch.setattr(reach.Reached, "eyes", eyes)
    assert ground.command("publish", ground.file(2)) == 0
    return ground


@pytest.fixture(autouse=True)
def forget(on: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()


def test_validate_reads_nothing_but_the_file(on: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    file = on.file(7)
    assert run(["policy", "validate", file]) == 0
    assert capsys.readouterr().out == f"{file}: {DB}, generation 7: ok\n"
    assert run(["policy", "validate", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": file, "ok": True, "faults": [], "database": DB, "generation": 7}


def test_every_fault_of_a_file_has_its_line_and_both_numbers(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    file = on.file(7, 4, failoverPermits=9, hardConnectionLimit=3, otherClients=1)
    for command in ("validate", "publish"):
        assert run(["policy", command, file]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert "is 6, but hardConnectionLimit is 3" in lines[0]
        assert "failoverPermits is 9, but serverSessionPermits is 4" in lines[1]
    assert run(["policy", "validate", str(on.folder / "none.yaml")]) == 1
    assert "none.yaml: No such file" in capsys.readouterr().err


def test_publish_prints_the_connection_limits_that_go_with_it(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on.command("publish", on.file(3, 10, otherClients=5)) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (f"{DB}: generation 3 published; generation 1 is active; next: pooler policy shadow "
                      f"(or promote) {DB} 3")
    assert out[2:] == [
        'ALTER ROLE "a""b" CONNECTION LIMIT 10;',  # a pool of 20, of which the permits allow 10
        'ALTER ROLE "app" CONNECTION LIMIT 3;',
        'ALTER ROLE "watcher" CONNECTION LIMIT 3;',  # an admin reserve of 1, the leader and its successor
        'ALTER DATABASE "Reports" CONNECTION LIMIT 18;',  # 10 + 1 + 5 others, and those two
        'ALTER DATABASE "app" CONNECTION LIMIT 18;',
    ]
    assert on.alias == Alias(1)


def test_publishing_it_again_is_no_fault_and_with_other_content_names_the_difference(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on.command("publish", on.file(2)) == 0
    assert "generation 2 is published already, with the same content" in capsys.readouterr().out
    assert on.command("publish", on.file(2, 9)) == 1
    assert "serverSessionPermits 9 (published: 8)" in capsys.readouterr().err


def test_a_policy_that_a_server_has_no_room_for_is_not_published(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    on.eyes.server.max_connections = 20
    assert on.command("publish", on.file(3, 30, replicationReserve=4)) == 1
    assert ("has room for 17 sessions (max_connections 20, 3 of them reserved), but the policies want "
            f"{DB} 31") in capsys.readouterr().err
    on.eyes.server.unreachable = True
    assert on.command("publish", on.file(3, 10)) == 1
    assert "no server could be looked at" in capsys.readouterr().err
    assert KEYS.policy(3) not in on.store.keyspace.entries


def test_without_a_monitor_it_is_published_unseen_and_that_is_told(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    on.monitor, on.eyes.server.unreachable = None, True
    assert on.command("publish", on.file(3)) == 0
    assert "warning: the servers were not looked at" in capsys.readouterr().err


def test_what_a_generation_keeps_for_a_failover_depends_on_where_it_can_go(on: Ground) -> None:
    on.hosts = (BACKEND.address, "127.0.0.1:5433")
    assert on.command("publish", on.file(3, 20)) == 0
    for generation, kept in ((2, 0), (3, 2)):
        stored = decode_policy(on.store.keyspace.entries[KEYS.policy(generation)].value)
        assert stored.failover_slots == kept


def test_the_way_to_the_front_and_back(on: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    on.role = "read"
    steps: list[tuple[list[object], Alias, str]] = [
        (["shadow", DB, 2], Alias(1, 2), "generation 1 is active; generation 2 decides beside it (shadow)"),
        (["takeover", DB, 2], Alias(1, 2, 0.05), "generation 2 grants 0.05 of the requests"),
        (["takeover", DB, 2, "--fraction", "0.5"], Alias(1, 2, 0.5), "generation 2 grants 0.5"),
        (["promote", "orders", 2], Alias(2, previous=1), "generation 2 is active; before: 1"),
        (["rollback", "orders"], Alias(1), "generation 1 is active"),
    ]
    for words, alias, text in steps:
        assert on.command(*words) == 0
        assert on.alias == alias
        assert text in capsys.readouterr().out
    assert on.command("rollback", DB) == 1
    assert "nothing to roll back" in capsys.readouterr().err


def test_traffic_that_writes_is_not_taken_over(on: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    assert on.command("shadow", DB, 2) == 0
    assert on.command("takeover", DB, 2) == 1
    assert "only traffic that reads is taken over in part" in capsys.readouterr().err
    assert on.alias == Alias(1, 2)


def test_a_generation_is_held_beside_the_servers_again_before_it_grants(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    on.eyes.server.max_connections = 10
    assert on.command("promote", DB, 2) == 1
    assert "has room for 7 sessions" in capsys.readouterr().err
    assert on.alias == Alias(1)


def test_a_rollback_that_is_not_over_in_time_says_what_it_waits_for_and_goes_on_later(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    write(on.store.keyspace, Put(KEYS.alias(), Alias(2, previous=1).encode()),
          Put(KEYS.session(Kind.MAIN, 0), session(policy_generation=2, seat=-1).encode()))
    assert on.command("rollback", DB, "--timeout", "300ms") == 4
    told = capsys.readouterr()
    assert told.out.splitlines() == [f"{DB}: generation 2 grants nothing any more: 1 sessions to end"]
    assert f"`pooler policy rollback {DB}` goes on" in told.err
    assert on.alias == Alias(2, previous=1, withdrawn=2)
    assert on.command("promote", DB, 2) == 1
    assert "generation 2 is being rolled back" in capsys.readouterr().err
    write(on.store.keyspace, deletes=(KEYS.session(Kind.MAIN, 0),))
    assert on.command("rollback", DB) == 0
    assert on.alias == Alias(1)


def test_show_prints_every_value_in_effect_and_whether_it_was_given(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["promote", DB, 2], ["publish", on.file(3)], ["shadow", DB, 3]):
        assert on.command(*words) == 0
    write(on.store.keyspace, Put(KEYS.shadow(3, "host"), ShadowCount(1, 2, 30).encode()),
          Put(KEYS.growth(), GrowthStop("no room", 0).encode()))
    capsys.readouterr()
    assert on.command("show", DB) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines() if "no room" not in line)
    assert "generation 2 is active; generation 3 decides beside it (shadow); before: 1" in out
    assert "published: 1, 2, 3" in out
    assert "both would grant 30, only_active 1, only_shadow 2" in out
    assert "nothing more is granted: no room" in out
    rows = [line.split() for line in out.split("generation 2:")[1].splitlines()]
    for row in (["serverSessionPermits", "8", "given"], ["failoverPermits", "0", "default"],
                ["hardConnectionLimit", "97", "default"], ["poolMode", "transaction", "default"],
                ["executionClasses.interactive.queueDeadline", "10s", "default"],
                ["executionClasses.interactive.waitBudgetP99", "100ms", "default"],
                ["executionClasses.interactive.maxQueue", "100", "given"]):
        assert row in rows
    assert on.command("show", DB, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["active"], shown["shadow"], shown["generations"]) == (2, 3, [1, 2, 3])
    assert shown["shadow_decisions"] == {"only_active": 1, "only_shadow": 2, "both": 30}
    assert {"name": "adminReserve", "value": 1, "source": "given"} in shown["values"]["2"]


@pytest.mark.parametrize("fraction", ["2", "nan", "0", "-0.1", "inf"])
def test_a_fraction_that_is_none_is_wrong_usage_before_anything_is_reached(
    fraction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["policy", "takeover", DB, "2", "--fraction", fraction, "--etcd", "http://127.0.0.1:1",
                "--fleet", "x"]) == 2
    assert "must be above 0 and at most 1" in capsys.readouterr().err


def test_a_rollback_that_is_not_over_in_time_says_so_in_json(
    on: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    write(on.store.keyspace, Put(KEYS.alias(), Alias(2, previous=1).encode()),
          Put(KEYS.session(Kind.MAIN, 0), session(policy_generation=2, seat=-1).encode()))
    assert on.command("rollback", DB, "--timeout", "300ms", "--json") == 4
    assert json.loads(capsys.readouterr().out) == {"database": DB, "timed_out": True}


def test_a_policy_of_brackets_is_a_fault_of_the_file_and_no_internal_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 20_000)
    assert run(["policy", "validate", str(tmp_path / "deep.yaml")]) == 1
    assert "nested over 50 levels" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["fence", "abc"], ["freeze", "orders"], ["thaw", "orders"]])
def test_empty_evidence_is_wrong_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", *command, "--evidence", " "]) == 2
    assert "--evidence: is empty" in capsys.readouterr().err
