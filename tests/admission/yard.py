"""Pools of one worker with clients of many tenants, and time that passes as they say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pooler.admission.classes import Account, Book, Classes
from pooler.admission.ticket import ENDS, Ticket, TicketState
from pooler.pool.core import PoolCore
from tests.pool.fake_session import FakeSession

LEDGER = "shop/write"
T = TicketState


def policy(classes: dict[str, dict[str, Any]], tenants: dict[str, dict[str, Any]] | None = None,
           generation: int = 1) -> dict[str, Any]:
    return {"generation": generation, "executionClasses": classes, "tenants": tenants or {}}


@dataclass(eq=False)
class Client:
    """`pool`: which of the yard's it uses. `log`: what it heard."""

    pool: int
    account: Account
    log: list[str] = field(default_factory=list)
    session: FakeSession | None = None
    granted_at: float = 0.0
    ticket: Ticket = field(init=False)


class Yard:
    """`sizes`: the sessions of each pool, all of which are open."""

    def __init__(self, said: dict[str, Any], *sizes: int) -> None:
        self.classes = Classes()
        self.book: Book = self.classes.of(LEDGER)
        self.book.learn(said)
        self.now = 0.0
        self.pools: list[PoolCore[FakeSession]] = []
        self.clients: list[Client] = []
        self.served: Counter[str] = Counter()
        self.using: dict[Client, FakeSession] = {}
        self.waits: dict[str, list[float]] = {}
        for size in sizes:
            core: PoolCore[FakeSession] = PoolCore(size, size)
            self.pools.append(core)
            for _ in range(size):
                core.opening += 1
                assert core.opened(FakeSession(), 0.0)

    def client(self, tenant: str, klass: str = "", pool: int = 0) -> Client:
        client = Client(pool, self.book.account(tenant, klass))
        client.ticket = Ticket(
            lambda session: self._granted(client, session), self._refused, client, client.account)
        self.clients.append(client)
        return client

    def ask(self, client: Client, seconds: float = 1e9) -> None:
        client.ticket.start(self.now, self.now + seconds)
        session = self.pools[client.pool].request(client.ticket)
        if session is not None:
            self._granted(client, session)

    def asks(self, tenant: str, klass: str = "", pool: int = 0) -> Client:
        client = self.client(tenant, klass, pool)
        self.ask(client)
        return client

    def end(self, client: Client, *, settle: bool = True) -> None:
        """Its transaction is over."""
        session = self.using.pop(client)
        client.ticket.release()
        self.pools[client.pool].give(session, self.now)
        if settle:
            self.settle()

    def settle(self) -> None:
        self.classes.settle(self.now)

    def cancel(self, client: Client) -> bool:
        return self.pools[client.pool].withdraw(client.ticket, T.CANCELLED)

    def _granted(self, client: Client, session: FakeSession) -> None:
        assert client not in self.using
        assert session not in self.using.values()
        self.using[client] = session
        self.served[client.account.tenant] += 1
        self.waits.setdefault(client.account.tenant, []).append(self.now - client.ticket.queued_at)
        client.granted_at = self.now

    def _refused(self, error: Exception) -> None:
        raise AssertionError(error)

    def check(self) -> None:
        """Nothing is lost or doubled, and nobody who could be served waits."""
        for core in self.pools:
            core.check()
        executing = Counter(client.account for client in self.using)
        accounts = {client.account for client in self.clients}
        for account in accounts:
            assert account.executing == executing[account] <= account.inflight_max
            assert account.waiting == sum(
                client.ticket.waiting for client in self.clients if client.account is account)
        for klass in self.book.classes.values():
            of_class = [account for account in accounts if account.klass is klass]
            assert klass.in_use == sum(each.executing for each in of_class)
            assert klass.waiting == sum(each.waiting for each in of_class)
        for client in self.clients:
            assert (client in self.using) is (client.ticket.state is T.IN_TRANSACTION)
            assert client.ticket.state in (*ENDS, T.IN_TRANSACTION, T.QUEUED)

    def check_none_waits_in_vain(self) -> None:
        """Once all is settled: no ticket waits that has a session, class room and inflight room."""
        for client in self.clients:
            if client.ticket.waiting and not self.pools[client.pool].blocked and self.pools[client.pool].idle:
                account = client.account
                assert (account.executing >= account.inflight_max
                        or account.klass.executing >= account.klass.allotted), "it waits in vain"
