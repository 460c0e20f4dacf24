"""The leader's pass: names that ran on a dead worker end with their sessions; else nothing is asked."""

from __future__ import annotations

from coordinator.ledger.record import Session
from coordinator.ledger.tickets import Begin, Outcome, Register, TicketState
from coordinator.store.api import Put
from coordinator.tickets import TicketReaper, Tickets
from tests.ledger.ground import FLEET, KEYS, NOW_US, World, session, world, write

DB = KEYS.database


def put_session(place: World, stored: Session) -> None:
    write(place.keyspace, Put(KEYS.session(stored.kind, stored.slot), stored.encode()))


async def running_and_waiting() -> tuple[World, Tickets, TicketReaper]:
    """Worker A has `ran` on session main/0.7 and `waits`; B has `lives` on main/1.8."""
    place = world()
    tickets = Tickets(place.store, FLEET, lambda: NOW_US)
    for name, stored in (("ran", session()), ("lives", session(slot=1, generation=8, owner="B", seat=1))):
        put_session(place, stored)
        await tickets.apply(DB, name, Register(name, stored.owner, "host", "client"))
        await tickets.apply(DB, name, Begin(1, stored.owner, stored.permit, 7))
    await tickets.apply(DB, "waits", Register("waits", "A", "host", "client"))
    return place, tickets, TicketReaper(place.store, FLEET, tickets)


async def state_of(tickets: Tickets, name: str) -> tuple[TicketState, Outcome]:
    found = await tickets.find(DB, name)
    assert found is not None
    return found.state, found.outcome


async def tend(place: World, reaper: TicketReaper) -> None:
    """A pass, with what the watch says of changes since the last."""
    for batch in place.keyspace.history:
        for change in batch:
            reaper.heard(change)
    await reaper.tend(DB, await place.ledger.snapshot())


async def test_what_a_dead_worker_ran_is_unknown_until_its_session_is_freed() -> None:
    place, tickets, reaper = await running_and_waiting()
    await tend(place, reaper)
    assert await state_of(tickets, "ran") == (TicketState.IN_TRANSACTION, Outcome.NONE)
    place.end_lease("A")
    for _ in range(2):
        await tend(place, reaper)
        assert await state_of(tickets, "ran") == (TicketState.UNKNOWN, Outcome.NONE)
    assert await state_of(tickets, "waits") == (TicketState.QUEUED, Outcome.NONE)
    write(place.keyspace, deletes=(KEYS.session(session().kind, 0),))
    await tend(place, reaper)
    assert await state_of(tickets, "ran") == (TicketState.RELEASED, Outcome.UNKNOWN)
    assert await state_of(tickets, "lives") == (TicketState.IN_TRANSACTION, Outcome.NONE)


async def test_a_slot_that_cannot_be_read_frees_no_ticket() -> None:
    place, tickets, reaper = await running_and_waiting()
    place.end_lease("A")
    await tend(place, reaper)
    write(place.keyspace, Put(KEYS.session(session().kind, 0), b"?"))
    await tend(place, reaper)
    assert await state_of(tickets, "ran") == (TicketState.UNKNOWN, Outcome.NONE)


async def test_what_began_after_the_ledger_was_read_is_left_alone() -> None:
    place, tickets, reaper = await running_and_waiting()
    old = await place.ledger.snapshot()
    stored = session(slot=2, generation=9, owner="C", seat=2)
    put_session(place, stored)
    await tickets.apply(DB, "new", Register("new", "C", "host", "client"))
    await tickets.apply(DB, "new", Begin(1, "C", stored.permit, 7))
    await reaper.tend(DB, old)
    assert await state_of(tickets, "new") == (TicketState.IN_TRANSACTION, Outcome.NONE)


async def test_where_nothing_runs_a_pass_asks_nothing() -> None:
    place = world()
    tickets = Tickets(place.store, FLEET, lambda: NOW_US)
    reaper = TicketReaper(place.store, FLEET, tickets)
    await tickets.apply(DB, "waits", Register("waits", "A", "host", "client"))
    await tend(place, reaper)
    snapshot = await place.ledger.snapshot()
    asked: list[str] = []
    place.store.range = asked.append  # type: ignore[method-assign,assignment]
    place.store.read = asked.append  # type: ignore[method-assign,assignment]
    await reaper.tend(DB, snapshot)
    assert asked == []
