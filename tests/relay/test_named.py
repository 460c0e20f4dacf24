"""A client that names its transaction: it is registered, begun before anything is sent, and ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Permit
from coordinator.ledger.tickets import Begin, End, NamedTicket, Outcome, Refused, Register, TicketState, Write
from coordinator.link import LinkRefused
from coordinator.store.memory import MemoryStore
from coordinator.tickets import Tickets
from pooler.relay.client import ClientConn
from pooler.relay.named import Names
from pooler.wire.messages import query
from tests.relay.world import Client, World


@dataclass
class Ledger:
    """The permits' end of a link to the real rules; `hold` keeps an operation from being answered."""

    tickets: Tickets = field(default_factory=lambda: Tickets(MemoryStore(), FleetKeys("p", "f"), lambda: 1))
    owner: str = "A"
    hold: str = ""
    go: trio.Event = field(default_factory=trio.Event)
    away: bool = False
    ended: list[tuple[Any, ...]] = field(default_factory=list)

    async def _held(self, op: str) -> None:
        if self.hold == op:
            await self.go.wait()
        if self.away:
            raise LinkRefused("failed", "away")

    async def register_ticket(
        self, db: str, ticket_id: str, client: str, tenant: str, klass: str
    ) -> dict[str, Any]:
        done = await self.tickets.apply(db, ticket_id, Register(ticket_id, self.owner, "host", client))
        await self._held("register")
        if isinstance(done, Refused):
            assert done.ticket is not None
            return {"refused": str(done.why), "owner": done.ticket.owner, "host": "host",
                    "state": str(done.ticket.state), "outcome": str(done.ticket.outcome)}
        joined = isinstance(done, Write) and done.moved_from is not None
        return {"attempt": done.ticket.attempt, "joined": joined}

    async def begin_ticket(
        self, db: str, ticket_id: str, attempt: int, permit: Permit, pid: int
    ) -> dict[str, Any]:
        await self._held("begin")
        done = await self.tickets.apply(db, ticket_id, Begin(attempt, self.owner, permit, pid))
        return {"refused": str(done.why)} if isinstance(done, Refused) else {}

    def ticket_ended(self, db: str, ticket_id: str, attempt: int, state: str, outcome: str) -> None:
        self.ended.append((db, ticket_id, End(attempt, self.owner, TicketState(state), Outcome(outcome))))

    async def stands(self) -> NamedTicket:
        """The record, with what was told of ends so far."""
        for db, ticket_id, end in self.ended:
            await self.tickets.apply(db, ticket_id, end)
        self.ended.clear()
        found = await self.tickets.find("db/write", "pay")
        assert found is not None
        return found


@dataclass
class Stage:
    world: World
    ledger: Ledger
    names: Names

    def client(self, name: str = "pay") -> Client:
        made = self.world.client()
        made.conn.ticket_id = name
        return made

    async def say(self, client: Client, sql: str) -> str:
        self.world.send(client, query(sql))
        return await self.settle(client)

    async def settle(self, client: Client) -> str:
        for _ in range(4):
            self.world.settle()
            await wait_all_tasks_blocked()
        return client.kinds

    async def state(self) -> tuple[TicketState, Outcome]:
        found = await self.ledger.stands()
        return found.state, found.outcome


@asynccontextmanager
async def stage(sessions: int = 1, mode: str = "transaction") -> AsyncIterator[Stage]:
    async with trio.open_nursery() as nursery:
        world, ledger = World(sessions, mode), Ledger()
        names = Names(ledger, nursery)
        world.parts.names = names
        try:
            yield Stage(world, ledger, names)
        finally:
            world.close()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("script", "outcome"), [
    (["select 1"], Outcome.COMMITTED), (["begin", "select 1", "commit"], Outcome.COMMITTED),
    (["begin", "rollback"], Outcome.ROLLED_BACK)])
async def test_it_runs_and_the_ledger_has_its_outcome(script: list[str], outcome: Outcome) -> None:
    async with stage() as on:
        client = on.client()
        for sql in script:
            assert "E:" not in await on.say(client, sql)
            if sql == "begin":
                assert await on.state() == (TicketState.IN_TRANSACTION, Outcome.NONE)
        assert await on.state() == (TicketState.RELEASED, outcome)
        assert (client.conn.ticket_id, client.conn.named, type(client.conn)) == ("", None, ClientConn)
        await on.say(client, "select 2")  # unnamed
        assert not on.ledger.ended
        again = on.client()
        assert await on.say(again, "select 1") == "E:25000 Z:I"
        on.world.check_idle()


