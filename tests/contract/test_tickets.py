"""A name moves by compare-and-set: of two registrations, beginnings or ends at once one is done."""

from __future__ import annotations

import trio

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.tickets import (
    Begin,
    Decision,
    End,
    Outcome,
    Refused,
    Register,
    TicketState,
    Why,
    Write,
)
from coordinator.tickets import HOUR_SECONDS, Tickets
from tests.contract.conftest import Ground, OpenGround

NOW_US = 1_800_000_000_000_000
PERMIT = Permit(Kind.MAIN, 1, 5)


def attempt(worker: str) -> Register:
    return Register("pay-1", worker, "host", "client")


def tickets_of(ground: Ground, clock: list[float] | None = None) -> Tickets:
    return Tickets(ground.store, FleetKeys.under(ground.prefix), lambda: NOW_US,
                   monotonic=lambda: clock[0] if clock else 1.0)


async def at_once(tickets: Tickets, *commands: Register | Begin) -> list[Decision]:
    found: list[Decision] = []

    async def one(command: Register | Begin) -> None:
        found.append(await tickets.apply("orders", "pay-1", command))

    async with trio.open_nursery() as nursery:
        for command in commands:
            nursery.start_soon(one, command)
    return found


async def test_of_registrations_at_once_each_has_its_attempt(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        tickets = tickets_of(ground)
        decisions = await at_once(tickets, attempt("a"), attempt("b"), attempt("c"))
        writes = [each for each in decisions if isinstance(each, Write)]
        assert sorted(each.ticket.attempt for each in writes) == [1, 2, 3]
        assert sorted(each.moved_from.attempt for each in writes if each.moved_from is not None) == [1, 2]


async def test_who_lost_its_place_cannot_begin(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        tickets = tickets_of(ground)
        await tickets.apply("orders", "pay-1", attempt("a"))
        found = await at_once(tickets, attempt("b"), Begin(1, "a", PERMIT, 7))
        last = await tickets.find("orders", "pay-1")
        assert last is not None
        refused = [each.why for each in found if isinstance(each, Refused)]
        if last.owner == "a":
            assert (last.state, refused) == (TicketState.IN_TRANSACTION, [Why.EXECUTING])
        else:
            assert (last.state, refused) == (TicketState.QUEUED, [Why.MOVED])


async def test_a_retry_is_told_that_it_runs_then_its_outcome(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        tickets = tickets_of(ground)
        await tickets.apply("orders", "pay-1", attempt("a"))
        await tickets.apply("orders", "pay-1", Begin(1, "a", PERMIT, 7))
        running = await tickets.apply("orders", "pay-1", attempt("b"))
        assert isinstance(running, Refused)
        assert running.why is Why.EXECUTING
        await tickets.apply("orders", "pay-1", End(1, "a", TicketState.RELEASED, Outcome.COMMITTED))
        told = await tickets.apply("orders", "pay-1", attempt("b"))
        assert isinstance(told, Refused)
        assert told.ticket is not None
        assert (told.why, told.ticket.outcome) == (Why.FINISHED, Outcome.COMMITTED)
        assert await tickets.find("orders/read", "pay-1") is None


async def test_what_ended_is_on_the_lease_of_its_hour_and_what_runs_on_none(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        clock = [0.0]
        tickets = tickets_of(ground, clock)
        key = FleetKeys.under(ground.prefix).db("orders").ticket

        async def lease_of(name: str) -> int:
            return (await ground.store.read(key(name))).entries[0].lease

        for name in ("x", "y"):
            await tickets.apply("orders", name, Register(name, "a", "host", "client"))
        first = await lease_of("x")
        assert first
        assert await lease_of("y") == first
        await tickets.apply("orders", "x", Begin(1, "a", PERMIT, 7))
        assert await lease_of("x") == 0
        clock[0] += HOUR_SECONDS
        await tickets.apply("orders", "x", End(1, "a", TicketState.RELEASED, Outcome.COMMITTED))
        assert await lease_of("x") not in (0, first)


async def test_a_lease_that_is_gone_is_granted_anew(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        tickets = tickets_of(ground)
        await tickets.apply("orders", "x", Register("x", "a", "host", "client"))
        key = FleetKeys.under(ground.prefix).db("orders").ticket("x")
        lease = (await ground.store.read(key)).entries[0].lease
        await (await ground.store.lease(1, lease_id=lease)).revoke()
        again = await tickets.apply("orders", "x", Register("x", "b", "host", "client"))
        assert isinstance(again, Write)
        assert again.ticket.attempt == 1
