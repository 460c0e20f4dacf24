"""`pooler ledger rebuild` as anybody types it, against a store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.ledger.access import Seen
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.record import LedgerHead, LedgerState
from coordinator.policy import encode_policy, load_policy
from coordinator.remembered import Remembered
from coordinator.spec import CoordinatorSpec, DatabaseSpec
from coordinator.store.api import Lost, Put, Txn, Won
from coordinator.store.memory import Keyspace, MemoryStore
from pooler.cli import options, reach
from pooler.cli.main import run
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import make_spec
from tests.ledger.ground import FLEET, KEYS, found, write

DB = KEYS.database
ORDER = ["ledger", "rebuild", DB, "--evidence", "restored from 03:00", "--timeout", "20s"]


class Fleet(MemoryStore):
    """A store whose fleet lets a rebuilt ledger grant again after a few looks at it, if it is up."""

    is_up = True
    looks = 0
    lost_again: tuple[Put, ...] | None = None  # what is there after its second look

    async def txn(self, txn: Txn) -> Won | Lost:
        outcome = await super().txn(txn)
        entry = self.keyspace.entries.get(KEYS.ledger())
        head = LedgerHead.decode(entry.value) if entry else None
        if self.is_up and head is not None and head.state is LedgerState.RECOVERING and not txn.puts:
            self.looks += 1
            if self.looks == 2 and self.lost_again is not None:
                self.keyspace.entries.clear()
                write(self.keyspace, *self.lost_again)
                return outcome
            if self.looks == 3:
                write(self.keyspace, Put(KEYS.ledger(), replace(head, state=LedgerState.ACTIVE).encode()))
        return outcome


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """What every command here reaches; the config has one database, in a run directory of the test's."""
    store = Fleet(found())

    @asynccontextmanager
    async def open_store(spec: CoordinatorSpec) -> AsyncIterator[MemoryStore]:
        yield store

    spec = make_spec(tmp_path, databases=(DatabaseSpec(DB, "orders", "app", ("127.0.0.1:5432",)),))
    monkeypatch.setattr(reach, "open_store", open_store)
    monkeypatch.setattr(reach.Where, "spec", lambda self: spec)
    return store


def head_of(keyspace: Keyspace) -> LedgerHead:
    return LedgerHead.decode(keyspace.entries[KEYS.ledger()].value)


