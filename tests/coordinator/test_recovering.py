"""A lost ledger is rebuilt: ordered once, filled by workers and servers, granting again when they agree."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.founding import Founder
from coordinator.freezing import set_frozen
from coordinator.http import Figures, _Scrape, not_ready
from coordinator.ledger.access import Seen
from coordinator.ledger.attestation import Attestation
from coordinator.ledger.invariants import check_ledger
from coordinator.ledger.record import Epoch, Kind, LedgerHead, LedgerState, Permit
from coordinator.link import Args
from coordinator.link_values import parse_permit
from coordinator.rebuild import NotLost, Rebuilder, order_rebuild
from coordinator.recovering import Recovering
from coordinator.spec import DatabaseSpec, Monitor
from coordinator.store.memory import Keyspace
from coordinator.view import View
from tests.coordinator.parts import Worker, policy_text
from tests.coordinator.stage import DB, NO_FENCE, Server, Stage, row, stage
from tests.coordinator.test_workers import opened
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US

SPEC = DatabaseSpec(DB, "shop", "app", (BACKEND.address,), monitor=Monitor("m", "p"), users=("app",))
AT_SERVER = {"system_identifier": BACKEND.system_identifier, "timeline": 1,
             "postmaster_start_us": BACKEND.postmaster_start_us, "in_recovery": False,
             "address": BACKEND.address}


@dataclass
class Rebuilding:
    """A stage with the parts that rebuild; they move when a test says so."""

    on: Stage
    recovering: Recovering
    rebuilder: Rebuilder

    async def order(self, seen: Seen | None = None, evidence: str = "restored") -> LedgerHead:
        ordered = await order_rebuild(
            self.on.store, FLEET, DB, seen or self.on.ledger.seen, who="me", evidence=evidence,
            now_us=lambda: NOW_US)
        await self.on.views.refresh()
        return ordered.head

    async def hear(self) -> int:
        return await self.recovering.recover(self.on.views.views[DB])

    async def step(self) -> str:
        why = await self.rebuilder.step(DB, NO_FENCE)
        await self.on.views.refresh()
        return why

    def lose(self, older: Keyspace | None = None) -> None:
        """The prefix is wiped, or an older state comes back."""
        if older is None:
            self.on.keyspace.entries.clear()
        else:
            self.on.store.keyspace = self.on.keyspace = older

    async def lost(self) -> None:
        await self.on.views.refresh()
        assert self.on.views.views[DB].state == "LOST"


@asynccontextmanager
async def rebuilding(run_dir: Path, slots: int = 4) -> AsyncIterator[Rebuilding]:
    async with stage(run_dir, slots=slots) as on:
        on.views._access[DB].memory = on.ledger._access.memory
        recovering = Recovering(
            on.store, on.views, {DB: on.ledger}, on.registry, host="host", now_us=lambda: NOW_US)
        rebuilder = Rebuilder(
            on.store, on.views, {DB: on.ledger}, {DB: (SPEC,)}, on.eyes, now_us=lambda: NOW_US)
        await on.views.refresh()
        yield Rebuilding(on, recovering, rebuilder)


def holds(worker: Worker, *pids: int, opening: int = 0, epoch: int = 1, lost: bool = False) -> None:
    """What it says of itself: one open session for each permit it has, in order."""
    def recover(args: Args) -> Args:
        assert args == {"db": DB}
        permits = sorted(permit for _, permit in worker.permits)
        return {"opening": opening, "permits": [[str(p.kind), p.slot, p.generation] for p in permits],
                "epoch": {"number": epoch, "backend": AT_SERVER},
                "sessions": [{
                    "permit": [str(p.kind), p.slot, p.generation], "dbname": "app", "user": "app", "seats": 9,
                    "pid": pid, "backend_start_us": pid * 10, "backend": AT_SERVER, "epoch": epoch}
                    for p, pid in zip(permits, pids, strict=False)]}

    def moved(args: Args) -> Args:
        taken = []
        for old, new in args["moves"]:
            del worker.permits[DB, parse_permit(old)]
            if new is not None:
                taken.append(new)
                worker.permits[DB, parse_permit(new)] = "OPEN"
        return {"lost": taken if lost else []}

    worker.answers.update(recover=recover, moved=moved)


def head_of(on: Stage) -> LedgerHead:
    return LedgerHead.decode(on.keyspace.entries[KEYS.ledger()].value)


async def standing(on: Stage) -> dict[int, tuple[str, str]]:
    """pid: (state, owner)."""
    return {held.session.pid: (str(held.session.state), held.session.owner)
            for held in (await on.ledger.snapshot()).sessions}


async def refound(on: Stage) -> None:
    """What the founder writes again: the policy."""
    spec = replace(SPEC, policy=policy_text(4, db=DB))
    founder = Founder(on.store, FLEET, {DB: (spec,)}, on.eyes, now_us=lambda: 0)
    for _ in range(2):
        await founder.found(on.views.views[DB])
        await on.views.refresh()


@pytest.mark.parametrize("loss", ["wiped", "restored"])
async def test_every_session_that_lives_has_its_slot_again_when_the_ledger_grants(
    tmp_path: Path, clock: MockClock, loss: str
) -> None:
    async with rebuilding(tmp_path) as r, r.on.worker("A") as worker:
        on = r.on
        await opened(worker)
        older = on.keyspace.clone()
        await opened(worker)
        before = {permit for _, permit in worker.permits}
        on.eyes.server.rows = [row(11, 110), row(12, 120), row(13, 130)]  # the last: of a worker that died
        holds(worker, 11, 12)
        r.lose(older if loss == "restored" else None)
        await r.lost()
        head = await r.order()
        assert (head.state, on.views.views[DB].state) == (LedgerState.RECOVERING, "RECOVERING")
        assert not_ready(on.views.views) == [f"{DB}: the ledger is being rebuilt"]
        if loss == "wiped":
            await refound(on)
        else:
            assert "workers A" in await r.step()
        assert await r.hear() == 0
        assert "another look" in await r.step()
        assert await r.step() == ""
        assert head_of(on).state is LedgerState.ACTIVE
        assert await standing(on) == {
            11: ("OPEN", "A"), 12: ("OPEN", "A"), 13: ("SESSION_UNKNOWN", "")} | (
            {42: ("SESSION_UNKNOWN", "A")} if loss == "restored" else {})
        snapshot = await on.ledger.snapshot()
        assert check_ledger(snapshot, KEYS) == []
        assert {held.permit for held in snapshot.sessions if held.session.pid in (11, 12)}.isdisjoint(before)
        assert [each.request_id for each in snapshot.receipts if not each.lease] == []
        assert on.views.views[DB].state == "ACTIVE"
        holds(worker)
        assert (await worker.hello())["gone"] == []


async def test_the_order_is_given_once_and_kept_with_its_evidence(tmp_path: Path, clock: MockClock) -> None:
    async with rebuilding(tmp_path) as r:
        seen = r.on.ledger.seen
        r.lose()
        await r.lost()
        head = await r.order(seen, evidence="the disk burnt")
        assert await r.order(seen) == head
        record = Attestation.decode(r.on.keyspace.entries[FLEET.operator(head.rebuilt)].value)
        assert (record.who, record.evidence) == ("me", "the disk burnt")
        assert head.generation_base > seen.revision
        with pytest.raises(ValueError, match="evidence"):
            await r.order(seen, evidence=" ")


@pytest.mark.parametrize(("seen", "why"), [
    (Seen("first", 1), "nothing is to be rebuilt"), (Seen(), "never saw")])
async def test_a_ledger_that_is_not_lost_is_left_alone(
    tmp_path: Path, clock: MockClock, seen: Seen, why: str
) -> None:
    async with rebuilding(tmp_path) as r:
        before = dict(r.on.keyspace.entries)
        with pytest.raises(NotLost, match=why):
            await r.order(seen)
        assert r.on.keyspace.entries == before


async def test_a_second_loss_is_rebuilt_above_the_first(tmp_path: Path, clock: MockClock) -> None:
    async with rebuilding(tmp_path) as r:
        r.lose()
        await r.lost()
        first = await r.order()
        r.lose()
        await r.lost()
        second = await r.order()
        assert second.rebuilt > first.rebuilt
        assert second.generation_base > first.generation_base
        assert r.on.views.views[DB].state == "RECOVERING"


async def test_a_worker_that_opens_something_is_asked_again(tmp_path: Path, clock: MockClock) -> None:
    async with rebuilding(tmp_path) as r, r.on.worker("A") as worker:
        await opened(worker)
        older = r.on.keyspace.clone()
        await opened(worker)
        r.lose(older)
        await r.lost()
        await r.order()
        holds(worker, 11, opening=1)
        assert await r.hear() == 1
        assert worker.told_of("moved") == []
        holds(worker, 11)
        assert await r.hear() == 0
        assert len(worker.told_of("recover")) == 2
        assert await r.hear() == 0
        assert len(worker.told_of("recover")) == 2, "once heard, it is not asked again"


async def test_a_session_without_a_free_slot_is_closed_and_one_that_has_ended_is_proven_gone(
    tmp_path: Path, clock: MockClock
) -> None:
    async with rebuilding(tmp_path, slots=2) as r, r.on.worker("A") as worker:
        await opened(worker)
        await opened(worker)
        older = r.on.keyspace.clone()
        older.entries = {key: entry for key, entry in older.entries.items()
                         if not key.startswith((KEYS.sessions(), KEYS.all_seats(), KEYS.receipts()))}
        worker.permits[DB, Permit(Kind.MAIN, 2, 3)] = "OPEN"
        worker.permits[DB, Permit(Kind.MAIN, 3, 3)] = "OPEN"
        r.on.store.keyspace = r.on.keyspace = older
        older.revision -= 3
        await r.lost()
        await r.order()
        holds(worker, 11, 12, 13, 14, lost=True)
        assert await r.hear() == 0
        (told,) = worker.told_of("moved")
        assert [new is None for _, new in told["moves"]] == [False, False, True, True]
        assert await standing(r.on) == {11: ("SESSION_UNKNOWN", "A"), 12: ("SESSION_UNKNOWN", "A")}


async def test_no_session_is_closed_for_want_of_a_policy_that_is_still_to_be_published(
    tmp_path: Path, clock: MockClock
) -> None:
    async with rebuilding(tmp_path) as r, r.on.worker("A") as worker:
        await opened(worker)
        r.lose()
        await r.lost()
        await r.order()
        holds(worker, 11)
        assert await r.hear() == 1
        assert worker.told_of("moved") == []
        await refound(r.on)
        assert await r.hear() == 0
        assert await standing(r.on) == {11: ("OPEN", "A")}


async def test_the_epoch_does_not_go_back(tmp_path: Path, clock: MockClock) -> None:
    async with rebuilding(tmp_path) as r, r.on.worker("A") as worker:
        await opened(worker)
        r.lose()
        await r.lost()
        await r.order()
        await refound(r.on)
        holds(worker, 11, epoch=7)
        await r.hear()
        epoch = Epoch.decode(r.on.keyspace.entries[KEYS.epoch()].value)
        assert (epoch.number, epoch.backend) == (7, BACKEND)
        assert await standing(r.on) == {11: ("OPEN", "A")}


async def test_what_cannot_be_seen_is_waited_for(tmp_path: Path, clock: MockClock) -> None:
    async with rebuilding(tmp_path) as r:
        r.lose()
        await r.lost()
        await r.order()
        assert "epoch" in await r.step()
        await refound(r.on)
        r.on.eyes.server.unreachable = True
        assert "unreachable" in await r.step()
        r.on.eyes.server.unreachable = False
        r.on.eyes.server.anonymous = {77}
        assert "starting" in await r.step()
        r.on.eyes.server.anonymous = set()
        assert await r.step() == ""


OTHER = "10.0.0.12:5432"


@pytest.mark.parametrize(("system", "counted"), [(BACKEND.system_identifier, 2), ("another cluster", 0)])
async def test_sessions_at_another_host_of_the_config_are_counted_before_the_ledger_grants(
    tmp_path: Path, clock: MockClock, system: str, counted: int
) -> None:
    """Left there by workers that are stopped, and cannot say so."""
    async with rebuilding(tmp_path) as r:
        r.rebuilder._databases = {DB: (replace(SPEC, hosts=(BACKEND.address, OTHER)),)}
        backend = replace(BACKEND, address=OTHER, system_identifier=system)
        r.on.eyes.servers[OTHER] = Server(backend=backend, rows=[row(21, 5), row(22, 5)])
        r.lose()
        await r.lost()
        await r.order()
        await refound(r.on)
        while await r.step():
            pass
        found = await standing(r.on)
        assert found == dict.fromkeys([21, 22][:counted], ("SESSION_UNKNOWN", ""))
        assert head_of(r.on).state is LedgerState.ACTIVE


async def test_a_worker_that_comes_when_the_ledger_grants_again_takes_its_sessions_over(
    tmp_path: Path, clock: MockClock
) -> None:
    async with rebuilding(tmp_path) as r:
        async with r.on.worker("A") as worker:
            await opened(worker)
            r.lose()
            await r.lost()
        r.on.eyes.server.rows = [row(11, 110)]
        await r.order()
        await refound(r.on)
        assert "another look" in await r.step()
        assert await r.step() == ""
        assert await standing(r.on) == {11: ("SESSION_UNKNOWN", "")}
        async with r.on.worker("A", permits=worker.permits) as back:
            holds(back, 11, opening=1)  # it grows again: nobody waits for that to end
            assert await r.hear() == 0
            assert await standing(r.on) == {11: ("OPEN", "A")}
            assert back.told_of("permit_gone") == []


async def test_what_an_older_state_says_of_a_worker_is_not_its_any_more(
    tmp_path: Path, clock: MockClock
) -> None:
    async with rebuilding(tmp_path) as r, r.on.worker("A") as worker:
        await opened(worker)
        await worker.reserve(db=DB)
        older = r.on.keyspace.clone()
        await opened(worker)
        r.lose(older)
        await r.lost()
        await r.order()
        worker.permits.clear()
        holds(worker)
        assert await r.hear() == 0
        assert await standing(r.on) == {42: ("SESSION_UNKNOWN", "A")}


async def test_a_ledger_never_lost_asks_no_worker_for_anything(tmp_path: Path, clock: MockClock) -> None:
    async with rebuilding(tmp_path) as r, r.on.worker("A") as worker:
        r.on.nursery.start_soon(r.recovering.run)
        await opened(worker)
        await r.on.views.refresh()
        await wait_all_tasks_blocked()
        assert worker.told_of("recover") == []
        assert await r.step() == ""


def test_a_metric_pages_while_a_ledger_is_lost_or_being_rebuilt() -> None:
    def gauge(view: View) -> float:
        figures = Figures(leading=True, workers_linked=0, waiting={}, unknown_age_seconds={}, unknown_old={},
                          released={}, requests={})
        found = {metric.name: metric for metric in _Scrape(figures, {DB: view}, {}).collect()}
        return found["pooler_ledger_lost"].samples[0].value

    head = LedgerHead("i", LedgerState.ACTIVE, "t")
    whole = View(DB, reachable=True, head=head)
    assert gauge(whole) == 0
    assert gauge(replace(whole, lost="wiped")) == 1
    assert gauge(replace(whole, head=replace(head, state=LedgerState.RECOVERING))) == 1


async def test_a_freeze_outlives_a_rebuild(tmp_path: Path, clock: MockClock) -> None:
    async with rebuilding(tmp_path) as r:
        await set_frozen(r.on.store, FLEET, DB, True, who="she", evidence="", now_us=lambda: NOW_US)
        await r.on.views.refresh()
        seen = replace(r.on.ledger.seen, lost=True)
        assert (await r.order(seen)).frozen == "she"
        assert await r.step() == ""
        assert head_of(r.on).frozen == "she"
