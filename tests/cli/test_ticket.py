"""`pooler ticket show`: what stands under a name, one clear line where nothing does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.tickets import NamedTicket, Outcome, TicketState
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import Put
from coordinator.store.memory import MemoryStore
from pooler.cli import reach
from pooler.cli.main import run
from tests.coordinator.stage import make_spec
from tests.ledger.ground import KEYS, found, write

DB = KEYS.database
PAID = NamedTicket(
    "pay-1", TicketState.RELEASED, "boot-1234-more", "host-a", "10.0.0.1:5", 2, 1, 2, tenant="acme",
    outcome=Outcome.COMMITTED, permit=str(Permit(Kind.MAIN, 3, 70)), pid=42)


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger with one name in it, as every command here reaches it."""
    keyspace = found()
    write(keyspace, Put(KEYS.ticket("pay-1"), PAID.encode()))

    @asynccontextmanager
    async def open_store(spec: CoordinatorSpec) -> AsyncIterator[MemoryStore]:
        yield MemoryStore(keyspace)

    monkeypatch.setattr(reach, "open_store", open_store)
    monkeypatch.setattr(reach.Where, "spec", lambda self: make_spec(tmp_path))


def test_a_name_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ticket", "show", DB, "pay-1"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["TICKET", "STATE", "OUTCOME"]
    assert line.split()[:3] == ["pay-1", "REQUEST_RELEASED", "committed"]


def test_as_json_with_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ticket", "show", DB, "pay-1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["database"], shown["worker"], shown["attempt"]) == (DB, "boot-1234-more", 2)
    assert (shown["permit"], shown["pid"], shown["tenant"]) == ("main/3.70", 42, "acme")


def test_where_nothing_stands_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ticket", "show", DB, "pay-2"]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f'{DB}: no ticket "pay-2"\n')


def test_wrong_use_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ticket", "show", DB, "a/b"]) == 2
    assert run(["ticket", "show", "nowhere", "pay-1"]) == 2
    assert "no ledger nowhere" in capsys.readouterr().err
