"""Execution permits on each store: each rule of who may write a share, named after what broke without it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from coordinator.ledger.execution import (
    Gift,
    Seat,
    Share,
    Shares,
    lower_txn,
    raise_txn,
    recall_txn,
    registering,
    shares_from,
    shares_txn,
    take_back_txn,
    taken_back,
)
from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.limits import Limits
from coordinator.ledger.record import Alias, Kind, Session, Worker, WorkerExit
from coordinator.ledger.snapshot import LedgerSnapshot, snapshot_from, snapshot_txn
from coordinator.ledger.states import SessionState
from coordinator.ledger.strange import Sieve
from coordinator.store.api import Compare, Entry, Field, Lost, Put, Store, Txn, Won, absent, prefix_end
from tests.contract.conftest import Ground, OpenGround

A, B = Seat("x", "A"), Seat("x", "B")
LENT = Seat("y", "B")


@dataclass
class Fleet:
    """Two workers, a leader, a policy's alias."""

    store: Store
    fleet: FleetKeys
    keys: DbKeys
    fence: Compare

    async def shares(self) -> Shares:
        found = await self.store.txn(shares_txn(self.keys))
        assert isinstance(found, Lost)
        return shares_from(found.reads, found.revision, self.keys, Sieve())

    async def entry(self, seat: Seat = A) -> Entry:
        (entry,) = (await self.store.read(self.keys.share(seat.execution_class, seat.boot_id))).entries
        return entry

    async def gone(self) -> tuple[LedgerSnapshot, Shares]:
        """As the leader reads both, at one revision."""
        both = snapshot_txn(self.keys, self.fleet)
        found = await self.store.txn(Txn(both.compares, reads=both.reads + shares_txn(self.keys).reads))
        assert isinstance(found, Lost)
        cut = len(both.reads)
        return (snapshot_from(found.reads[:cut], found.revision, lambda raw: Limits(9)),
                shares_from(found.reads[cut:], found.revision, self.keys, Sieve()))

    async def give(self, shares: Shares, giver: str = "x", **by: int) -> bool:
        given = {Seat("x", boot_id): Gift(count) for boot_id, count in by.items()}
        return isinstance(await self.store.txn(
            raise_txn(self.fence, shares, given, giver, self.keys)), Won)

    async def put(self, key: str, value: bytes) -> None:
        assert isinstance(await self.store.txn(Txn(puts=(Put(key, value),))), Won)

    async def register(self, name: str) -> None:
        await self.put(self.fleet.worker(name), worker(name).encode())


def worker(name: str) -> Worker:
    return Worker(name, 0, 0, "h", "m", "k", 1, 1)


async def prepared(ground: Ground) -> Fleet:
    prefix, _, fleet = ground.prefix.strip("/").rpartition("/")
    keys = FleetKeys(prefix, fleet)
    won = await ground.store.txn(Txn((absent(keys.leader()),), (Put(keys.leader(), b""),)))
    assert isinstance(won, Won)
    found = Fleet(ground.store, keys, keys.db("d/w"), Compare(keys.leader(), Field.CREATE, won.revision))
    await found.register("A")
    await found.register("B")
    await found.put(found.keys.alias(), Alias(1).encode())
    return found


