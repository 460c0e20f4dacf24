"""Sessions whose slot is no more take a new permit whatever they do, or are given up as they fall idle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.states import Proof
from pooler.admission.ticket import Ticket
from pooler.pool import steering
from pooler.pool.ledger_view import LedgerView
from pooler.relay.server import ServerConn
from tests.pool.asking import WISH, Clock, go_down, let_pass, open_one, plain, tell
from tests.pool.fake_coordinator import DB
from tests.pool.world import World, world
from tests.relay.world import World as PoolWorld
from tests.relay.world import world as pool_world


def lower(permit: Permit, slot: int = 0) -> Permit:
    return Permit(Kind.MAIN, slot + 100, permit.generation)


def move_slot(w: World, old: Permit, new: Permit) -> None:
    w.ledger.slots[new.slot] = replace(w.ledger.slots.pop(old.slot), permit=new)


async def ask(w: World, op: str, **args: Any) -> Any:
    return await w.coordinator.links[-1].call(op, db=DB, **args)


# ---- its permits


async def test_what_is_said_of_a_session_that_took_its_new_permit_names_that_one(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        old = await open_one(w)
        new = lower(old)
        assert await ask(w, "moved", moves=[[plain(old), plain(new)]]) == {"lost": []}
        move_slot(w, old, new)
        w.permits.released(DB, new, Proof.EOF)
        await w.permits.settled()
        assert w.ledger.slots == {}
        assert w.permits.statistics().held == {}


async def test_being_told_twice_is_being_told_once(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        old = await open_one(w)
        new = lower(old)
        for _ in range(2):
            assert await ask(w, "moved", moves=[[plain(old), plain(new)]]) == {"lost": []}
        assert w.holder.moved == [(old, new)]


async def test_a_session_that_is_being_opened_or_closed_keeps_its_name(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        opening = (await w.permits.reserve(WISH, 1.0)).permit
        closing = await open_one(w)
        await w.permits.closing(DB, closing)
        moves = [[plain(each), plain(lower(each, slot))] for slot, each in enumerate((opening, closing))]
        assert await ask(w, "moved", moves=moves) == {"lost": [new for _, new in moves]}
        assert w.holder.moved == []
        assert w.permits.statistics().held == {"SESSION_RESERVED": 1, "CLOSING": 1}


async def test_a_hello_that_is_answered_moved_closes_nothing(tmp_path: Path, autojump_clock: Clock) -> None:
    async with world(tmp_path) as w:
        old = await open_one(w)
        new = lower(old)
        await go_down(w)
        move_slot(w, old, new)
        w.coordinator.moved = [(old, new)]
        w.coordinator.down = False
        while not w.permits.statistics().linked:
            await let_pass(0.1)
        assert w.holder.moved == [(old, new)]
        assert w.holder.closed == []
        assert w.permits.statistics().permits_gone_total == 0


async def test_what_is_to_be_given_up_is_left_alone_while_the_ledger_is_away(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with world(tmp_path) as w:
        permit = await open_one(w)
        await tell(w, "retire", permits=[plain(permit)])
        assert w.holder.given_up == [permit]
        w.coordinator.state = "LOST"
        await tell(w, "ledger", ledger=w.coordinator.ledger_map())
        await tell(w, "retire", permits=[plain(permit)])
        assert w.holder.given_up == [permit]


# ---- in a pool


HEARD = LedgerView(DB, state="ACTIVE", reachable=True, epoch=4, epoch_state="ACTIVE")


@pytest.fixture
def pool() -> Iterator[PoolWorld]:
    """Two idle sessions under an epoch that serves."""
    with pool_world(2) as made:
        for server in made.pool.core.idle:
            server.epoch = HEARD.epoch
        steering.ledger_changed(made.pool, HEARD)
        yield made


def in_use(made: PoolWorld) -> ServerConn:
    ticket: Ticket = Ticket(lambda _: None, lambda _: None)
    ticket.start(monotonic(), inf)
    server = made.pool.request(ticket)
    assert server is not None
    return server


def test_an_idle_session_that_is_given_up_is_closed_at_once_and_no_other(pool: PoolWorld) -> None:
    going, staying = pool.pool.core.idle
    steering.give_up(pool.pool, going)
    assert pool.pool.core.idle == [staying]
    assert (going.closing, staying.closing, pool.pool.core.closing) == (True, False, 1)


def test_one_in_use_is_closed_when_it_comes_back(pool: PoolWorld) -> None:
    server = in_use(pool)
    steering.give_up(pool.pool, server)
    assert not server.closing
    pool.pool.give(server, monotonic())
    assert server.closing
    assert len(pool.pool.core.idle) == 1


def test_one_in_use_is_kept_if_the_ledger_is_away_by_then(pool: PoolWorld) -> None:
    server = in_use(pool)
    steering.give_up(pool.pool, server)
    steering.ledger_changed(pool.pool, HEARD.cut_off())
    steering.ledger_changed(pool.pool, HEARD)
    pool.pool.give(server, monotonic())
    assert not server.closing
    assert len(pool.pool.core.idle) == 2


def test_what_is_closing_already_is_left_alone(pool: PoolWorld) -> None:
    server = pool.pool.core.idle[0]
    pool.pool.retire(server, "its time is over")
    steering.give_up(pool.pool, server)
    assert pool.pool.core.closing == 1
