"""`pooler init`: the files fit the server, start a fleet and never overwrite."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from coordinator.policy import load_policy
from pooler.cli.first_files import Login, ServerFacts, ServerTooSmall, divide, first_files
from pooler.settings import load
from tests.cli.conftest import Pooler
from tests.support.postgres import Database

FACTS = ServerFacts(["db1:5432"], "Orders DB", "postgres", True, 160004, 100, 3, 2, 4, False)
APP, MONITOR, CONSOLE = (
    Login(name, f"word of {name}", f"SCRAM-SHA-256$of {name}")
    for name in ("orders_app", "pooler_monitor", "admin")
)


def written(folder: Path, facts: ServerFacts = FACTS) -> dict[str, str]:
    for file in first_files(facts, APP, MONITOR, CONSOLE):
        (folder / file.name).parent.mkdir(exist_ok=True)
        (folder / file.name).write_text(file.text)
    return {file.name: file.text for file in first_files(facts, APP, MONITOR, CONSOLE)}


def test_the_budget_leaves_reserves_and_the_sessions_of_others_alone() -> None:
    budget = divide(FACTS)
    assert (budget.permits, budget.admin_reserve, budget.others) == (87, 4, 4)
    assert budget.permits + budget.admin_reserve + budget.others == FACTS.ordinary == 95


def test_a_server_without_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(ServerTooSmall, match="gives 95 ordinary connections, others use 94"):
        divide(replace(FACTS, others=94))


@pytest.mark.parametrize("facts", [FACTS, replace(FACTS, in_recovery=True), replace(FACTS, dbname="yes")])
def test_what_is_written_is_a_sound_config_with_a_sound_policy(tmp_path: Path, facts: ServerFacts) -> None:
    written(tmp_path, facts)
    settings = load(tmp_path / "pooler.yaml")
    database = settings.databases[facts.dbname]
    policy, _ = load_policy(database.policy.text)
    assert policy.server_session_permits == 87
    assert database.role == ("read" if facts.in_recovery else "write")
    assert database.monitor is not None
    assert database.monitor.password is not None
    assert database.monitor.password.get_secret_value() == MONITOR.password


def test_roles_have_verifiers_only_and_reserved_connections_from_16_on(tmp_path: Path) -> None:
    roles = written(tmp_path)["roles.sql"]
    assert "word of" not in roles
    assert 'GRANT pg_use_reserved_connections TO "pooler_monitor";' in roles
    assert 'ALTER ROLE "orders_app" LOGIN CONNECTION LIMIT 87' in roles
    assert "pg_use_reserved" not in written(tmp_path, replace(FACTS, version=150004))["roles.sql"]


def test_quotes_in_names_stay_inside_their_names(tmp_path: Path) -> None:
    odd = replace(FACTS, dbname="o\"d'd")
    roles = written(tmp_path, odd)["roles.sql"]
    assert 'ON DATABASE "o""d\'d"' in roles
    assert load(tmp_path / "pooler.yaml").databases.keys() == {"o\"d'd"}


@pytest.mark.postgres
def test_a_real_server_is_read_and_its_roles_can_be_made(
    pooler: Pooler, postgres: Database, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    superuser = postgres.server.dsn("postgres", postgres.dbname)
    done = pooler("init", "--dsn", superuser, "--dir", folder, "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert {Path(path).name for path in answer["written"]} == {
        "pooler.yaml",
        f"{postgres.dbname.replace('_', '-')}.yaml",
        "userlist.txt",
        "monitor.secret",
        "roles.sql",
        "haproxy.cfg",
    }
    for secret in ("userlist.txt", "monitor.secret", "roles.sql"):
        assert stat.S_IMODE((folder / secret).stat().st_mode) == 0o600
    assert pooler("config", "check", folder / "pooler.yaml").code == 0
    with psycopg.connect(superuser, autocommit=True) as server:
        for _ in range(2):  # it may be run again
            server.execute((folder / "roles.sql").read_bytes())
    settings = load(folder / "pooler.yaml")
    monitor = settings.databases[postgres.dbname].monitor
    assert monitor is not None
    assert monitor.password is not None
    word = monitor.password.get_secret_value()
    with psycopg.connect(postgres.server.dsn(monitor.user, postgres.dbname, password=word)) as seen:
        [row] = seen.execute("SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')").fetchall()
        assert row == (True,)
    again = pooler("init", "--dsn", superuser, "--dir", folder)
    assert again.code == 2
    assert "nothing was written (--force overwrites)" in again.err
    assert pooler("init", "--dsn", superuser, "--dir", folder, "--force").code == 0


@pytest.mark.postgres
def test_an_ordinary_role_of_the_dsn_becomes_the_application(
    pooler: Pooler, postgres_newest: Database, tmp_path: Path
) -> None:
    done = pooler("init", "--dsn", postgres_newest.dsn(), "--dir", tmp_path)
    assert done.code == 0, done.err
    assert postgres_newest.password not in done.out
    assert f'"{postgres_newest.user}" "{postgres_newest.password}"' in (tmp_path / "userlist.txt").read_text()
    assert f'ALTER ROLE "{postgres_newest.user}" CONNECTION LIMIT' in (tmp_path / "roles.sql").read_text()


def test_a_server_that_does_not_answer_is_one_line_and_nothing_is_written(
    pooler: Pooler, tmp_path: Path
) -> None:
    done = pooler("init", "--dsn", "postgresql://u:hush@127.0.0.1:1/d", "--dir", tmp_path)
    assert done.code == 1
    assert done.err.startswith("pooler: the server cannot be read: ")
    assert len(done.err.splitlines()) == 1
    assert "hush" not in done.err
    assert list(tmp_path.iterdir()) == []
