"""The console where it stands for PgBouncer's: its door, its columns, its commands, its words."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from pooler.demo.postgres import Role, Server
from tests.dropin.conftest import Play
from tests.dropin.rig import OURS, THEIRS, Played
from tests.support.postgres import Database, make_database
from tests.support.wait import wait_until

BOTH = pytest.mark.parametrize("side", [OURS, THEIRS])
OIDS = {"int4": 23, "int8": 20, "numeric": 1700, "text": 25}
LINES = Path(__file__).with_name("show_columns.txt").read_text().splitlines()
COLUMNS = {item: [tuple(column.split(":")) for column in columns] for item, *columns in map(str.split, LINES)}


@contextmanager
def admin(played: Played) -> Iterator[psycopg.Connection[Any]]:
    """A driver on the console, as the user whom the pooler runs as."""
    with psycopg.connect(host=str(played.folder), port=played.port, user="pgbouncer", dbname="pgbouncer",
                         autocommit=True, row_factory=dict_row,
                         application_name="exporter") as connection:
        yield connection


@pytest.fixture(scope="module")
def shown(server: Database) -> Iterator[Played]:
    """One drop-in for the tests that only look."""
    from tests.dropin.conftest import playing

    with playing(server) as play:
        yield play(settings={"stats_users": "stats", "admin_users": "boss"},
                   users={server.user: server.password, "stats": "s", "boss": "b", "other": "o"},
                   more="[users]\ntest1 = pool_size=1\ntest2 =")


def test_columns_and_types_are_pgbouncers(shown: Played, server: Database) -> None:
    assert shown.psql("app", server.user, "select 1").returncode == 0
    found = {}
    with admin(shown) as connection:
        for item in COLUMNS:
            cursor = connection.execute(f"SHOW {item}")
            found[item] = [(each.name, each.type_code) for each in cursor.description or ()]
            assert cursor.statusmessage == "SHOW"
    wanted = {item: [(name, OIDS[kind]) for name, kind in columns] for item, columns in COLUMNS.items()}
    assert found == wanted


def test_the_console_is_a_database_a_pool_a_user_and_its_user_a_client(shown: Played) -> None:
    with admin(shown) as connection:
        rows = {item: connection.execute(f"SHOW {item}").fetchall()
                for item in ("databases", "pools", "users", "clients", "lists")}
    assert [row["name"] for row in rows["databases"]] == ["app", "pgbouncer"]
    assert rows["pools"][-1]["database"] == "pgbouncer"
    sizes = {row["name"]: row["pool_size"] for row in rows["users"]}
    assert {"pgbouncer", "stats", "boss", "other"} <= sizes.keys()
    assert (sizes["test1"], sizes["test2"]) == ("1", "")
    ours = [row for row in rows["clients"] if row["database"] == "pgbouncer"]
    assert [(row["user"], row["application_name"]) for row in ours] == [("pgbouncer", "exporter")]
    assert {row["list"]: row["items"] for row in rows["lists"]}["databases"] == 2


def test_numbers_of_clients_rise_by_one(shown: Played) -> None:
    seen = []
    for _ in range(3):
        with admin(shown) as connection:
            seen += [row["id"] for row in connection.execute("SHOW CLIENTS").fetchall()]
    assert seen == [seen[0], seen[0] + 1, seen[0] + 2]


def test_the_owner_comes_in_over_the_socket_alone_and_only_under_that_name(shown: Played) -> None:
    assert shown.console("show version").returncode == 0
    assert '"trust" authentication failed' in shown.psql("pgbouncer", "pgbouncer", "show version").stderr
    assert "not allowed" in shown.console("show version", user="other").stderr


def test_a_stats_user_may_show_and_no_more(shown: Played) -> None:
    assert shown.psql("pgbouncer", "stats", "show pools").returncode == 0
    assert "08P01: admin access needed" in shown.psql("pgbouncer", "stats", "pause").stderr
    assert shown.psql("pgbouncer", "boss", "resume", "pause", "resume").stdout.splitlines()[-1] == "RESUME"


@pytest.mark.parametrize(("command", "says"), [
    ("show nix", "08P01: invalid command 'show nix', use SHOW HELP;"),
    ("nix", "08P01: invalid command 'nix', use SHOW HELP;"),
    ("kill nix", "08P01: no such database: nix"),
    ("pause nix", "08P01: no such database: nix"),
    ("disable nix", "08P01: no such database: nix"),
    ("kill_client 1000", "08P01: client not found"),
    ("kill_client non_existent", "08P01: invalid client pointer supplied"),
    ("set nix=1", "08P01: SET failed"),
    ("set pool_mode=x", "08P01: SET failed"),
])
def test_refusals_have_pgbouncers_words(shown: Played, command: str, says: str) -> None:
    assert shown.console(command).stderr.splitlines()[0] == f"ERROR:  {says}"


@BOTH
def test_states_refuse_what_they_do_with_pgbouncer(play: Play, side: str) -> None:
    played = play(side)
    for command, says in (
        ("resume", "pooler is not paused/suspended"), ("pause", ""), ("pause", "already suspended/paused"),
        ("kill app", "already suspended/paused"), ("suspend", "already suspended/paused"),
        ("resume app", "database app is not paused"), ("resume", ""), ("pause app", ""), ("pause app", ""),
        ("suspend", "cannot suspend with paused databases"), ("resume app", ""),
        ("resume app", "database app is not paused"), ("disable", "a database is required"),
        ("enable", "a database is required"), ("pause pgbouncer", "cannot pause admin db: pgbouncer"),
        ("reconnect pgbouncer", "cannot reconnect admin db: pgbouncer"),
        ("resume nix", "no such database: nix"),
        ("suspend x", "invalid command 'suspend x', use SHOW HELP;"),
    ):
        said = played.console(command).stderr.split("LOCATION:")[0]
        assert said.strip() == (f"ERROR:  08P01: {says}" if says else ""), command


@BOTH
def test_what_every_session_has_is_shown_and_a_set_of_it_ignored(play: Play, side: str) -> None:
    played = play(side)
    for command, shows, notice in (
        ("show client_encoding", "UTF-8", ""), ("show datestyle", "ISO", ""), ("show timezone", "GMT", ""),
        ("set datestyle = 'iso'", "SET", "NOTICE:  00000: SET ignored\n"),
    ):
        done = played.console(command)
        assert (done.stdout.strip(), done.stderr.split("LOCATION:")[0]) == (shows, notice)
    helped = played.console("show help").stderr
    assert helped.startswith("NOTICE:  00000: Console usage\nDETAIL:  \n\tSHOW HELP|CONFIG|")


@BOTH
def test_suspend_moves_nothing_until_resume_or_until_its_console_goes(
    play: Play, server: Database, side: str
) -> None:
    played = play(side, settings={"admin_users": "boss"}, users={server.user: server.password, "boss": "b"})
    with psycopg.connect(host="127.0.0.1", port=played.port, user=server.user, dbname="app",
                         autocommit=True) as client, \
            psycopg.connect(host="127.0.0.1", port=played.port, user="boss", dbname="pgbouncer",
                            autocommit=True) as console:
        client.execute("select 1")
        for end in (lambda: console.execute("resume"), console.close):
            assert console.execute("suspend").statusmessage == "SUSPEND"
            client.pgconn.send_query(b"select 2")
            assert not select.select([client.fileno()], [], [], 0.5)[0]
            end()
            assert select.select([client.fileno()], [], [], 10)[0]
            while client.pgconn.is_busy() or client.pgconn.get_result() is not None:
                client.pgconn.consume_input()
    assert "08P01: pooler is not paused/suspended" in played.console("resume").stderr


def test_descriptors_are_shown_and_no_secret_with_them(shown: Played, server: Database) -> None:
    with psycopg.connect(host="127.0.0.1", port=shown.port, user=server.user, dbname="app") as client:
        client.execute("select 1")
        with admin(shown) as connection:
            rows = connection.execute("SHOW FDS").fetchall()
    tasks = [row["task"] for row in rows]
    assert tasks.count("pooler") == 2
    (held,) = [row for row in rows if row["task"] == "client"]
    assert held["link"] in [row["fd"] for row in rows if row["task"] == "server"]
    assert (held["user"], held["database"], held["client_encoding"]) == (server.user, "app", "UTF8")
    secret = ("password", "scram_client_key", "scram_server_key")
    assert {row[key] for row in rows for key in secret} == {None}
    assert "08P01: admin access needed" in shown.psql("pgbouncer", "stats", "show fds").stderr


@pytest.mark.parametrize(("command", "tag"), [
    ("RELOAD", "RELOAD"), ("PAUSE;", "PAUSE"), ("suspend", "SUSPEND"), ("Reconnect", "RECONNECT"),
    ("disable app", "DISABLE"), ("enable app", "ENABLE"), ("wait_close", "WAIT_CLOSE"),
    ("set verbose=0", "SET verbose=0"), ("SET pool_mode = 'transaction'", "SET pool_mode=transaction"),
    ("set extra_float_digits = 2", "SET"), ("set query_timeout to 5", "SET query_timeout=5"),
])
def test_commands_have_pgbouncers_tags(shown: Played, command: str, tag: str) -> None:
    try:
        assert shown.console(command).stdout == f"{tag}\n"
    finally:  # whatever comes next finds it as it was
        shown.console("resume")
        shown.console("enable app")


def test_the_greeting_is_pgbouncers(shown: Played) -> None:
    with admin(shown) as connection:
        assert connection.info.parameter_status("server_version") == "1.25.2/bouncer"
        assert connection.info.parameter_status("client_encoding") == "UTF8"


@BOTH
@pytest.mark.parametrize("auth_type", ["md5", "scram-sha-256", "plain"])
def test_logins_are_refused_in_the_same_words(
    play: Play, server: Database, side: str, auth_type: str
) -> None:
    played = play(side, settings={"auth_type": auth_type}, users={server.user: server.password, "other": "x"})
    said = "SASL" if auth_type == "scram-sha-256" else "password"
    for user in (server.user, "unknown"):
        assert played.psql("app", user, "select 1", PGPASSWORD="wrong").stderr.rstrip().endswith(
            f"FATAL:  {said} authentication failed")
    good = {"PGPASSWORD": server.password}
    assert played.psql("app", server.user, "select 1", **good).stdout == "1\n"
    assert played.psql("nix", server.user, "select 1", **good).stderr.rstrip().endswith(
        "FATAL:  no such database: nix")
    servers_own = played.psql("app", "other", "select 1", PGPASSWORD="x").stderr
    assert 'FATAL:  password authentication failed for user "other"' in servers_own


@BOTH
def test_a_full_pooler_refuses_clients_and_stats_users_and_lets_admins_in(
    play: Play, server: Database, side: str
) -> None:
    played = play(side, settings={"max_client_conn": "1", "stats_users": "stats"},
                  users={server.user: server.password, "stats": "s"})
    with psycopg.connect(host="127.0.0.1", port=played.port, user=server.user, dbname="app", autocommit=True):
        assert "max_client_conn" in played.psql("app", server.user, "select 1").stderr
        if side == OURS:  # 1.18 refused no user of the console
            assert "max_client_conn" in played.psql("pgbouncer", "stats", "show pools").stderr
        assert played.console("show version").returncode == 0


@BOTH
def test_a_disabled_database_refuses_and_an_enabled_one_serves(
    play: Play, server: Database, side: str
) -> None:
    played = play(side)
    played.console("disable app")
    assert 'database "app" is disabled' in played.psql("app", server.user, "select 1").stderr
    played.console("enable app")
    assert played.psql("app", server.user, "select 1").stdout == "1\n"


@BOTH
def test_the_fallback_database_serves_any_name(play: Play, server: Database, side: str) -> None:
    played = play(side, databases=f"* = host=127.0.0.1 port={server.port}")
    asked = played.psql(server.dbname, server.user, "select current_database()")
    assert asked.stdout == f"{server.dbname}\n"
    refused = played.psql("nix", server.user, "select 1")
    assert refused.stderr.rstrip().endswith('database "nix" does not exist')


@BOTH
def test_a_reload_puts_back_what_was_set_and_what_the_ini_no_longer_has(
    play: Play, server: Database, side: str
) -> None:
    played = play(side, settings={"query_wait_timeout": "33"})
    played.console("set query_timeout=5")
    assert "query_timeout|5|" in played.console("show config").stdout
    played.settings = {}
    played.write()
    played.console("reload")
    config = played.console("show config").stdout
    assert "\nquery_timeout|0|" in config
    assert "\nquery_wait_timeout|120|" in config


@BOTH
def test_a_new_database_is_there_after_a_reload(play: Play, server: Database, side: str) -> None:
    played = play(side)
    played.more = f"late = host=127.0.0.1 port={server.port} dbname={server.dbname}"
    played.write()
    played.console("reload")
    wait_until(lambda: played.psql("late", server.user, "select 1").stdout == "1\n", "it serves", 20)


def test_shutdown_commands_are_the_signals(play: Play, server: Database) -> None:
    played = play()
    assert played.console("shutdown wait_for_clients").stdout in ("SHUTDOWN\n", "")
    assert played.wait_end() == 0
    played.stop()
    played.start()
    played.console("shutdown")
    assert played.wait_end() == 0
    assert not played.socket.exists()


def test_a_reload_that_names_another_database_or_server_is_followed(
    play: Play, server: Database, postgres_servers: Callable[[int], Server]
) -> None:
    other = make_database(postgres_servers(18))
    other.server.create_role(Role(server.user, server.password))
    played = play(settings={"pool_mode": "transaction"})
    with psycopg.connect(host="127.0.0.1", port=played.port, user=server.user, dbname="app",
                         autocommit=True) as stays:
        assert stays.execute("select current_database()").fetchone() == (server.dbname,)
        for dbname, port in (("postgres", server.port), (other.dbname, other.port)):
            played.databases = f"app = host=127.0.0.1 port={port} dbname={dbname}"
            played.write()
            assert played.console("reload").stdout == "RELOAD\n"
            query = "select current_database()"

            def is_there(dbname: str = dbname, query: str = query) -> bool:
                fresh = played.psql("app", server.user, query).stdout.strip()
                return (fresh,) == stays.execute(query).fetchone() == (dbname,)

            wait_until(is_there, f"it is {dbname}", 30)


def test_clients_of_a_database_that_is_gone_from_the_ini_are_told(play: Play, server: Database) -> None:
    played = play(more=f"gone = host=127.0.0.1 port={server.port} dbname={server.dbname}")
    with psycopg.connect(host="127.0.0.1", port=played.port, user=server.user, dbname="gone",
                         autocommit=True) as client:
        client.execute("select 1")
        played.more = ""
        played.write()
        played.console("reload")
        with pytest.raises(psycopg.OperationalError, match="database removed"):
            client.execute("select pg_sleep(20)")
    assert "no such database: gone" in played.psql("gone", server.user, "select 1").stderr


@BOTH
@pytest.mark.parametrize("limit", ["max_db_connections", "default_pool_size"])
def test_a_database_has_no_more_sessions_than_the_ini_allows(
    play: Play, server: Database, side: str, limit: str
) -> None:
    played = play(side, settings={"pool_mode": "transaction", limit: "1", "query_wait_timeout": "1"})
    with psycopg.connect(host="127.0.0.1", port=played.port, user=server.user, dbname="app") as holds:
        holds.execute("select 1")
        assert "query_wait_timeout" in played.psql("app", server.user, "select 1").stderr
        holds.commit()
        assert played.psql("app", server.user, "select 1").stdout == "1\n"