async def test_a_second_registration_ends_the_first_wait() -> None:
    async with stage() as on:
        busy = on.world.client()
        await on.say(busy, "begin")
        first, second = on.client(), on.client()
        assert await on.say(first, "select 1") == ""
        assert await on.say(second, "select 1") == ""
        on.names.moved({"db": "db/write", "id": "pay", "attempt": 1})
        assert await on.settle(first) == "E:57014 Z:I"
        await on.say(busy, "commit")
        assert (await on.settle(second)).endswith("Z:I")
        assert (await on.ledger.stands()).attempt == 2
        on.world.check_idle()


@pytest.mark.parametrize("told", ["before", "after"])
async def test_a_retry_that_takes_the_place_of_the_first_pays_nothing_a_later_one_pays(told: str) -> None:
    async with stage() as on:
        bucket = {"rate": 0.001, "burst": 2.0, "mode": "reject"}
        on.world.pool.book.learn({"generation": 1, "executionClasses": {"x": {}},
                                  "tenants": {"a": {"bucket": bucket}}}, monotonic())
        toll = on.world.pool.book.tolls.of_tenant("a")
        assert toll is not None
        busy, first, second = on.world.client(), on.client(), on.client()
        for each in (first, second):
            each.conn.tenant = "a"
            each.conn.identify()
        await on.say(busy, "begin")
        assert await on.say(first, "select 1") == ""
        if told == "before":
            on.ledger.hold = "register"
        assert await on.say(second, "select 1") == ""
        on.names.moved({"db": "db/write", "id": "pay", "attempt": 1})
        assert await on.settle(first) == "E:57014 Z:I"
        on.ledger.go.set()
        await wait_all_tasks_blocked()
        assert toll.admitted_cost == 1.0
        await on.say(busy, "commit")
        assert (await on.settle(second)).endswith("Z:I")
        assert (await on.say(second, "select 2")).endswith("Z:I")
        assert toll.admitted_cost == 2.0


async def test_a_retry_of_what_waits_for_tokens_or_was_refused_pays_like_anybody() -> None:
    async with stage() as on:
        bucket = {"rate": 0.05, "burst": 1.0, "mode": "delay"}
        on.world.pool.book.learn({"generation": 1, "executionClasses": {"x": {}},
                                  "tenants": {"a": {"bucket": bucket}}}, monotonic())
        toll = on.world.pool.book.tolls.of_tenant("a")
        assert toll is not None
        toll.pay(monotonic())
        first, second = on.client(), on.client()
        for each in (first, second):
            each.conn.tenant = "a"
            each.conn.identify()
        assert await on.say(first, "select 1") == ""
        assert first.conn.ticket.toll is toll
        assert await on.say(second, "select 1") == ""
        assert second.conn.ticket.toll is toll
        on.names.moved({"db": "db/write", "id": "pay", "attempt": 1})
        assert await on.settle(first) == "E:57014 Z:I"
        assert list(toll.line) == [second.conn.ticket]
        toll.bucket.add(1.0, monotonic())
        on.world.parts.tollgate.release(monotonic())
        assert (await on.settle(second)).endswith("Z:I")
        assert toll.admitted_cost == 2.0


async def test_who_was_moved_and_not_told_hears_it_as_it_begins_and_its_session_goes_back_unused() -> None:
    async with stage() as on:
        busy, first = on.world.client(), on.client()
        await on.say(busy, "begin")
        assert await on.say(first, "select 1") == ""
        await on.ledger.tickets.apply("db/write", "pay", Register("pay", "B", "host", "c"))
        received = len(on.world.sessions[0].received)
        await on.say(busy, "commit")
        assert await on.settle(first) == "E:57014 Z:I"
        assert b"select 1" not in on.world.sessions[0].received[received:]
        assert await on.state() == (TicketState.QUEUED, Outcome.NONE)
        on.world.check_idle()


async def test_what_executes_is_refused_elsewhere() -> None:
    async with stage(2) as on:
        client, other = on.client(), on.client()
        await on.say(client, "begin")
        assert await on.say(other, "select 1") == "E:53300 Z:I"
        assert other.conn.ticket_id == "pay"
        await on.say(client, "commit")
        assert await on.state() == (TicketState.RELEASED, Outcome.COMMITTED)
        on.world.check_idle()