@pytest.mark.parametrize("loss", ["wiped", "restored"])
def test_it_orders_the_rebuild_waits_for_it_and_keeps_the_evidence(
    tmp_path: Path, store: Fleet, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    Remembered(tmp_path).save({DB: Seen("first", 99)})
    if loss == "wiped":
        store.keyspace.entries.clear()
    assert run(ORDER) == 0
    told = capsys.readouterr().out
    assert "RECOVERING: 0 sessions held" in told
    assert told.splitlines()[-1].startswith(f"{DB}: ACTIVE")
    head = head_of(store.keyspace)
    kept = Attestation.decode(store.keyspace.entries[FLEET.operator(head.rebuilt)].value)
    assert (kept.what, kept.evidence) == (f"rebuild {DB}", "restored from 03:00")
    assert head.generation_base > 99


def test_a_name_of_the_config_means_its_ledger(tmp_path: Path, store: Fleet) -> None:
    Remembered(tmp_path).save({DB: Seen("first", 99)})
    assert run([*ORDER[:2], "orders", *ORDER[3:]]) == 0


def test_past_its_time_it_says_so_and_the_same_command_waits_again(
    tmp_path: Path, store: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    Remembered(tmp_path).save({DB: Seen("first", 99)})
    store.is_up = False
    assert run([*ORDER[:-1], "300ms"]) == 4
    assert "still being rebuilt" in capsys.readouterr().err
    incarnation = head_of(store.keyspace).incarnation
    store.is_up = True
    assert run(ORDER) == 0
    assert "already" in capsys.readouterr().out
    assert head_of(store.keyspace).incarnation == incarnation


@pytest.mark.parametrize("seen", [{DB: Seen("first", 1)}, {}])
def test_what_is_not_lost_or_was_never_seen_is_left_alone(
    tmp_path: Path, store: Fleet, capsys: pytest.CaptureFixture[str], seen: dict[str, Seen]
) -> None:
    Remembered(tmp_path).save(seen)
    before = dict(store.keyspace.entries)
    assert run(ORDER) == 1
    assert capsys.readouterr().err.startswith("pooler: ")
    assert store.keyspace.entries == before


def stored(generation: int, slots: int) -> bytes:
    text = policy_text(slots, db=DB).replace("generation: 1", f"generation: {generation}")
    return encode_policy(load_policy(text)[1])


def test_the_same_command_waits_on_also_when_the_host_has_seen_the_new_ledger(
    tmp_path: Path, store: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    store.is_up = False
    head = LedgerHead("second", LedgerState.RECOVERING, "t", rebuilt="1-x")
    write(store.keyspace, Put(KEYS.ledger(), head.encode()))
    Remembered(tmp_path).save({DB: Seen("second", store.keyspace.revision, "1-x")})
    assert run([*ORDER[:-1], "300ms"]) == 4
    assert "is being rebuilt already" in capsys.readouterr().out
    assert head_of(store.keyspace) == head


@pytest.mark.parametrize(("remembers", "says"), [
    ((2, 20), "policy generation 2 (20 permits) will count, the one that was in force"),
    (None, "policy generation 1 (55 permits) will count, the one of policies/orders.yml: no other is known")])
def test_it_says_before_it_begins_which_policy_will_count(
    tmp_path: Path, store: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    remembers: tuple[int, int] | None, says: str
) -> None:
    text = policy_text(55, db=DB)
    file = SimpleNamespace(path="policies/orders.yml")
    settings = SimpleNamespace(databases={"orders": SimpleNamespace(ledger=DB, policy=file)})
    monkeypatch.setattr(options, "settings_of", lambda config: settings)
    spec = make_spec(tmp_path, databases=(DatabaseSpec(DB, "orders", "app", ("h:1",), policy=text),))
    monkeypatch.setattr(reach.Where, "spec", lambda self: spec)
    Remembered(tmp_path).save({DB: Seen("first", 99)})
    if remembers is not None:
        Remembered(tmp_path).keep_policy(DB, remembers[0], stored(*remembers))
    store.keyspace.entries.clear()
    assert run(ORDER) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert says in first
    assert "is being rebuilt" in second


def test_a_policy_of_the_config_that_is_refused_is_told_by_the_command(
    tmp_path: Path, store: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SimpleNamespace(path="p.yml")
    settings = SimpleNamespace(databases={"orders": SimpleNamespace(ledger=DB, policy=file)})
    monkeypatch.setattr(options, "settings_of", lambda config: settings)
    spec = make_spec(tmp_path, databases=(
        DatabaseSpec(DB, "orders", "app", ("h:1",), policy=policy_text(0, db=DB)),))
    monkeypatch.setattr(reach.Where, "spec", lambda self: spec)
    Remembered(tmp_path).save({DB: Seen("first", 99)})
    store.keyspace.entries.clear()
    run(ORDER)
    told = capsys.readouterr().out
    assert "policy_refused" in told
    assert "serverSessionPermits" in told


@pytest.mark.parametrize("order", [ORDER[:3], [*ORDER[:3], "--evidence", "  "]])
def test_without_evidence_nothing_is_done(
    tmp_path: Path, store: Fleet, capsys: pytest.CaptureFixture[str], order: list[str]
) -> None:
    Remembered(tmp_path).save({DB: Seen("first", 99)})
    before = dict(store.keyspace.entries)
    assert run(order) == 2
    assert "--evidence" in capsys.readouterr().err
    assert store.keyspace.entries == before


@pytest.mark.parametrize("loss", ["wiped", "restored"])
def test_a_rebuild_that_is_lost_itself_says_so_and_ends(
    tmp_path: Path, store: Fleet, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    Remembered(tmp_path).save({DB: Seen("first", 99)})
    before = Put(KEYS.ledger(), store.keyspace.entries[KEYS.ledger()].value)
    store.lost_again = () if loss == "wiped" else (before,)
    assert run(ORDER) == 1
    assert "the ledger is lost again" in capsys.readouterr().err
