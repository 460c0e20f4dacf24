"""Commands on a real fleet connect under admin permits; whatever they leave behind is freed with proof."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.fleet import import_path
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

# holds an admin permit and its session until it is killed
HOLDER = """
import sys, trio
from pathlib import Path
from pooler.cli.reach import Where, reach

async def hold():
    async with reach(Where(Path(sys.argv[1]))) as reached:
        async with reached.eyes(reached.db(sys.argv[2])) as eyes:
            await eyes.look(sys.argv[3])
            print("looked", flush=True)
            await trio.sleep_forever()

trio.run(hold)
"""


@pytest.fixture
def one_role(make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd) -> RunningFleet:
    """A fleet whose monitor is the role of its pool."""
    database = postgres_newest
    database.server.execute(f'GRANT pg_monitor TO "{database.user}"')
    same = replace(database, monitor=database.user, monitor_password=database.password)
    return make_fleet(same, etcd, permits=4, admin_reserve=1, more={"etcd": {"lease_ttl": "2s"}})


def audit(fleet: RunningFleet) -> tuple[int, dict[str, Any]]:
    done = fleet.fleet.command("ledger", "audit", fleet.database.dbname, "--json")
    return done.returncode, json.loads(done.stdout) if done.stdout else {"said": done.stderr}


def names(database: Database) -> set[str]:
    rows = database.server.execute(
        "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'pooler:%'")
    return {str(name) for name, in rows}


def test_the_reaper_and_the_audits_own_session_are_accounted_for_though_their_role_is_a_pools(
    one_role: RunningFleet,
) -> None:
    with psycopg.connect(one_role.dsn(), autocommit=True) as client:
        client.execute("SELECT 1")
        code, found = audit(one_role)
        assert (code, found["differences"]) == (0, [])
        assert (found["held"], found["admin_held"], found["admin_slots"]) == (1, 1, 1)
        assert any(name.endswith(":reaper") for name in names(one_role.database))
        wait_until(lambda: not [name for name in names(one_role.database) if ":new:" in name],
                   "the reaper bears its ledger's tag", 20)


def test_a_command_says_who_holds_the_permits_and_one_that_was_killed_leaves_nothing(
    one_role: RunningFleet,
) -> None:
    database = one_role.database
    arguments = [sys.executable, "-c", HOLDER, str(one_role.config), database.dbname, database.address]
    with subprocess.Popen(arguments, env={"PYTHONPATH": import_path()}, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"looked\n"
            [name] = [name for name in names(database) if ":a0." in name]
            code, told = audit(one_role)
            assert code == 1
            assert "no admin permit of" in told["said"]
            assert f"admin/{name.rpartition(':a')[2]} (OPEN, owner command-" in told["said"]
            drained = one_role.fleet.command("drain", database.dbname)
            assert (drained.returncode, "no admin permit of" in drained.stderr) == (1, True)
        finally:  # whatever failed: it would be waited for
            holder.send_signal(signal.SIGKILL)
    wait_until(lambda: audit(one_role)[0] == 0, "the permit of the killed command is free", 30)
    assert '"proof": "absent"' in one_role.fleet.log.read_text()
    wait_until(lambda: not list(one_role.fleet.run_dir.rglob("commands/command-*")),
               "its death is on record", 10)
