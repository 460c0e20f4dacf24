"""Everybody wants sessions at once: coordinators that begin at their own homes do not make others lose."""

from __future__ import annotations

from random import Random

import trio

from coordinator.ledger.answers import Granted
from coordinator.ledger.homes import Home
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Kind
from coordinator.ledger.rules import Refused
from coordinator.store.api import Lost, Txn, Won
from coordinator.store.memory import MemoryStore
from tests.ledger.ground import KEYS, ask, found, ledger_on, register

HOSTS, SESSIONS = 100, 5_000
TOGETHER_MAX = 20  # requests that come at a time to one coordinator


class Contended(MemoryStore):
    """Counts the transactions that reserve, and those of them that lose."""

    won = lost = 0

    async def txn(self, txn: Txn) -> Won | Lost:
        answer = await super().txn(txn)
        if any(put.key.startswith(KEYS.sessions()) for put in txn.puts):
            self.lost += isinstance(answer, Lost)
            self.won += isinstance(answer, Won)
        return answer


async def storm(store: Contended, homes: list[Home], sessions: int, random: Random) -> set[int]:
    """So many sessions of one pool, over so many coordinators; the slots they got."""
    slots: set[int] = set()
    for number in range(len(homes)):
        register(store.keyspace, f"w{number}")

    async def one(ledger: Ledger, number: int, each: int) -> None:
        granted: Granted | Refused | None = None
        while not isinstance(granted, Granted):
            granted = await ledger.reserve(ask(f"r{number}-{each}", f"w{number}", seats=sessions))
            assert isinstance(granted, Granted) or granted.detail == "others were faster"
        assert granted.permit.kind is Kind.MAIN
        slots.add(granted.permit.slot)

    async def host(number: int) -> None:
        ledger, left = ledger_on(store, home=homes[number]), sessions // len(homes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ledger.run)
            while left:
                count = min(left, random.randint(1, TOGETHER_MAX))
                async with trio.open_nursery() as together:
                    for each in range(left - count, left):
                        together.start_soon(one, ledger, number, each)
                left -= count
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for number in range(len(homes)):
            nursery.start_soon(host, number)
    return slots


async def test_of_5_000_sessions_over_100_coordinators_at_most_one_transaction_in_100_loses() -> None:
    store = Contended(found(SESSIONS))
    slots = await storm(store, [Home(rank, HOSTS) for rank in range(HOSTS)], SESSIONS, Random(1))
    assert slots == set(range(SESSIONS))
    assert store.lost <= 0.01 * (store.won + store.lost)
    assert store.won < SESSIONS / 2


async def test_coordinators_with_one_home_make_each_other_lose() -> None:
    store = Contended(found(300))
    slots = await storm(store, [Home()] * 10, 300, Random(1))
    assert len(slots) == 300
    assert store.lost > 0.3 * (store.won + store.lost)
