"""What entries of [databases] and who may log in do, with either pooler."""

from __future__ import annotations

import socket

import psycopg
import pytest

from tests.dropin.conftest import Play
from tests.dropin.rig import OURS, THEIRS, Played
from tests.support.postgres import Database
from tests.support.wait import wait_until

BOTH = pytest.mark.parametrize("side", [OURS, THEIRS])


def entry(server: Database, name: str = "app", more: str = "", host: str = "127.0.0.1") -> str:
    return f"{name} = host={host} port={server.port} dbname={server.dbname} {more}"


@BOTH
@pytest.mark.parametrize("mode", ["session", "transaction", "statement"])
def test_a_connect_query_is_run_before_anybody_has_the_session(
    play: Play, server: Database, side: str, mode: str
) -> None:
    query = "connect_query='set enable_seqscan=off; set timezone=''Portugal'''"
    played = play(side, databases=entry(server, more=query), settings={"pool_mode": mode})
    assert played.psql("app", server.user, "show enable_seqscan").stdout == "off\n"


def test_a_connect_query_holds_for_the_next_client_of_a_session_pool(play: Play, server: Database) -> None:
    query = "connect_query='set enable_seqscan=off'"
    played = play(databases=entry(server, more=query), settings={"pool_mode": "session"})
    asked = ("set enable_seqscan=on", "set enable_nestloop=off", "show enable_seqscan")
    assert played.psql("app", server.user, *asked).stdout.split()[-1] == "on"
    done = played.psql("app", server.user, "show enable_seqscan", "show enable_nestloop")
    assert done.stdout.split() == ["off", "on"]


@BOTH
def test_an_entrys_user_has_his_password_of_the_userlist(play: Play, server: Database, side: str) -> None:
    played = play(side, databases=entry(server, more=f"user={server.user}"),
                  users={server.user: server.password, "other": "x"})
    assert played.psql("app", "other", "select current_user").stdout == f"{server.user}\n"


@BOTH
def test_a_stored_secret_that_cannot_log_in_is_told_as_such(play: Play, server: Database, side: str) -> None:
    verifier = ("SCRAM-SHA-256$4096:D76gvGUVj9Z4DNiGoabOBg==$RukL0Xo3Ql/2F9FsD7mcQ3GATG2fD3PA71qY1JagGDs="
                ":BhKUwyyivFm7Tq2jDJVXSVRbRDgTWyBilZKgg6DDuYU=")
    played = play(side, databases=entry(server, more=f"user={server.user}"),
                  users={server.user: verifier, "other": "x"})
    assert "server login failed: wrong password type" in played.psql("app", "other", "select 1").stderr


def test_of_several_hosts_the_first_that_answers_is_taken(play: Play, server: Database) -> None:
    played = play(databases=entry(server, host="host.invalid,127.0.0.1", more="load_balance_hosts=disable"))
    assert played.psql("app", server.user, "select 1").stdout == "1\n"
    shown = played.console("show databases").stdout.splitlines()[0].split("|")
    assert (shown[1], shown[10]) == ("host.invalid,127.0.0.1", "disable")


def test_a_pool_of_the_entrys_own_user_is_filled_before_anybody_comes(play: Play, server: Database) -> None:
    played = play(databases=entry(server, more=f"user={server.user} min_pool_size=5"))
    wait_until(lambda: played.console("show pools").stdout.split("|")[9] == "5", "five are idle", 20)
    with psycopg.connect(server.dsn()) as asked:
        row = asked.execute(
            "select extract(epoch from max(backend_start) - min(backend_start)) from pg_stat_activity"
            " where datname = %s and pid <> pg_backend_pid()", [server.dbname]).fetchone()
    assert row is not None
    assert row[0] < 3  # one each third of a second, as PgBouncer opens them


@BOTH
def test_a_users_limit_counts_his_sessions_in_all_databases(play: Play, server: Database, side: str) -> None:
    names = ("one", "two", "three")
    played = play(side, databases="\n".join(entry(server, name) for name in names),
                  settings={"pool_mode": "transaction", "max_user_connections": "1"})
    for name in (*names, *names):
        assert played.psql(name, server.user, "select 1").stdout == "1\n"
    lines = [line.split("|") for line in played.console("show servers").stdout.splitlines()]
    assert [line[2] for line in lines if line[1] == server.user] == ["three"]


@pytest.mark.parametrize(("options", "says"), [
    ("-c enable_seqscan=off", "unsupported startup parameter in options: enable_seqscan"),
    ("-d", "options startup parameter: only '-c config=val' and '--config=val' are allowed"),
    ("-c timezone", "options startup parameter: only '-c config=val' and '--config=val' are allowed"),
])
def test_options_that_cannot_follow_a_client_are_refused(
    play: Play, server: Database, options: str, says: str
) -> None:
    played = play()
    assert says in played.psql("app", server.user, "select 1", PGOPTIONS=options).stderr
    assert played.psql("app", server.user, "show timezone",
                       PGOPTIONS="-c timezone=Portugal").stdout == "Portugal\n"


