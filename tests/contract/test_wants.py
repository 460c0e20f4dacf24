"""A want is chosen for by one leader, as it was read, and keeps its lease; each store carries that out."""

from __future__ import annotations

from dataclasses import replace

from coordinator.ledger.notes import Want
from coordinator.ledger.record import Kind
from coordinator.ledger.snapshot import Wanted
from coordinator.store.api import Compare, Field, Lost, Put, Txn, Won, absent
from coordinator.wanting import chosen_txn
from tests.contract.conftest import Ground, OpenGround

WANT = Want("app", "app", Kind.MAIN, "full", "B", "host-b", 1)
CHOSEN = replace(WANT, op="shed", holder="A", holder_pool="app", holder_user="app")


async def elected(ground: Ground) -> Compare:
    key = f"{ground.prefix}leader"
    won = await ground.store.txn(Txn((absent(key),), (Put(key, b""),)))
    assert isinstance(won, Won)
    return Compare(key, Field.CREATE, won.revision)


async def put_want(ground: Ground) -> tuple[Wanted, int]:
    lease = await ground.store.lease(60.0)
    await ground.store.txn(Txn(puts=(Put(f"{ground.prefix}want/r", WANT.encode(), lease.id),)))
    return await standing(ground), lease.id


async def standing(ground: Ground) -> Wanted:
    (entry,) = (await ground.store.range(f"{ground.prefix}want/")).entries
    return Wanted.read(entry)


async def test_a_choice_is_written_once_into_the_want_on_its_lease(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fence, (wanted, lease) = await elected(ground), await put_want(ground)
        assert isinstance(await ground.store.txn(chosen_txn(fence, wanted, CHOSEN)), Won)
        now = await standing(ground)
        assert (now.want, now.lease, now.create_revision) == (CHOSEN, lease, wanted.create_revision)
        other = replace(CHOSEN, holder="C")
        assert isinstance(await ground.store.txn(chosen_txn(fence, wanted, other)), Lost)
        assert (await standing(ground)).want == CHOSEN


async def test_one_that_leads_no_more_chooses_nobody(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fence, (wanted, _) = await elected(ground), await put_want(ground)
        await ground.store.txn(Txn(deletes=(fence.key,)))
        await elected(ground)
        assert isinstance(await ground.store.txn(chosen_txn(fence, wanted, CHOSEN)), Lost)
        assert (await standing(ground)).want == WANT


async def test_a_want_that_was_taken_away_does_not_come_back_by_a_choice(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        fence, (wanted, lease) = await elected(ground), await put_want(ground)
        await (await ground.store.lease(60.0, lease_id=lease)).revoke()
        assert isinstance(await ground.store.txn(chosen_txn(fence, wanted, CHOSEN)), Lost)
        assert (await ground.store.range(f"{ground.prefix}want/")).entries == ()
