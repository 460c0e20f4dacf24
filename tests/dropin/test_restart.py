"""`-R`: the same ini, the same sockets; clients stay connected and the old process ends by itself."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from pooler.serve.moving import ENCRYPTED
from tests.dropin.conftest import Play
from tests.dropin.rig import Played
from tests.support.certificates import Authority
from tests.support.postgres import Database
from tests.support.wait import wait_until


def successor(played: Played) -> Played:
    """A second one, started with -R beside the first; it is ready when the pidfile is its own."""
    fresh = Played(played.side, played.folder, played.databases, played.settings, played.users,
                   more=played.more, port=played.port)
    fresh.launch("-R")
    return fresh


def ended(child: subprocess.Popen[str]) -> bool:
    return child.poll() is not None


@pytest.mark.parametrize("auth_type", ["trust", "scram-sha-256"])
def test_idle_clients_move_over_and_the_old_process_ends(
    play: Play, server: Database, auth_type: str
) -> None:
    old = play(settings={"pool_mode": "transaction", "auth_type": auth_type, "server_lifetime": "3600"})
    login = {"host": "127.0.0.1", "port": old.port, "user": server.user, "dbname": "app",
             "password": server.password, "autocommit": True}
    with ExitStack() as made:
        idle = [made.enter_context(psycopg.connect(**login)) for _ in range(3)]  # type: ignore[arg-type]
        for number, client in enumerate(idle):
            client.execute(f"SET application_name = 'client {number}'")
            for _ in range(6):  # so often that the driver prepares it
                client.execute("select %s::int", [number])
        fresh = successor(old)
        made.callback(fresh.stop)
        assert old.child is not None
        assert old.wait_end(120) == 0
        fresh.wait_ready()
        assert fresh.child is not None
        assert int((old.folder / "test.pid").read_text()) == fresh.child.pid
        for number, client in enumerate(idle):
            found = client.execute("select %s::int, current_setting('application_name')", [number]).fetchone()
            assert found == (number, f"client {number}")
            assert client.execute("select %s::int", [number]).fetchone() == (number,)
        with psycopg.connect(**login) as late:  # type: ignore[arg-type]
            assert late.execute("select 1").fetchone() == (1,)
        assert fresh.psql("app", server.user, "select 1", host=str(old.folder),
                          PGPASSWORD=server.password).stdout == "1\n"


def test_a_running_transaction_ends_where_it_began(play: Play, server: Database) -> None:
    old = play(settings={"pool_mode": "transaction"})
    with psycopg.connect(host="127.0.0.1", port=old.port, user=server.user, dbname="app") as client:
        pid = client.execute("select pg_backend_pid()").fetchone()
        fresh = successor(old)
        try:
            assert old.child is not None
            wait_until(lambda: "waits_for=moved" in old.log, "the old one is told to go", 60)
            assert client.execute("select pg_backend_pid()").fetchone() == pid
            client.commit()
            assert old.wait_end(120) == 0
            assert client.execute("select 1").fetchone() == (1,)
            client.commit()
        finally:
            fresh.stop()


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_encrypted_clients_are_told_to_connect_again_between_two_transactions_and_the_old_process_ends(
    play: Play, server: Database, tmp_path: Path, mode: str
) -> None:
    pair = Authority(tmp_path).host("localhost")
    old = play(settings={"pool_mode": mode, "client_tls_sslmode": "allow",
                         "client_tls_cert_file": str(pair.cert), "client_tls_key_file": str(pair.key)})
    dsn = f"host=127.0.0.1 port={old.port} user={server.user} dbname=app"
    with ExitStack() as made:
        idle, busy = (made.enter_context(psycopg.connect(f"{dsn} sslmode=require")) for _ in range(2))
        plain = made.enter_context(psycopg.connect(f"{dsn} sslmode=disable", autocommit=True))
        for each in (idle, busy, plain):
            each.execute("select 1")
        idle.commit()
        fresh = successor(old)
        made.callback(fresh.stop)
        wait_until(lambda: "waits_for=moved" in old.log, "the old one is told to go", 60)
        assert busy.execute("select 2").fetchone() == (2,)
        busy.commit()
        if mode == "session":
            plain.close()  # it has a session of its own there, and so stays as long as it likes
        assert old.wait_end(120) == 0
        for each in (idle, busy):
            with pytest.raises(psycopg.errors.AdminShutdown, match=ENCRYPTED):
                each.execute("select 1")
        if mode == "transaction":
            assert plain.execute("select 1").fetchone() == (1,)
        with psycopg.connect(f"{dsn} sslmode=require") as again:
            assert again.execute("select 3").fetchone() == (3,)


def test_a_successor_is_succeeded_in_its_turn(play: Play, server: Database) -> None:
    """Not the first one alone: the socket is the same, and who listens there another."""
    first = play(settings={"pool_mode": "transaction"})
    with psycopg.connect(host="127.0.0.1", port=first.port, user=server.user, dbname="app",
                         autocommit=True) as client, ExitStack() as made:
        old = first
        for _ in range(2):
            fresh = successor(old)
            made.callback(fresh.stop)
            assert old.wait_end(120) == 0
            assert client.execute("select 1").fetchone() == (1,)
            old = fresh
        assert old.child is not None
        assert not ended(old.child)
        assert int((old.folder / "test.pid").read_text()) == old.child.pid


def test_without_a_running_one_it_starts(play: Play, server: Database) -> None:
    played = play(run=False)
    played.launch("-R")
    played.wait_ready()
    assert played.psql("app", server.user, "select 1").stdout == "1\n"


def test_a_successor_that_cannot_start_leaves_the_old_one_as_it_was(play: Play, server: Database) -> None:
    played = play()
    good = played.ini.read_text()
    played.ini.write_text(good + "auth_type = ldap\n")
    done = played.run("-q", "-R")
    assert done.returncode == 1
    assert played.psql("app", server.user, "select 1").stdout == "1\n"
    assert played.child is not None
    assert not ended(played.child)
