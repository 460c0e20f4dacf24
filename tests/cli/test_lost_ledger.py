"""Commands remember what this host knows of a ledger: none acts on one that was wiped or restored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.ledger.access import Seen
from coordinator.ledger.record import EpochState, LedgerHead, LedgerState, Session
from coordinator.ledger.states import SessionState
from coordinator.remembered import FILE_NAME, Remembered
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import Put
from coordinator.store.memory import Keyspace, MemoryStore
from pooler.cli import fleet, reach
from pooler.cli.main import run
from tests.coordinator.stage import make_spec
from tests.ledger.ground import KEYS, TAG, epoch, found, session, write

DB = KEYS.database
COMMANDS = {
    "drain": ["drain", DB], "abort": ["drain", DB, "--abort"], "audit": ["ledger", "audit", DB],
    "resolve": ["ledger", "resolve", DB, "main/0.7", "--evidence", "it is off", "--yes"],
}
SITUATIONS: dict[str, Callable[[Keyspace], Seen]] = {
    "restored": lambda keyspace: Seen("first", keyspace.revision + 1),
    "another": lambda keyspace: Seen("other", 1),
    "lost before": lambda keyspace: Seen("first", 1, lost=True),
}


@pytest.fixture
def keyspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keyspace:
    """A founded ledger that drains, with one session unknown, as every command here reaches it."""
    keyspace = found()
    stored: Session = session(SessionState.UNKNOWN)
    write(keyspace, Put(KEYS.session(stored.kind, stored.slot), stored.encode()),
          Put(KEYS.epoch(), epoch(state=EpochState.DRAINING)))

    @asynccontextmanager
    async def open_store(spec: CoordinatorSpec) -> AsyncIterator[MemoryStore]:
        yield MemoryStore(keyspace)

    monkeypatch.setattr(reach, "open_store", open_store)
    monkeypatch.setattr(reach.Where, "spec", lambda self: make_spec(tmp_path))
    return keyspace


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_acts_on_a_ledger_that_is_lost(
    tmp_path: Path, keyspace: Keyspace, capsys: pytest.CaptureFixture[str], command: str, situation: str
) -> None:
    Remembered(tmp_path).save({DB: SITUATIONS[situation](keyspace)})
    before = dict(keyspace.entries)
    assert run(COMMANDS[command]) == 1
    said = capsys.readouterr().err
    assert "is lost" in said
    assert f"pooler ledger rebuild {DB}" in said
    assert keyspace.entries == before


@pytest.mark.parametrize("command", COMMANDS)
def test_nor_on_one_that_is_being_rebuilt(
    tmp_path: Path, keyspace: Keyspace, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    head = LedgerHead("second", LedgerState.RECOVERING, TAG, rebuilt="0001")
    write(keyspace, Put(KEYS.ledger(), head.encode()))
    Remembered(tmp_path).save({DB: Seen("first", 99)})
    before = dict(keyspace.entries)
    assert run(COMMANDS[command]) == 1
    assert "being rebuilt" in capsys.readouterr().err
    assert keyspace.entries == before


def test_a_ledger_that_is_the_one_remembered_is_acted_on(
    tmp_path: Path, keyspace: Keyspace, capsys: pytest.CaptureFixture[str]
) -> None:
    Remembered(tmp_path).save({DB: Seen("first", keyspace.revision)})
    assert run(COMMANDS["resolve"]) == 0
    assert "freed" in capsys.readouterr().out
    assert run(COMMANDS["abort"]) == 0


def test_one_that_is_lost_can_be_shown_and_says_so(
    tmp_path: Path, keyspace: Keyspace, capsys: pytest.CaptureFixture[str]
) -> None:
    Remembered(tmp_path).save({DB: Seen("other", 1)})
    assert run(["ledger", "show", DB]) == 0
    told = capsys.readouterr()
    assert "main/0.7" in told.out
    assert "lost" in told.err


@pytest.mark.parametrize("command", [["policy", "show", DB], ["ledger", "watch", DB, "--for", "0.5s"]])
def test_so_do_its_policies_and_a_watch(
    tmp_path: Path, keyspace: Keyspace, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    Remembered(tmp_path).save({DB: Seen("other", 1)})
    run(command)
    assert capsys.readouterr().err.count("this ledger is lost") == 1
    Remembered(tmp_path).save({DB: Seen("first", keyspace.revision)})
    run(command)
    assert "lost" not in capsys.readouterr().err


def test_why_a_policy_was_refused_is_shown_where_the_fleet_runs(
    keyspace: Keyspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del keyspace.entries[KEYS.alias()]
    why = "db1:5432 has room for 4 sessions"
    status = {"processes": [{"figures": {}}, {"figures": {"ledgers": {DB: {"no_policy": why}}}}]}
    monkeypatch.setattr(fleet, "status_of", lambda config: status)
    assert run(["policy", "show", DB]) == 1
    assert f"refused: {why}" in capsys.readouterr().out


def test_a_memory_that_cannot_be_read_is_named(
    tmp_path: Path, keyspace: Keyspace, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE_NAME).write_text("[")
    assert run(COMMANDS["resolve"]) == 1
    assert str(tmp_path / FILE_NAME) in capsys.readouterr().err


def test_without_a_run_directory_the_ledger_is_taken_as_it_is(
    tmp_path: Path, keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    Remembered(tmp_path).save({DB: Seen("other", 1)})
    monkeypatch.setattr(reach.Where, "spec", lambda self: replace(make_spec(tmp_path), run_dir=""))
    assert run(COMMANDS["resolve"]) == 0