def test_shutting_down_for_servers_who_waits_is_told_and_who_holds_one_stays(
    play: Play, server: Database
) -> None:
    played = play(settings={"pool_mode": "transaction"})

    def connect() -> psycopg.Connection[object]:
        return psycopg.connect(host="127.0.0.1", port=played.port, user=server.user, dbname="app")

    with connect() as holds, connect() as comes:
        holds.execute("select 1")
        played.console("shutdown wait_for_servers")
        holds.execute("select 1")
        with pytest.raises(psycopg.OperationalError, match="server shutting down"):
            comes.execute("select 1")
        holds.commit()
    assert played.wait_end() == 0


def test_limits_and_counts_of_clients_are_those_of_who_came(play: Play, server: Database) -> None:
    played: Played = play(
        databases=entry(server, more=f"user={server.user} max_db_client_connections=5"),
        settings={"max_user_client_connections": "1", "stats_users": "stats"},
        users={server.user: server.password, "ann": "x", "stats": "x"})
    where = f"host=127.0.0.1 port={played.port}"
    with psycopg.connect(f"{where} user=ann dbname=app"), psycopg.connect(
            f"{where} user=stats dbname=pgbouncer", autocommit=True):
        rows = [line.split("|") for line in played.console("show users").stdout.splitlines()]
        users = {row[0]: row[1:] for row in rows}
        assert (users["ann"][5:], users["stats"][5:]) == (["1", "1"], ["1", "1"])
        shown = played.console("show databases").stdout.splitlines()[0].split("|")
        assert shown[13:15] == ["5", "1"]
        for user, dbname in (("ann", "app"), ("stats", "pgbouncer")):
            assert "max_user_client_connections" in played.psql(dbname, user, "show version").stderr
    totals = dict(line.split("|") for line in played.console("show totals").stdout.splitlines())
    assert int(totals["total_query_count"]) >= 3  # the console's are among them
    assert totals["total_client_bytes"].isdecimal()


@BOTH
def test_an_entry_without_host_or_with_a_directory_is_a_servers_unix_socket(
    play: Play, server: Database, side: str
) -> None:
    folder = str(server.server.directory)
    played = play(side, databases=entry(server, host=folder))
    asked = ("select inet_server_addr() is null", "select pg_sleep(0)")
    assert played.psql("app", server.user, *asked).stdout.split() == ["t"]


def test_who_logs_in_is_greeted_and_his_address_follows_his_name(play: Play, server: Database) -> None:
    played = play(settings={"login_notify_message": "closed on Sunday", "application_name_add_host": "1"})
    done = played.psql("app", server.user, "show application_name", PGAPPNAME="me")
    assert "NOTICE:  00000: closed on Sunday" in done.stderr or "NOTICE:  closed on Sunday" in done.stderr
    assert done.stdout.startswith("me - 127.0.0.1:")


@BOTH
def test_a_login_that_waits_for_its_server_ends_with_query_timeout(
    play: Play, server: Database, side: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        played = play(side, databases=f"app = host=127.0.0.1 port={silent.getsockname()[1]}",
                      settings={"query_timeout": "1"})
        assert played.psql("app", server.user, "select 1").stderr.rstrip().endswith("FATAL:  query_timeout")


def test_a_reload_changes_the_limit_of_a_database(play: Play, server: Database) -> None:
    played = play(settings={"pool_mode": "transaction", "max_db_connections": "1", "query_wait_timeout": "1"})
    with psycopg.connect(host="127.0.0.1", port=played.port, user=server.user, dbname="app") as holds:
        holds.execute("select 1")
        assert "query_wait_timeout" in played.psql("app", server.user, "select 1").stderr
        played.write(max_db_connections="2")
        assert (played.console("reload").stdout, played.console("reload").stderr) == ("RELOAD\n", "")
        wait_until(lambda: played.psql("app", server.user, "select 1").stdout == "1\n", "there is room", 20)
        assert "|2|" in played.console("show databases").stdout.splitlines()[0]


@BOTH
def test_logins_that_share_an_entrys_user_share_its_sessions(play: Play, server: Database, side: str) -> None:
    users = {server.user: server.password, **dict.fromkeys(("ann", "bob", "eve"), "x")}
    played = play(side, users=users, settings={"query_wait_timeout": "5"},
                  databases=entry(server, more=f"user={server.user} password={server.password} pool_size=1"))
    for user in ("ann", "bob", "eve", "ann"):
        assert played.psql("app", user, "select 1").stdout == "1\n", user