async def test_of_two_raises_that_counted_on_the_same_sum_one_fails(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        shares = await fleet.shares()
        assert await fleet.give(shares, A=1)
        assert not await fleet.give(shares, B=1)
        now = await fleet.shares()
        assert (now.of(A), now.of(B), now.given("x")) == (Share(1), Share(), 1)
        assert now.raised["x"][0] == 1


async def test_who_leads_no_more_raises_recalls_and_takes_back_nothing(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        assert await fleet.give(await fleet.shares(), A=2)
        shares = await fleet.shares()
        await ground.store.txn(Txn(deletes=(fleet.fence.key,)))
        await fleet.put(fleet.fence.key, b"another")
        assert not await fleet.give(shares, B=1)
        for txn in (recall_txn(fleet.fence, shares, {A: 0}, fleet.keys),
                    take_back_txn(fleet.fence, shares.held, {A: 0}, fleet.keys)):
            assert isinstance(await ground.store.txn(txn), Lost)
        assert (await fleet.shares()).of(A) == Share(2)


async def test_a_raise_stands_on_the_policy_and_on_the_worker_that_it_was_counted_for(
    open_ground: OpenGround
) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        shares = await fleet.shares()
        await fleet.put(fleet.keys.alias(), Alias(2).encode())
        assert not await fleet.give(shares, A=1)
        shares = await fleet.shares()
        await ground.store.txn(Txn(deletes=(fleet.fleet.worker("A"),)))
        assert not await fleet.give(shares, A=1)
        assert "A" not in (await fleet.shares()).workers


async def test_a_late_lowering_loses_to_whatever_was_written_since(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        assert await fleet.give(await fleet.shares(), A=3)
        late = lower_txn(A, await fleet.entry(), 0, fleet.keys)
        repeated = lower_txn(A, await fleet.entry(), 1, fleet.keys)
        assert late is not None
        assert repeated is not None
        assert isinstance(await ground.store.txn(repeated), Won)
        outcome = await ground.store.txn(late)
        assert isinstance(outcome, Lost)
        assert Share.decode(outcome.reads[0][0].value) == Share(1)
        assert lower_txn(A, await fleet.entry(), 1, fleet.keys) is None


async def test_a_take_back_that_was_decided_before_a_worker_came_back_loses(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        assert await fleet.give(await fleet.shares(), A=1)
        await ground.store.txn(Txn(deletes=(fleet.fleet.worker("A"),)))
        snapshot, shares = await fleet.gone()
        left = taken_back(snapshot, shares.held)
        assert left == {A: 0}
        compares, puts = registering([await fleet.entry()], {("d/w", "x"): 1}, fleet.keys)
        back = Txn((absent(fleet.fleet.worker("A")), *compares),
                   (Put(fleet.fleet.worker("A"), worker("A").encode()), *puts))
        assert isinstance(await ground.store.txn(back), Won)
        outcome = await ground.store.txn(take_back_txn(fleet.fence, shares.held, left, fleet.keys))
        assert isinstance(outcome, Lost)
        assert (await fleet.shares()).of(A) == Share(1)


async def test_registering_again_keeps_what_executes_and_no_more(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        assert await fleet.give(await fleet.shares(), A=5)
        shares = await fleet.shares()
        await ground.store.txn(recall_txn(fleet.fence, shares, {A: 1}, fleet.keys))
        compares, puts = registering([await fleet.entry()], {("d/w", "x"): 2, ("d/w", "z"): 9}, fleet.keys)
        assert isinstance(await ground.store.txn(Txn(tuple(compares), tuple(puts))), Won)
        assert (await fleet.shares()).of(A) == Share(2)


@pytest.mark.parametrize(("is_dead", "left"), [(False, {}), (True, {A: 1})])
async def test_what_a_silent_worker_has_stays_while_it_has_a_session_and_a_dead_one_keeps_those(
    open_ground: OpenGround, is_dead: bool, left: dict[Seat, int]
) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        assert await fleet.give(await fleet.shares(), A=3)
        session = Session(Kind.MAIN, 0, 7, SessionState.UNKNOWN, "A", "h", "d", "u", 0, "r", 1, 1)
        await fleet.put(fleet.keys.session(Kind.MAIN, 0), session.encode())
        await ground.store.txn(Txn(deletes=(fleet.fleet.worker("A"),)))
        if is_dead:
            await fleet.put(fleet.fleet.worker_exit("A"), WorkerExit("A", "killed", "h", 1).encode())
        snapshot, shares = await fleet.gone()
        assert taken_back(snapshot, shares.held) == left
        if left:
            txn = take_back_txn(fleet.fence, shares.held, left, fleet.keys)
            assert isinstance(await ground.store.txn(txn), Won)
            assert (await fleet.shares()).of(A) == Share(1)
        await ground.store.txn(Txn(deletes=(fleet.keys.session(Kind.MAIN, 0),)))
        snapshot, shares = await fleet.gone()
        assert taken_back(snapshot, shares.held) == {A: 0}
        txn = take_back_txn(fleet.fence, shares.held, {A: 0}, fleet.keys)
        assert isinstance(await ground.store.txn(txn), Won)
        assert A not in (await fleet.shares()).held


async def test_a_session_that_nobody_can_read_keeps_what_every_gone_worker_has(
    open_ground: OpenGround
) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        assert await fleet.give(await fleet.shares(), A=3)
        await fleet.put(fleet.keys.session(Kind.MAIN, 0), b"damaged")
        await ground.store.txn(Txn(deletes=(fleet.fleet.worker("A"),)))
        snapshot, shares = await fleet.gone()
        assert taken_back(snapshot, shares.held) == {}


async def test_a_loan_counts_with_its_lender_until_it_is_given_back(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        shares = await fleet.shares()
        lent = raise_txn(fleet.fence, shares, {LENT: Gift(2)}, "x", fleet.keys)
        assert isinstance(await ground.store.txn(lent), Won)
        assert not await fleet.give(shares, A=1)
        now = await fleet.shares()
        assert (now.given("x"), now.lent("x"), now.given("y"), now.of(LENT).permits) == (2, 2, 0, 2)
        given_back = lower_txn(LENT, await fleet.entry(LENT), 1, fleet.keys)
        assert given_back is not None
        assert isinstance(await ground.store.txn(given_back), Won)
        assert (await fleet.shares()).lent("x") == 1
        own = raise_txn(fleet.fence, await fleet.shares(), {LENT: Gift(1, instead_of="x")}, "y", fleet.keys)
        assert isinstance(await ground.store.txn(own), Won)
        now = await fleet.shares()
        assert (now.given("x"), now.given("y"), now.of(LENT)) == (0, 1, Share(1))


async def test_where_a_share_cannot_be_read_nothing_is_counted_on(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fleet = await prepared(ground)
        await fleet.put(fleet.keys.share("x", "C"), b"damaged")
        sieve, start = Sieve(), fleet.keys.shares()
        found = await ground.store.txn(shares_txn(fleet.keys))
        assert isinstance(found, Lost)
        assert shares_from(found.reads, found.revision, fleet.keys, sieve).unread
        assert [each.key for each in sieve.strange] == [fleet.keys.share("x", "C")]
        assert start < fleet.keys.share("x", "C") < prefix_end(start)
