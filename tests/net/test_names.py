"""Look-ups of names: shared, beside the loop, and nobody waits for another's."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pooler.net import names
from pooler.net.names import addresses_of
from pooler.net.stream import Broken


class Resolver:
    """Answers names that begin with `slow` only once it is `opened`."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.opened = threading.Event()

    def resolve(self, host: str, port: int) -> list[tuple[int, Any]]:
        self.asked[host] += 1
        if host.startswith("slow"):
            assert self.opened.wait(20)
        if host.endswith("gone"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, ("192.0.2.1", port))]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(names, "_resolve", made.resolve)
    yield made
    made.opened.set()


FOUND = [(socket.AF_INET, ("192.0.2.1", 5432))]


async def test_many_who_want_one_name_cost_one_look_up_and_none_of_them_holds_up_another(
    resolver: Resolver,
) -> None:
    """R77."""
    got: list[object] = []

    async def ask(host: str) -> None:
        got.append(await addresses_of(host, 5432))

    async with trio.open_nursery() as nursery:
        for _ in range(200):
            nursery.start_soon(ask, "slow.test")
        await wait_all_tasks_blocked(0.05)
        with trio.fail_after(10):
            assert await addresses_of("quick.test", 5432) == FOUND
            assert await trio.to_thread.run_sync(lambda: 7) == 7
        assert got == []
        resolver.opened.set()
    assert got == [FOUND] * 200
    assert resolver.asked == {"slow.test": 1, "quick.test": 1}


async def test_who_is_cancelled_takes_the_answer_from_nobody_and_the_next_is_answered_anew(
    resolver: Resolver,
) -> None:
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.05):
            nursery.start_soon(addresses_of, "slow.test", 5432)
            await addresses_of("slow.test", 5432)
        resolver.opened.set()
    assert await addresses_of("slow.test", 5432) == FOUND
    assert resolver.asked == {"slow.test": 2}


async def test_a_name_that_is_not_found_is_told_to_all_who_wait_and_asked_for_again(
    resolver: Resolver,
) -> None:
    resolver.opened.set()
    for _ in range(2):
        with pytest.raises(Broken, match="cannot resolve the name: Name or service not known"):
            await addresses_of("gone", 5432)
    assert resolver.asked == {"gone": 2}


async def test_an_address_is_asked_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("no thread is needed")

    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    assert await addresses_of("127.0.0.1", 5432) == [(socket.AF_INET, ("127.0.0.1", 5432))]
    assert await addresses_of("::1", 5432) == [(socket.AF_INET6, ("::1", 5432, 0, 0))]


async def test_a_name_that_can_be_none_is_a_fault_like_any_other() -> None:
    with pytest.raises(Broken, match="cannot resolve"):
        await addresses_of("a..b" + "x" * 80, 5432)


@pytest.mark.parametrize("fault", [RuntimeError("can't start new thread"), ValueError("embedded null byte")])
async def test_whatever_goes_wrong_in_a_look_up_is_told_to_who_waits_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(names, "_resolve", fail)
    for _ in range(2):
        with pytest.raises(Broken, match=f"cannot resolve the name: {fault}"):
            await addresses_of("db.test", 5432)
