"""Options of the command line: who it becomes, and where its log goes."""

from __future__ import annotations

import os
import pwd
import signal
from pathlib import Path

import pytest

from pooler.demo.process import process_ids
from tests.dropin.conftest import Play
from tests.dropin.rig import Played
from tests.support.need import missing
from tests.support.postgres import Database
from tests.support.wait import wait_until

NOBODY = "nobody"


def serves(played: Played, server: Database) -> bool:
    return played.psql("app", server.user, "select 1").stdout == "1\n"


def owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


@pytest.mark.parametrize("by_option", [True, False])
def test_it_becomes_the_user_it_is_told_to_and_so_does_all_that_it_starts(
    play: Play, server: Database, by_option: bool
) -> None:
    if os.geteuid() != 0:
        missing("only root can become another user")
    account = pwd.getpwnam(NOBODY)
    played = play(run=False, settings={} if by_option else {"user": NOBODY})
    for path in (played.folder, *played.folder.iterdir()):
        os.chown(path, account.pw_uid, account.pw_gid)
    played.launch(*(("-u", NOBODY) if by_option else ()))
    wait_until(lambda: serves(played, server), "it serves", 60)
    assert played.child is not None
    assert {owner(pid) for pid in process_ids(played.child.pid)} == {account.pw_uid}
    assert (played.folder / "test.pid").stat().st_uid == account.pw_uid


def test_a_user_that_is_not_there_is_refused(play: Play) -> None:
    done = play(run=False).run("-u", "nobody_of_that_name")
    assert done.returncode == 1
    assert "could not find user 'nobody_of_that_name' to switch to" in done.stderr


def test_quiet_says_nothing_where_it_was_started_and_verbose_says_more_in_the_logfile(
    play: Play, server: Database
) -> None:
    logs = []
    for options in ((), ("-v",)):
        played = play(run=False)
        played.launch(*options)
        wait_until(lambda each=played: serves(each, server), "it serves", 60)  # type: ignore[misc]
        played.signal(signal.SIGQUIT)
        assert played.wait_end() == 0
        assert played.output() == ""
        logs.append(played.log)
    assert ["session_permit_reserved" in log for log in logs] == [False, True]
    assert all("fleet_started" in log for log in logs)
