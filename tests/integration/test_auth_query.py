"""auth_query as it is set up in practice: by a function, in a database of its own, past a forced user."""

from __future__ import annotations

import secrets
from typing import Any

import psycopg
import pytest
import yaml
from psycopg import sql

from pooler.demo.client import RawClient, ServerSaid
from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Role
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, MakeServer, make_database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

LOOKUP = """
CREATE FUNCTION lookup(who text) RETURNS TABLE (name name, secret text) SECURITY DEFINER
SET search_path = pg_catalog LANGUAGE sql
AS 'SELECT rolname, rolpassword FROM pg_authid WHERE rolname = who'
"""


def configured(fleet: RunningFleet, auth: dict[str, Any], databases: dict[str, Any]) -> RunningFleet:
    """The fleet started with this `auth`, and these values in each entry of `databases`."""
    config = yaml.safe_load(fleet.config.read_text())
    config["auth"] = auth
    (entry,) = config["databases"].values()
    config["databases"] = {name: {**entry, **values} for name, values in databases.items()}
    fleet.config.write_text(yaml.safe_dump(config, sort_keys=False))
    fleet.fleet.start()
    return fleet


def make_role(database: Database, prefix: str, password: str) -> str:
    name = f"{prefix}_{secrets.token_hex(4)}"
    database.server.create_role(Role(name, password))
    return name


def test_a_function_in_a_database_of_its_own_is_asked_by_a_user_of_its_own(
    make_fleet: MakeFleet, postgres: Database, etcd: Etcd
) -> None:
    asker, user = make_role(postgres, "asker", "asking"), make_role(postgres, "u", "right")
    keeper = f"keeper_{secrets.token_hex(4)}"
    postgres.server.create_database(keeper, postgres.user)
    with psycopg.connect(postgres.server.dsn("postgres", keeper), autocommit=True) as connection:
        connection.execute(LOOKUP)
    fleet = configured(
        make_fleet(postgres, etcd, permits=6, workers=1, start=False),
        {"type": "scram-sha-256", "file": "userlist.txt", "user": "not_this_one", "query_cache": "30s"},
        {postgres.dbname: {"user": postgres.user, "password": postgres.password, "auth_user": asker,
                           "auth_query": "SELECT name, secret FROM lookup($1)", "auth_dbname": "keeper"},
         "keeper": {"dbname": keeper}})
    with (fleet.config.parent / "userlist.txt").open("a") as userlist:
        userlist.write(f'"{asker}" "asking"\n')
    assert fleet.fleet.command("fleet", "reload").returncode == 0
    with psycopg.connect(fleet.dsn(user=user, password="right")) as connection:
        assert connection.execute("select current_user").fetchone() == (postgres.user,)
    asked = postgres.server.execute(sql.SQL(
        "SELECT DISTINCT datname FROM pg_stat_activity WHERE usename = {}").format(sql.Literal(asker)))
    assert asked == [(keeper,)]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(fleet.dsn(user=user, password="wrong"))


def test_an_outsider_hears_nothing_of_a_server_that_cannot_be_asked(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd
) -> None:
    database = make_database(make_server())
    fleet = configured(
        make_fleet(database, etcd, permits=4, workers=1, start=False),
        {"type": "scram-sha-256", "file": "userlist.txt", "user": "no_such_asker", "password": "secret word",
         "query_timeout": "3s"},
        {database.dbname: {}})
    said = []
    for user in ("somebody", "nobody"):
        with RawClient("127.0.0.1", fleet.port) as client, pytest.raises(ServerSaid) as refused:
            client.login(user, "guess", database.dbname)
        said.append(refused.value.fields)
    assert said[0] == said[1]
    assert said[0]["C"] == "57P03"
    assert said[0]["M"] == "users cannot be looked up now: try again later"
    log = fleet.fleet.log.read_text()
    assert "auth_query_failed" in log
    assert "no_such_asker" in log
    assert "secret word" not in log
    with psycopg.connect(fleet.dsn()) as connection:  # who stands in the file needs no server's word
        assert connection.execute("select 1").fetchone() == (1,)


def _first_answer(fleet: RunningFleet, **parameters: str) -> list[list[str | None]]:
    database = fleet.database
    with RawClient("127.0.0.1", fleet.port) as client:
        client.login(database.user, database.password, database.dbname, **parameters)
        return client.query("select 1")


def test_startup_parameters_that_the_server_refuses_have_its_code(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1)
    for code, parameters in {"42704": {"no_such_parameter": "1"}, "22023": {"TimeZone": "Nowhere"}}.items():
        with pytest.raises(ServerSaid) as refused:
            _first_answer(fleet, **parameters)
        assert refused.value.sqlstate == code


def test_a_server_that_is_full_says_so_itself_when_the_login_cannot_wait_longer(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    database = postgres_newest
    fleet = make_fleet(database, etcd, permits=2, workers=1, start=False, more={
        "pool": {"client_login_timeout": "2s"}})
    name = f"full_{secrets.token_hex(4)}"
    database.server.create_role(Role(name, "right", connection_limit=0))
    with (fleet.config.parent / "userlist.txt").open("a") as userlist:
        userlist.write(f'"{name}" "right"\n')
    fleet.fleet.start()
    with RawClient("127.0.0.1", fleet.port) as client, pytest.raises(ServerSaid) as refused:
        client.login(name, "right", database.dbname)
    assert refused.value.sqlstate == "53300"
    assert refused.value.fields["M"] == f'too many connections for role "{name}"'
    assert refused.value.fields["S"] == refused.value.fields["V"] == "FATAL"
