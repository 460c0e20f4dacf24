"""A ledger in an etcd that was wiped or restored: nothing is believed of it and nothing is left in it."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.ledger.access import Memory, Seen
from coordinator.ledger.ledger import Applied, Granted, Ledger, Voided
from coordinator.ledger.record import LedgerHead, LedgerState, Permit
from coordinator.ledger.rules import Code, Connecting, Open, Refused, Release, Unknown
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Lost, Put, StoreUnavailable, Txn, Won
from coordinator.store.faulty import FaultyStore
from coordinator.store.memory import Keyspace, MemoryStore
from tests.ledger.ground import BACKEND, KEYS, TAG, World, ask, found, ledger_on, session_keys, world, write


def refused(answer: object) -> Code:
    assert isinstance(answer, Refused), answer
    return answer.code


def restored(w: World, older: Keyspace) -> None:
    """From here on the snapshot is what there is."""
    w.store.keyspace = w.keyspace = older


def rebuild(w: World, incarnation: str = "second", rebuilt: str = "0001") -> None:
    head = LedgerHead(incarnation, LedgerState.ACTIVE, "eeee5678", rebuilt=rebuilt)
    write(w.keyspace, Put(KEYS.ledger(), head.encode()))


class Counting(MemoryStore):
    """Counts what it is asked, and fails as often as it is told."""

    asked = 0
    fails = 0

    async def txn(self, txn: Txn) -> Won | Lost:
        self.asked += 1
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("away")
        return await super().txn(txn)


async def test_a_reservation_that_wins_on_a_restored_etcd_is_refused_and_voided() -> None:
    w = world()
    await w.granted("r0")
    older = w.keyspace.clone()
    repeated = (await w.granted("r1")).permit
    await w.granted("r2")
    restored(w, older)
    before = session_keys(older)
    assert refused(await w.ledger.reserve(ask("r3"))) is Code.LEDGER_LOST
    assert session_keys(w.keyspace) == before, f"what was won would have been {repeated} once more"
    assert w.ledger.lost
    assert refused(await w.another().reserve(ask("r3"))) is Code.VOIDED


async def test_one_won_at_the_very_revision_that_was_seen_last_is_none_either() -> None:
    w = world()
    await w.granted("r0")
    older = w.keyspace.clone()
    await w.granted("r1")
    restored(w, older)  # the next write has the revision of r1's
    assert refused(await w.ledger.reserve(ask("r2"))) is Code.LEDGER_LOST


async def test_nothing_more_is_written_to_a_lost_ledger() -> None:
    w = world()
    permit = (await w.granted("r0")).permit
    older = w.keyspace.clone()
    await w.granted("r1")
    restored(w, older)
    await w.ledger.reserve(ask("r2"))
    revision = w.keyspace.revision
    for command in (Connecting(permit), Open(permit, 1, 1, BACKEND), Unknown(permit),
                    Release(permit, Proof.UNUSED, Actor.OWNER)):
        assert refused(await w.ledger.apply(command)) is Code.LEDGER_LOST
    assert refused(await w.ledger.reserve(ask("r4"))) is Code.LEDGER_LOST
    assert refused(await w.ledger.void("r0", "A")) is Code.LEDGER_LOST
    assert not await w.ledger.forget("A", ["r0"])
    assert w.keyspace.revision == revision


async def test_a_command_that_wins_there_is_not_believed() -> None:
    w = world()
    permit = (await w.granted("r0")).permit
    older = w.keyspace.clone()
    await w.granted("r1")
    restored(w, older)
    assert refused(await w.ledger.apply(Connecting(permit))) is Code.LEDGER_LOST


async def test_after_any_failed_request_one_read_goes_before_the_next_write() -> None:
    w = world()
    store = Counting(w.keyspace)
    ledger = ledger_on(store)
    permit = await granted(ledger, "r0")
    older = w.keyspace.clone()
    for number in range(1, 4):
        await granted(ledger, f"r{number}")
    store.fails = 1
    assert refused(await ledger.apply(Connecting(permit))) is Code.LEDGER_UNAVAILABLE
    store.keyspace = older
    revision, store.asked = older.revision, 0
    assert refused(await ledger.apply(Connecting(permit))) is Code.LEDGER_LOST
    assert (older.revision, store.asked) == (revision, 1)  # the slot's read, with the head


async def test_a_write_from_memory_is_preceded_by_that_read_too() -> None:
    w = world()
    store = Counting(w.keyspace)
    ledger = ledger_on(store)
    permit = await granted(ledger, "r0")
    older = w.keyspace.clone()
    await granted(ledger, "r1")
    store.fails = 1  # of a reservation, which says nothing of the slot that is remembered
    await ledger.reserve(ask("r2"))
    store.keyspace = older
    revision = older.revision
    assert refused(await ledger.apply(Connecting(permit))) is Code.LEDGER_LOST
    assert older.revision == revision


async def test_while_nothing_fails_a_command_costs_one_request() -> None:
    w = world()
    store = Counting(w.keyspace)
    ledger = ledger_on(store)
    permit = await granted(ledger, "r0")
    store.asked = 0
    assert isinstance(await ledger.apply(Connecting(permit)), Applied)
    assert store.asked == 1


async def granted(ledger: Ledger, request: str) -> Permit:
    answer = await ledger.reserve(ask(request))
    assert isinstance(answer, Granted), answer
    return answer.permit


async def test_what_one_part_of_a_process_sees_holds_for_every_part() -> None:
    w = world()
    memory = Memory()
    one, other = (ledger_on(w.store, memory=memory) for _ in range(2))
    await granted(one, "r0")
    older = w.keyspace.clone()
    await granted(other, "r1")
    restored(w, older)
    await one.reserve(ask("r2"))
    assert other.lost
    assert refused(await other.reserve(ask("r3"))) is Code.LEDGER_LOST


async def test_a_loss_once_seen_is_not_forgotten_when_the_revision_has_caught_up() -> None:
    w = world()
    await w.granted("r0")
    older = w.keyspace.clone()
    await w.granted("r1")
    restored(w, older)
    await w.ledger.reserve(ask("r2"))
    for _ in range(20):
        write(w.keyspace, Put("/elsewhere", b""))
    assert refused(await w.ledger.reserve(ask("r3"))) is Code.LEDGER_LOST
    assert refused(await ledger_on(w.store, memory=Memory(w.ledger.seen)).reserve(ask("r3"))) is (
        Code.LEDGER_LOST), "nor by the next life of the process"


async def test_a_rebuilt_ledger_takes_the_place_of_the_lost_one_though_its_revision_is_lower() -> None:
    w = world()
    older = w.keyspace.clone()
    for number in range(4):
        await w.granted(f"r{number}")
    restored(w, older)
    assert refused(await w.ledger.reserve(ask("r4"))) is Code.LEDGER_LOST
    rebuild(w)
    answer = await w.ledger.reserve(ask("r5"))
    assert isinstance(answer, Granted)
    assert (w.ledger.lost, w.ledger.seen) == (
        False, Seen("second", w.keyspace.revision, "0001"))


@pytest.mark.parametrize(("incarnation", "rebuilt"), [("other", ""), ("third", "0001"), ("third", "0002")])
async def test_another_incarnation_is_taken_only_if_it_was_rebuilt_later(
    incarnation: str, rebuilt: str
) -> None:
    w = world()
    memory = Memory(Seen("second", w.keyspace.revision, "0002"))
    rebuild(w, incarnation, rebuilt)
    ledger = ledger_on(w.store, memory=memory)
    assert refused(await ledger.reserve(ask("r1"))) is Code.LEDGER_LOST
    assert ledger.lost
    rebuild(w, "fourth", "0003")
    assert isinstance(await ledger.reserve(ask("r2")), Granted)


async def test_what_was_remembered_of_the_lost_ledger_is_not_tried_on_the_rebuilt_one() -> None:
    w = world()
    older = w.keyspace.clone()
    await w.granted("r0")
    restored(w, older)
    assert refused(await w.ledger.reserve(ask("r1"))) is Code.LEDGER_LOST
    rebuild(w)
    theirs = (await w.another().reserve(ask("rX", "B")))
    assert isinstance(theirs, Granted)
    assert isinstance(await w.ledger.reserve(ask("r2")), Granted)
    assert isinstance(await w.ledger.apply(Connecting(theirs.permit)), Applied)


async def test_an_answer_sent_before_the_rebuild_and_heard_after_it_loses_nothing() -> None:
    memory = Memory(Seen("first", 100))
    late = memory.floor
    memory.read(memory.floor, 10, LedgerHead("second", LedgerState.RECOVERING, TAG, rebuilt="0001"))
    memory.read(late, 9)
    memory.wrote(late, 10, surely=True)
    assert not memory.seen.lost
    assert memory.seen.revision == 10


async def test_a_request_given_up_on_a_lost_ledger_is_voided_when_it_is_rebuilt() -> None:
    w = world()
    older = w.keyspace.clone()
    await w.granted("r0")
    restored(w, older)
    store = FaultyStore(w.store, Random(1))
    ledger = ledger_on(store, memory=Memory(w.ledger.seen))
    assert refused(await ledger.void("r1", "A")) is Code.LEDGER_LOST
    rebuild(w)
    assert isinstance(await ledger.void("r1", "A"), Voided)


async def test_a_lost_ledger_calls_no_permit_gone() -> None:
    w = world()
    older = found()
    permit = (await w.granted("r0")).permit
    restored(w, older)
    await w.ledger.reserve(ask("r1"))
    answer = await w.ledger.apply(Release(permit, Proof.EOF, Actor.OWNER))
    assert refused(answer) is Code.LEDGER_LOST

