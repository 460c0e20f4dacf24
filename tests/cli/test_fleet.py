"""`pooler fleet …` against a running fleet of small children."""

from __future__ import annotations

import json

from pooler.cli.fleet import says, set_by_console
from tests.cli.conftest import Pooler
from tests.supervisor.conftest import SmallFleet


async def test_status_shows_every_process_and_says_by_its_exit_code_whether_all_serve(
    small_fleet: SmallFleet, pooler: Pooler
) -> None:
    await small_fleet.up()
    done = pooler("fleet", "status", "-c", small_fleet.config)
    assert done.code == 0, done.err
    assert done.out.startswith(f"fleet small: running, config {small_fleet.config}\n")
    assert [line.split("  ")[0] for line in done.out.splitlines()[2:]] == [
        "coordinator",
        "worker 0",
        "worker 1",
    ]
    assert max(len(line) for line in done.out.splitlines()) <= 100
    (small_fleet.folder / "die-worker-1").touch()
    answer = json.loads(pooler("fleet", "status", "--json", "-c", small_fleet.config).out)
    assert {row["state"] for row in answer["processes"]} == {"ready"}
    assert set(answer) == {
        "fleet",
        "state",
        "config",
        "started_at",
        "processes",
        "unreported_exits",
        "waiting_for_restart",
    }


async def test_a_worker_that_is_down_makes_status_exit_1(small_fleet: SmallFleet, pooler: Pooler) -> None:
    (small_fleet.folder / "die-worker-1").touch()
    await small_fleet.up()
    done = pooler("fleet", "status", "-c", small_fleet.config)
    assert done.code == 1
    assert "exit code 7" in done.out


async def test_reload_exits_by_what_became_of_the_config(small_fleet: SmallFleet, pooler: Pooler) -> None:
    await small_fleet.up()
    small_fleet.write(pool={"default_pool_size": 5})
    warned = "warning: coordinator: the policy differs\n"
    taken = pooler("fleet", "reload", "-c", small_fleet.config)
    assert (taken.code, taken.err) == (0, warned)
    small_fleet.write(http={"worker_ports": small_fleet.http + 2})
    waits = pooler("fleet", "reload", "-c", small_fleet.config)
    assert (waits.code, waits.out) == (1, "reloaded\n")
    assert waits.err == "http changed: it keeps its old value until the fleet is restarted\n" + warned


async def test_a_rolling_restart_tells_its_progress(small_fleet: SmallFleet, pooler: Pooler) -> None:
    await small_fleet.up()
    done = pooler("fleet", "restart", "--rolling", "--json", "-c", small_fleet.config)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert lines[-1] == {"code": 0, "text": "2 workers replaced"}
    assert len(lines) == 7
    assert all(set(line) == {"progress"} for line in lines[:-1])


async def test_stop_returns_when_the_fleet_has_ended(small_fleet: SmallFleet, pooler: Pooler) -> None:
    await small_fleet.up()
    done = pooler("fleet", "stop", "-c", small_fleet.config)
    assert (done.code, done.out) == (0, "stopped\n")
    assert await small_fleet.ended() == 0


def test_a_config_that_is_wrong_starts_nothing(small_fleet: SmallFleet, pooler: Pooler) -> None:
    done = pooler("fleet", "run", "-c", small_fleet.config)  # its policy has nothing but a name
    assert done.code == 2
    assert "databases.d.policy" in done.err
    assert not (small_fleet.folder / "run").exists()


def test_what_was_set_on_a_console_is_shown_once_with_the_workers_that_have_it() -> None:
    workers = [{"name": f"worker {index}", "figures": {"set": {"max_client_conn": "3"}}} for index in (0, 1)]
    others = [{"name": "coordinator", "figures": {}}, {"name": "worker 2", "figures": {"set": {}}}]
    assert set_by_console([*others, *workers]) == [
        "pool.max_client_conn is 3 by SET on worker 0, worker 1, until the next reload"]


def test_a_coordinator_says_what_is_wrong_with_a_ledger() -> None:
    ledgers = {"o/write": {"backend": "db1:5432 is read-only", "no_room": "", "no_policy": ""},
               "o/read": {"backend": "", "no_room": "", "no_policy": "the file is for 'x'"}, "old": {}}
    assert says({"text": "leads", "figures": {"ledgers": ledgers}}) == (
        "leads; o/read: the file is for 'x'; o/write: db1:5432 is read-only")
    assert says({"text": "ready", "figures": {}}) == "ready"
