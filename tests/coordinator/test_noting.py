"""Which ticket a dead worker's session served is read by its own host, whoever leads, and never guessed."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from coordinator.ledger.ledger import Applied
from coordinator.ledger.record import Permit, Session
from coordinator.ledger.rules import Code, NoteTicket, Reassert, Refused
from coordinator.ledger.states import SessionState
from coordinator.noting import Noting
from coordinator.session_table import SessionTable, encode_who
from tests.coordinator.stage import DB, TTL_SECONDS, Stage, stage
from tests.ledger.ground import KEYS, session


def dead_pid() -> int:
    """Of a process that has been waited for."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def leave_table(run_dir: Path, boot_id: str, monkeypatch: pytest.MonkeyPatch, *rows: Permit) -> None:
    """The table of a worker that died with a transaction on each of `rows`."""
    pid = dead_pid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        table = SessionTable.create(run_dir, boot_id)
    for number, permit in enumerate(rows):
        table.take(DB, permit, 42).busy(77 + number, encode_who("acme", "batch", "10.0.0.9"), 1)
    table.close()


async def hold(on: Stage, state: SessionState, slot: int = 0) -> Permit:
    held = session(state, slot=slot, seat=slot, owner="dead", request_id=f"r{slot}", backend_start_us=5_000)
    await on.put(KEYS.session(held.kind, slot), held.encode())
    return held.permit


async def session_at(on: Stage, permit: Permit) -> Session:
    held = (await on.ledger.snapshot()).find(permit)
    assert held is not None
    return held.session


def noting(on: Stage, run_dir: Path, living: set[str] | None = None) -> Noting:
    return Noting({DB: on.ledger}, lambda: living or set(), run_dir=run_dir, ttl_seconds=TTL_SECONDS)


async def test_the_ticket_of_a_dead_worker_is_noted_by_its_host_once_the_permit_is_unknown(
    tmp_path: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on, SessionState.OPEN)
        leave_table(tmp_path, "dead", monkeypatch, permit)
        notes = noting(on, tmp_path)
        on.nursery.start_soon(notes.run)
        await trio.sleep(TTL_SECONDS / 2)  # noqa: TID251 - on a clock that jumps
        assert (await session_at(on, permit)).ticket == ""
        marked = replace(await session_at(on, permit), state=SessionState.UNKNOWN)
        await on.put(KEYS.session(permit.kind, permit.slot), marked.encode())  # by a leader of another host
        with capture_logs() as logs:
            await trio.sleep(TTL_SECONDS)  # noqa: TID251 - on a clock that jumps
        noted = await session_at(on, permit)
        assert (noted.ticket, noted.tenant, noted.state) == ("77", "acme", SessionState.UNKNOWN)
        assert [line["event"] for line in logs] == ["ticket_noted"]
        asked = on.store.asked
        await notes.note()
        assert on.store.asked == asked  # a table that was read whole costs nothing


async def test_the_table_of_a_worker_that_lives_is_its_own_affair(
    tmp_path: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on, SessionState.UNKNOWN)
        leave_table(tmp_path, "dead", monkeypatch, permit)
        await noting(on, tmp_path, living={"dead"}).note()
        assert (await session_at(on, permit)).ticket == ""


async def test_a_note_is_by_compare_keeps_what_stands_and_goes_with_a_reassertion(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        permit = await hold(on, SessionState.OPEN)
        refused = await on.ledger.apply(NoteTicket(permit, "77", "acme"))
        assert isinstance(refused, Refused)
        assert refused.code is Code.ILLEGAL
        unknown = replace(await session_at(on, permit), state=SessionState.UNKNOWN, terminating=False)
        await on.put(KEYS.session(permit.kind, permit.slot), unknown.encode())
        assert isinstance(await on.ledger.apply(NoteTicket(permit, "77", "acme")), Applied)
        assert await session_at(on, permit) == replace(unknown, ticket="77", tenant="acme")
        again = await on.ledger.apply(NoteTicket(permit, "78", "other"))
        assert isinstance(again, Applied)
        assert not again.changed
        assert isinstance(await on.ledger.apply(Reassert(permit)), Applied)
        back = await session_at(on, permit)
        assert (back.state, back.ticket, back.tenant) == (SessionState.OPEN, "", "")
        gone = await on.ledger.apply(NoteTicket(replace(permit, generation=99), "77", "acme"))
        assert isinstance(gone, Refused)
        assert gone.code is Code.GONE
