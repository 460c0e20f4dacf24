"""`pooler init`: the files fit the server, start a fleet and never overwrite."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from coordinator.policy import load_policy
from pooler.cli.first_files import Login, ServerFacts, ServerTooSmall, divide, first_files
from pooler.cli.first_steps import superuser_dsn
from pooler.cli.init import named_hosts
from pooler.demo.etcd import find_etcd
from pooler.demo.fleet import http_status
from pooler.demo.haproxy import find_program
from pooler.demo.postgres import Role, Server
from pooler.demo.process import Child, free_ports
from pooler.settings import load
from tests.cli.conftest import Pooler
from tests.support.need import missing
from tests.support.postgres import Database, MakeServer

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
        "pgpass",
        "roles.sql",
        "haproxy.cfg",
    }
    for secret in ("userlist.txt", "monitor.secret", "roles.sql", "pgpass"):
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


@pytest.mark.parametrize(
    ("dsn", "named"),
    [
        ("postgresql://u@db1:5433,db2/d", [("db1", 5433), ("db2", 5432)]),
        ("host=db1,db2 port=5433,5434", [("db1", 5433), ("db2", 5434)]),
        ("host=db1,db2 port=5433", [("db1", 5433), ("db2", 5433)]),
        ("host=db1,", [("db1", 5432), ("reached", 5432)]),
        ("dbname=d", [("reached", 5432)]),
    ],
)
def test_every_host_of_the_dsn_is_named(dsn: str, named: list[tuple[str, int]]) -> None:
    assert named_hosts(conninfo_to_dict(dsn), "reached", 5432) == named


@pytest.mark.postgres
def test_of_several_hosts_all_are_kept_and_the_role_is_write_where_one_is_the_primary(
    pooler: Pooler, make_server: MakeServer, make_standby: Callable[[Server], Server], tmp_path: Path
) -> None:
    primary = make_server()
    standby = make_standby(primary)
    ports = f"{standby.port},{primary.port}"
    primary.create_role(Role("seer", "word"))
    uri = f"postgresql://seer:word@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres"
    words = f"host=127.0.0.1,127.0.0.1 port={ports} user=seer password=word dbname=postgres"
    for dsn, role in ((uri, "write"), (words, "write"), (f"{words} target_session_attrs=standby", "read")):
        done = pooler("init", "--dsn", dsn, "--dir", tmp_path, "--force")
        assert done.code == 0, done.err
        database = load(tmp_path / "pooler.yaml").databases["postgres"]
        assert [each.port for each in database.hosts] == [standby.port, primary.port]
        assert database.role == role


def test_a_server_that_does_not_answer_is_one_line_and_nothing_is_written(
    pooler: Pooler, tmp_path: Path
) -> None:
    done = pooler("init", "--dsn", "postgresql://u:hush@127.0.0.1:1/d", "--dir", tmp_path)
    assert done.code == 1
    assert done.err.startswith("pooler: the server cannot be read: ")
    assert len(done.err.splitlines()) == 1
    assert "hush" not in done.err
    assert list(tmp_path.iterdir()) == []


def paste(line: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a printed line in a shell, as a person would: without what the environment has for us."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("POOLER_", "PG"))}
    return subprocess.run(
        ["/bin/sh", "-c", line], cwd=folder, capture_output=True, text=True, check=False, timeout=60,
        stdin=subprocess.DEVNULL, env={**own, **env})


@pytest.mark.postgres
@pytest.mark.etcd
def test_every_printed_line_works_when_it_is_pasted(
    pooler: Pooler, postgres: Database, tmp_path: Path
) -> None:
    if shutil.which("psql") is None or find_etcd() is None:
        missing("psql and etcd are run")
    superuser = postgres.server.dsn("postgres", postgres.dbname)
    done = pooler("init", "--dsn", superuser, "--dir", "new", "--json")
    assert done.code == 0, done.err
    roles, check, run, client, console, haproxy, through = json.loads(done.out)["next"]
    made = paste(roles, tmp_path)
    assert made.returncode == 0, made
    assert "ERROR" not in made.stderr
    assert paste(check, tmp_path).returncode == 0
    ports = {port: str(free_ports(2)) for port in ("6432", "6440", "6480", "9180", "9600", "9700")}
    config = tmp_path / "new/pooler.yaml"
    text = config.read_text().replace("fleet:\n", f"fleet:\n  run_dir: {tmp_path / 'r'}\n  workers: 2\n")
    for port, free in ports.items():  # others may have the usual ones
        text = text.replace(port, free)
    config.write_text(text)
    command, comment = run.split("    # ")
    assert "another terminal" in comment
    fleet = Child(["/bin/sh", "-c", f"cd {tmp_path} && exec {command}"], tmp_path / "log")
    try:
        ready = [int(ports["9180"]), int(ports["9600"]), int(ports["9600"]) + 1]
        fleet.wait_until(lambda: all(http_status(port, "/readyz") == 200 for port in ready), "ready", 60)
        there = client.replace("6432", ports["6432"])
        asked = paste(f"{there} -Atc 'SELECT current_user'", tmp_path)
        assert asked.stdout.strip() == f"{postgres.dbname}_app", asked
        pools = paste(console.replace("6432", ports["6432"]), tmp_path)
        assert "cl_active" in pools.stdout, pools
    finally:
        fleet.stop(signal.SIGINT, 30)
    if find_program("haproxy") is not None:
        checked = paste(haproxy.replace(" -f ", " -c -f "), tmp_path)
        assert checked.returncode == 0, checked
    assert through.replace("5433", "6432").split("    #")[0] == client


@pytest.mark.postgres
def test_a_fault_in_roles_sql_is_seen_and_nothing_of_it_stays(
    pooler: Pooler, postgres_newest: Database, tmp_path: Path
) -> None:
    if shutil.which("psql") is None:
        missing("psql is run")
    superuser = postgres_newest.server.dsn("postgres", postgres_newest.dbname)
    done = pooler("init", "--dsn", superuser, "--dir", tmp_path, "--json")
    roles = tmp_path / "roles.sql"
    roles.write_text("CREATE ROLE half_made;\nSELECT 1 / 0;\nSELECT 2;\n")
    assert paste(json.loads(done.out)["next"][0], tmp_path).returncode == 3
    found = postgres_newest.server.execute("SELECT 1 FROM pg_roles WHERE rolname = 'half_made'")
    assert found == []


@pytest.mark.postgres
def test_a_unix_socket_becomes_an_address_at_which_the_server_answers(
    pooler: Pooler, make_server: MakeServer, tmp_path: Path
) -> None:
    for number, (listens, host) in enumerate([("127.0.0.2", "127.0.0.2"), ("*", "127.0.0.1")]):
        server = make_server(settings={"listen_addresses": listens})
        done = pooler("init", "--dsn", server.dsn(), "--dir", tmp_path / str(number))
        assert done.code == 0, done.err
        text = (tmp_path / str(number) / "pooler.yaml").read_text()
        assert f'hosts: ["{host}:{server.port}"]' in text
        assert "came by a unix socket" in text


@pytest.mark.postgres
def test_a_server_without_tcp_is_refused_and_told_why(
    pooler: Pooler, make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(settings={"listen_addresses": ""})
    done = pooler("init", "--dsn", server.dsn(), "--dir", tmp_path / "new")
    assert done.code == 2
    assert "set listen_addresses" in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.postgres
def test_at_a_standby_the_roles_are_made_at_its_primary(
    pooler: Pooler, make_server: MakeServer, make_standby: Callable[[Server], Server], tmp_path: Path
) -> None:
    primary = make_server()
    standby = make_standby(primary)
    done = pooler("init", "--dsn", standby.dsn(), "--dir", tmp_path, "--json")
    assert done.code == 0, done.err
    made = paste(json.loads(done.out)["next"][0], tmp_path)
    assert made.returncode == 0, made
    assert primary.execute("SELECT 1 FROM pg_roles WHERE rolname = 'pooler_monitor'") == [(1,)]


DSN = "postgresql://app:hush@db1:5000/orders?sslmode=require&sslpassword=hush"


@pytest.mark.parametrize(("dsn", "facts", "shown"), [
    (DSN, FACTS,
     {"user": "postgres", "host": "db1", "port": "5000", "dbname": "Orders DB", "sslmode": "require"}),
    ("dbname=orders", replace(FACTS, superuser="root", reached=("/run/pg", 5433)),
     {"user": "root", "host": "/run/pg", "port": 5433, "dbname": "Orders DB"}),
    ("host=a,b user=x", replace(FACTS, in_recovery=True),
     {"user": "postgres", "host": "a,b", "dbname": "Orders DB", "target_session_attrs": "read-write"}),
    ("host=s hostaddr=10.0.0.2", replace(FACTS, in_recovery=True, upstream=("p", 5440)),
     {"user": "postgres", "host": "p", "port": 5440, "dbname": "Orders DB"}),
])
def test_the_roles_are_made_by_a_superuser_at_a_named_primary_without_any_secret(
    dsn: str, facts: ServerFacts, shown: dict[str, object]
) -> None:
    found = conninfo_to_dict(superuser_dsn(dsn, facts))
    assert {key: str(value) for key, value in found.items()} == {
        key: str(value) for key, value in shown.items()}


def test_colons_and_backslashes_of_a_password_reach_psql(tmp_path: Path) -> None:
    odd = Login("a:b", "c\\d:e", "")
    [file] = [each for each in first_files(FACTS, odd, MONITOR, CONSOLE) if each.name == "pgpass"]
    assert file.text.splitlines()[0] == "127.0.0.1:*:*:a\\:b:c\\\\d\\:e"
    assert file.mode == 0o600
