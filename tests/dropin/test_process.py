"""`pooler pgbouncer FILE.ini` as a process: flags, files, sockets, signals, and nothing left behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pooler.demo.etcd import Etcd
from pooler.demo.process import accepts, process_ids
from tests.dropin.conftest import Play
from tests.dropin.rig import OURS, THEIRS, Played
from tests.support.postgres import Database
from tests.support.wait import wait_until

BOTH = pytest.mark.parametrize("side", [OURS, THEIRS])
LEAVE_SECONDS = 15.0


@contextmanager
def held_client(played: Played, server: Database) -> Iterator[subprocess.Popen[str]]:
    """A psql that stays, between statements; text on its stdin is carried out."""
    argv = ["psql", "-X", "-At", "-h", "127.0.0.1", "-p", str(played.port), "-U", server.user, "-d", "app"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env=played.environment(), **played.account())
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("select 'here';\n")
    child.stdin.flush()
    assert child.stdout.readline() == "here\n"
    try:
        yield child
    finally:
        child.stdin.close()
        child.wait(10)
        child.stdout.close()


def ask(client: subprocess.Popen[str], query: str) -> str:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(query + "\n")
    client.stdin.flush()
    return client.stdout.readline().strip()


def left_behind(played: Played) -> set[str]:
    """What is in the folder besides what was put there."""
    return {path.name for path in played.folder.iterdir()} - {"test.ini", "userlist.txt", "test.log"}


@BOTH
def test_it_serves_on_the_inis_port_and_socket_with_its_pidfile_and_logfile(
    play: Play, server: Database, side: str
) -> None:
    played = play(side)
    assert played.child is not None
    assert int((played.folder / "test.pid").read_text()) == played.child.pid
    for host in ("127.0.0.1", str(played.folder)):
        done = played.psql("app", server.user, "select current_user", host=host)
        assert done.stdout == f"{server.user}\n", done.stderr
    assert played.log


@pytest.mark.parametrize(("side", "number"), [  # 1.18 had other meanings for TERM and QUIT
    (OURS, signal.SIGTERM), (OURS, signal.SIGINT), (OURS, signal.SIGQUIT), (THEIRS, signal.SIGINT)])
def test_without_clients_it_ends_with_0_and_leaves_nothing(
    play: Play, side: str, number: signal.Signals
) -> None:
    played = play(side)
    assert played.child is not None
    below = process_ids(played.child.pid)
    played.signal(number)
    assert played.wait_end() == 0
    assert left_behind(played) == set()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "all below it are gone",
               LEAVE_SECONDS)


def test_term_shuts_the_port_keeps_the_console_and_waits_for_the_last_client(
    play: Play, server: Database
) -> None:
    played = play(settings={"pool_mode": "transaction"})
    with held_client(played, server) as client:
        played.signal(signal.SIGTERM)
        wait_until(lambda: not accepts(played.port), "the port is shut", LEAVE_SECONDS)
        assert played.console("show version").returncode == 0
        assert ask(client, "select 'still';") == "still"
        refused = played.psql("app", server.user, "select 1", host=str(played.folder))
        assert "shutting down" in refused.stderr
    assert played.wait_end() == 0


@BOTH
def test_int_waits_for_servers_alone(play: Play, server: Database, side: str) -> None:
    played = play(side, settings={"pool_mode": "transaction"})
    with held_client(played, server):
        played.signal(signal.SIGINT)
        assert played.wait_end() == 0


def test_the_second_term_ends_at_once(play: Play, server: Database) -> None:
    played = play()
    with held_client(played, server):
        played.signal(signal.SIGTERM)
        wait_until(lambda: not accepts(played.port), "the port is shut", LEAVE_SECONDS)
        played.signal(signal.SIGTERM)
        assert played.wait_end() == 0


@BOTH
def test_usr1_pauses_and_usr2_resumes(play: Play, server: Database, side: str) -> None:
    played = play(side, settings={"pool_mode": "transaction", "query_wait_timeout": "1"})
    assert played.psql("app", server.user, "select 1").returncode == 0
    played.signal(signal.SIGUSR1)
    wait_until(lambda: played.psql("app", server.user, "select 1").returncode != 0, "it is paused", 20)
    played.signal(signal.SIGUSR2)
    wait_until(lambda: played.psql("app", server.user, "select 1").returncode == 0, "it is resumed", 20)


@BOTH
def test_hup_takes_a_changed_ini_and_a_rotated_logfile(play: Play, server: Database, side: str) -> None:
    played = play(side)
    shown = "show config"
    assert "query_timeout|0|" in played.console(shown).stdout
    (played.folder / "test.log").rename(played.folder / "old.log")
    played.write(query_timeout="7", listen_backlog="64")
    played.signal(signal.SIGHUP)
    wait_until(lambda: "query_timeout|7|" in played.console(shown).stdout, "it is reloaded", 20)
    wait_until(lambda: played.log, "the log is opened anew", 20)
    if side == OURS:  # a setting that cannot change keeps its value
        assert "listen_backlog|128|" in played.console(shown).stdout


@BOTH
def test_a_bad_ini_at_hup_changes_nothing(play: Play, server: Database, side: str) -> None:
    played = play(side, settings={"query_timeout": "7"})
    played.ini.write_text(played.ini.read_text() + "nonsense\n")
    refused = played.console("reload")
    if side == OURS:  # 1.18 said RELOAD all the same
        assert refused.stderr.startswith("ERROR:  F0000: RELOAD failed, see logs for additional details")
        assert "test.ini:" in played.log
    assert "query_timeout|7|" in played.console("show config").stdout
    assert played.psql("app", server.user, "select 1").returncode == 0


@BOTH
def test_a_second_one_on_the_same_socket_does_not_start(play: Play, side: str) -> None:
    played = play(side)
    done = played.run("-q")
    assert done.returncode == 1
    second = played.log + done.stderr + done.stdout
    assert "unix socket is in use, cannot continue" in second
    assert played.console("show version").returncode == 0
    assert played.socket.exists()


@BOTH
def test_a_pidfile_of_a_living_process_is_not_taken_and_a_stale_one_is(play: Play, side: str) -> None:
    played = play(side, run=False, settings={"unix_socket_dir": ""})
    pidfile = played.folder / "test.pid"
    pidfile.write_text(f"{os.getpid() if side == OURS else 1}\n")
    done = played.run()
    assert done.returncode == 1
    assert "exists, another instance running?" in done.stderr + played.log
    ended = subprocess.Popen(["true"])
    ended.wait()
    pidfile.write_text(f"{ended.pid}\n")
    played.launch()
    wait_until(lambda: accepts(played.port), "it listens", 60)
    assert played.child is not None
    assert int(pidfile.read_text()) == played.child.pid


@BOTH
def test_daemon_mode_returns_at_once_and_needs_a_pidfile(play: Play, side: str) -> None:
    played = play(side, run=False)
    assert played.run("-d").returncode == 0
    pidfile = played.folder / "test.pid"
    wait_until(lambda: pidfile.exists() and pidfile.read_text().strip(), "the pidfile is written", 30)
    pid = int(pidfile.read_text())
    try:
        played.wait_ready()
        assert os.getsid(pid) != os.getsid(0)
    finally:
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it ends", 30)
    assert left_behind(played) == set()
    played.write(pidfile="")
    done = played.run("-d")
    assert done.returncode == 1
    assert "daemon needs pidfile configured" in done.stderr + played.log


@BOTH
def test_wrong_usage_and_a_missing_ini_end_with_1(play: Play, side: str) -> None:
    played = play(side, run=False)
    nothing = subprocess.run(played.argv()[:-1], capture_output=True, text=True, check=False,
                             env=played.environment(), cwd=played.folder, **played.account())
    assert nothing.returncode == 1
    assert "no configuration file specified" in nothing.stderr
    played.ini.unlink()
    missing = played.run()
    assert missing.returncode == 1
    assert "cannot load config file" in missing.stderr


def test_help_ends_with_0_and_version_says_what_the_console_says(play: Play) -> None:
    played = play()
    assert played.run("--help").returncode == 0
    said = played.run("--version")
    assert said.returncode == 0
    assert said.stdout.splitlines()[0] == played.console("show version").stdout.strip()


def test_empty_values_and_a_unix_socket_alone(play: Play, server: Database) -> None:
    played = play(settings={"pidfile": "", "listen_addr": "", "logfile": ""})
    assert not accepts(played.port)
    assert played.psql("app", server.user, "select 1", host=str(played.folder)).stdout == "1\n"


def test_what_cannot_be_done_safely_is_refused_with_its_line(play: Play) -> None:
    played = play(run=False, settings={"auth_type": "ldap"})
    done = played.run()
    assert done.returncode == 1
    assert "test.ini:" in done.stderr + played.log
    assert "auth_type" in done.stderr + played.log
    assert left_behind(played) == set()


@pytest.mark.parametrize(("rules", "says"), [
    ("host all all all ldap ldapserver=x", 'rules:1: method "ldap" is not served: `pam` reaches a directory'),
    ("local all all trust\nlocal all all gss", 'rules:2: method "gss" is not served: write one of trust,'),
])
def test_rules_that_cannot_be_followed_are_refused_at_the_start(
    play: Play, rules: str, says: str
) -> None:
    """Not by workers that end and begin again, while nobody is served."""
    played = play(run=False, settings={"auth_type": "hba", "auth_hba_file": "rules"})
    (played.folder / "rules").write_text(rules)
    done = played.run()
    assert done.returncode == 1
    assert says in done.stderr
    assert left_behind(played) == {"rules"}


def test_it_is_killed_and_its_successor_clears_what_is_left(play: Play) -> None:
    played = play()
    assert played.child is not None
    below = process_ids(played.child.pid)
    played.child.kill()
    played.child.communicate()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "its processes end", 30)
    played.launch()
    played.wait_ready()


@pytest.mark.slow
def test_ready_within_five_seconds_of_processor_time(play: Play) -> None:
    """Ready in 5 s on a quiet machine; measured is what its processes computed."""
    played = play()
    assert played.child is not None
    ticks = os.sysconf("SC_CLK_TCK")
    used = 0.0
    for pid in {played.child.pid} | process_ids(played.child.pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / ticks
    assert used < 5.0


def test_a_given_etcd_keeps_the_ledger(play: Play, server: Database, etcd: Etcd) -> None:
    name = f"given-{secrets.token_hex(4)}"
    played = play(environ={"POOLER_ETCD": ",".join(etcd.endpoints), "POOLER_FLEET": name})
    assert played.psql("app", server.user, "select 1").stdout == "1\n"
    assert "etcd_started" not in played.log
    played.signal(signal.SIGINT)
    assert played.wait_end() == 0
    assert left_behind(played) == set()


def test_a_number_of_workers_that_is_none_is_refused_and_leaves_nothing(play: Play) -> None:
    played = play(run=False, environ={"POOLER_WORKERS": "many"})
    done = played.run()
    assert done.returncode == 1
    assert 'POOLER_WORKERS is "many"' in done.stderr + played.log
    assert left_behind(played) == set()