@pytest.mark.parametrize("op", ["register", "begin"])
async def test_without_the_ledger_nothing_runs(op: str) -> None:
    async with stage() as on:
        client = on.client()
        on.ledger.hold = op
        assert await on.say(client, "select 1") == ""
        on.ledger.away = True
        on.ledger.go.set()
        assert await on.settle(client) == "E:53300 Z:I"
        assert b"select 1" not in on.world.sessions[0].received
        on.world.check_idle()


@pytest.mark.parametrize("step", ["register", "queued", "begin", "running"])
@pytest.mark.parametrize("how", ["leaves", "cancels", "late"])
async def test_cancelled_at_each_step_its_session_is_kept_and_its_record_ends(step: str, how: str) -> None:
    async with stage() as on:
        client = on.client()
        busy = on.world.client()
        if step == "queued":
            await on.say(busy, "begin")
        on.ledger.hold = step
        await on.say(client, "begin")
        if how == "leaves":
            client.leave()
            on.world.settle()
        elif how == "cancels":
            if client.conn.server is None:
                client.conn.cancel_wait()
        else:
            for ticket in on.world.pool.core.expired(float("inf")):
                ticket.refused(RuntimeError("late"))
        on.ledger.go.set()
        await wait_all_tasks_blocked()
        heard = await on.settle(client) if how != "leaves" else ""
        if step == "queued":
            await on.say(busy, "commit")
        if how == "leaves" or (how == "cancels" and step != "running"):
            if step == "running":
                await on.settle(busy)
            assert await on.state() == (
                (TicketState.RELEASED, Outcome.ROLLED_BACK) if step == "running"
                else (TicketState.CANCELLED, Outcome.NONE))
        elif step == "queued":
            assert await on.state() == (TicketState.EXPIRED, Outcome.NONE)
        else:
            await on.say(client, "rollback")
            assert await on.state() == (TicketState.RELEASED, Outcome.ROLLED_BACK)
        assert heard in ("", "E:57014 Z:I", "E:58000 Z:I", "C:BEGIN Z:T")
        on.world.settle()
        on.world.check_idle()
        assert not on.names.waiting


async def test_a_session_lost_while_it_begins_is_made_good_by_another() -> None:
    async with stage(2) as on:
        client = on.client()
        on.ledger.hold = "begin"
        await on.say(client, "select 1")
        named = client.conn.named
        assert named is not None
        assert named.server is not None
        lost = next(each for each in on.world.sessions if each.conn is named.server)
        lost.far.close()
        await on.settle(client)
        on.ledger.go.set()
        assert (await on.settle(client)).endswith("Z:I")
        found = await on.ledger.stands()
        assert (found.outcome, found.permit) != (Outcome.COMMITTED, str(lost.conn.permit))
        assert found.outcome is Outcome.COMMITTED


@pytest.mark.parametrize(("said", "outcome"), [
    (["begin", "select 1"], Outcome.ROLLED_BACK), (["begin", "pg_sleep"], Outcome.ROLLED_BACK)])
async def test_of_a_lost_session_the_outcome_is_what_may_be(said: list[str], outcome: Outcome) -> None:
    async with stage() as on:
        client = on.client()
        for sql in said:
            await on.say(client, sql)
        on.world.sessions[0].far.close()
        await on.settle(client)
        assert await on.state() == (TicketState.RELEASED, outcome)


async def test_an_unanswered_commit_is_unknown() -> None:
    async with stage() as on:
        client = on.client()
        await on.say(client, "begin")
        on.world.sessions[0].stopped = True
        await on.say(client, "commit")
        on.world.sessions[0].far.close()
        await on.settle(client)
        assert await on.state() == (TicketState.RELEASED, Outcome.UNKNOWN)


async def test_in_session_pooling_the_name_is_for_the_session() -> None:
    async with stage(mode="session") as on:
        client = on.client()
        await on.say(client, "select 1")
        await on.say(client, "select 2")
        assert await on.state() == (TicketState.IN_TRANSACTION, Outcome.NONE)
        client.leave()
        on.world.settle()
        assert await on.state() == (TicketState.RELEASED, Outcome.COMMITTED)
