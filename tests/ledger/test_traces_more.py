"""More ways to break a ledger, by the numbers of the findings; see test_traces.py for 1-8, 14 and 18-21."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.ledger.ledger import Granted
from coordinator.ledger.record import Alias
from coordinator.ledger.reservation import Limits
from coordinator.ledger.rules import Code, Refused, Release
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Lost, Put, Txn, Won
from coordinator.store.memory import MemoryStore
from tests.ledger.ground import KEYS, World, ask, ledger_on, policy, world, write

LIMITS = {1: Limits(4, admin=2), 2: Limits(2, admin=2)}


class Interrupted(MemoryStore):
    """Something happens right after the first transaction that reads `key`."""

    def __init__(self, w: World, key: str, happens: Callable[[], None]) -> None:
        super().__init__(w.keyspace)
        self._key = key
        self._happens: Callable[[], None] | None = happens

    async def txn(self, txn: Txn) -> Won | Lost:
        answer = await super().txn(txn)
        if self._happens is not None and any(start == self._key for start, _ in txn.reads):
            happens, self._happens = self._happens, None
            happens()
        return answer


def shrink(w: World) -> None:
    """Policy 2, of two slots, is active from now on."""
    write(w.keyspace, Put(KEYS.policy(2), policy(2)), Put(KEYS.alias(), Alias(2).encode()))


def refused(answer: object) -> Code:
    assert isinstance(answer, Refused), answer
    return answer.code


# 10

async def test_10_while_a_slot_beyond_a_shrunk_policy_is_held_nothing_is_granted() -> None:
    w = world()
    held = [(await w.granted(f"r{number}")).permit for number in range(4)]
    shrink(w)
    for permit in held[:3]:
        await w.ledger.apply(Release(permit, Proof.UNUSED, Actor.OWNER))
    assert refused(await w.ledger.reserve(ask("late"))) is Code.FULL
    assert refused(await w.another(home=1).reserve(ask("later", "B"))) is Code.FULL
    await w.ledger.apply(Release(held[3], Proof.UNUSED, Actor.OWNER))
    assert isinstance(await w.ledger.reserve(ask("last")), Granted)


async def test_10_a_policy_that_shrinks_between_two_reads_of_a_reservation_binds_it() -> None:
    for key in (KEYS.alias(), KEYS.policy(1)):
        w = world()
        for number in range(2):
            await w.granted(f"r{number}")
        store = Interrupted(w, key, lambda w=w: shrink(w))  # type: ignore[misc]
        assert refused(await ledger_on(store, home=2).reserve(ask("late"))) is Code.FULL
