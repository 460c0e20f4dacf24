"""What every store must do: the same tests on the reference and on a real etcd."""

from __future__ import annotations

import pytest
import trio

from coordinator.store.api import (
    Compacted,
    Compare,
    Field,
    LeaseGone,
    Lost,
    Put,
    Txn,
    Won,
    absent,
    nothing_in,
    unchanged,
)
from tests.contract.conftest import Ground, OpenGround


def span(key: str) -> tuple[str, str]:
    return key, key + "\0"


async def put(ground: Ground, name: str, value: bytes = b"v", lease: int = 0) -> int:
    won = await ground.store.txn(Txn(puts=(Put(ground.prefix + name, value, lease),)))
    assert isinstance(won, Won)
    return won.revision


async def test_a_written_key_reads_back_with_its_revisions(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        first = await put(ground, "a", b"1")
        second = await put(ground, "a", b"2")
        snapshot = await ground.store.read(ground.prefix + "a", ground.prefix + "none")
        (entry,) = snapshot.entries
        assert (entry.value, entry.create_revision, entry.mod_revision) == (b"2", first, second)
        assert snapshot.revision == second == first + 1


async def test_a_key_deleted_and_made_again_has_a_new_create_revision(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        first = await put(ground, "a")
        await ground.store.txn(Txn(deletes=(ground.prefix + "a",)))
        second = await put(ground, "a")
        (entry,) = (await ground.store.read(ground.prefix + "a")).entries
        assert entry.create_revision == second > first


async def test_one_transaction_has_one_revision(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        won = await ground.store.txn(Txn(puts=tuple(Put(ground.prefix + name, b"") for name in "abc")))
        entries = (await ground.store.range(ground.prefix)).entries
        assert {entry.create_revision for entry in entries} == {won.revision}
        assert [entry.key for entry in entries] == [ground.prefix + name for name in "abc"]


async def test_a_put_over_a_live_key_keeps_its_create_revision(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        first = await put(ground, "a")
        second = await put(ground, "a")
        (entry,) = (await ground.store.read(ground.prefix + "a")).entries
        assert (entry.create_revision, entry.mod_revision) == (first, second)


async def test_absent_lets_exactly_one_of_two_creators_win(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        key = ground.prefix + "slot"
        txn = Txn((absent(key),), puts=(Put(key, b"mine"),), reads=(span(key),))
        first, second = await ground.store.txn(txn), await ground.store.txn(txn)
        assert isinstance(first, Won)
        assert isinstance(second, Lost)
        assert [entry.value for entry in second.reads[0]] == [b"mine"]


async def test_unchanged_loses_once_the_key_was_written_or_deleted(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        key, old = ground.prefix + "a", await put(ground, "a")
        await put(ground, "a")
        assert isinstance(await ground.store.txn(Txn((unchanged(key, old),), deletes=(key,))), Lost)
        await ground.store.txn(Txn(deletes=(key,)))
        assert isinstance(await ground.store.txn(Txn((unchanged(key, old),), puts=(Put(key, b""),))), Lost)


async def test_all_compares_must_hold(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        a, b = ground.prefix + "a", ground.prefix + "b"
        revision = await put(ground, "a")
        lost = await ground.store.txn(Txn((unchanged(a, revision), unchanged(b, 1)), puts=(Put(b, b""),)))
        assert isinstance(lost, Lost)
        assert (await ground.store.read(b)).entries == ()


async def test_a_range_compare_holds_only_for_an_empty_range(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        start, end = ground.prefix + "s/000002", ground.prefix + "s0"
        target = ground.prefix + "x"
        txn = Txn((nothing_in(start, end),), puts=(Put(target, b""),))
        await put(ground, "s/000001")
        assert isinstance(await ground.store.txn(txn), Won)
        await put(ground, "s/000007")
        assert isinstance(await ground.store.txn(txn), Lost)


async def test_an_empty_range_compares_as_revision_zero(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        start, end = ground.prefix + "s/", ground.prefix + "s0"
        five = Txn((Compare(start, Field.MOD, 5, end),), puts=(Put(ground.prefix + "x", b""),))
        assert isinstance(await ground.store.txn(five), Lost)


async def test_a_compare_with_no_revision_only_reads(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        await put(ground, "a")
        await put(ground, "b")
        key = ground.prefix + "a"
        never = Compare(key, Field.MOD, -1)
        lost = await ground.store.txn(Txn((never,), reads=(span(key), (key, key + "~"))))
        assert isinstance(lost, Lost)
        assert [len(entries) for entries in lost.reads] == [1, 1]


async def test_one_key_may_not_be_deleted_and_put(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        key = ground.prefix + "a"
        await put(ground, "a")
        with pytest.raises(ValueError, match=r"twice|duplicate"):
            await ground.store.txn(Txn(puts=(Put(key, b""),), deletes=(key,)))
        with pytest.raises(ValueError, match=r"twice|duplicate"):
            await ground.store.txn(Txn(puts=(Put(key, b""), Put(key, b"2"))))
        with pytest.raises(ValueError, match=r"twice|duplicate"):
            await ground.store.txn(Txn(deletes=(key, key)))
        assert len((await ground.store.read(key)).entries) == 1


async def test_128_operations_are_carried_out_and_129_are_refused(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        puts = tuple(Put(f"{ground.prefix}{i:03}", b"") for i in range(129))
        with pytest.raises(ValueError, match="operations"):
            await ground.store.txn(Txn(puts=puts))
        assert (await ground.store.range(ground.prefix)).entries == ()
        assert isinstance(await ground.store.txn(Txn(puts=puts[:128])), Won)


async def test_keys_go_with_their_lease_and_others_stay(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        lease = await ground.store.lease(60)
        await put(ground, "leased", lease=lease.id)
        await put(ground, "kept")
        assert await lease.keep_alive()
        await lease.revoke()
        await lease.revoke()
        assert not await lease.keep_alive()
        entries = (await ground.store.range(ground.prefix)).entries
        assert [entry.key for entry in entries] == [ground.prefix + "kept"]


async def test_a_put_on_a_lease_that_is_gone_writes_nothing(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        lease = await ground.store.lease(60)
        await lease.revoke()
        key = ground.prefix + "a"
        with pytest.raises(LeaseGone):
            await ground.store.txn(Txn(puts=(Put(key, b"", lease.id), Put(key + "2", b""))))
        assert (await ground.store.range(ground.prefix)).entries == ()
        lost = await ground.store.txn(Txn((unchanged(key, 7),), puts=(Put(key, b"", lease.id),)))
        assert isinstance(lost, Lost)


async def test_a_handle_on_a_known_lease_renews_it(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        lease = await ground.store.lease(60)
        again = await ground.store.lease(0, lease_id=lease.id)
        assert again.id == lease.id
        assert await again.keep_alive()


async def test_a_watch_shows_every_change_after_its_revision_in_order(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        before = await put(ground, "a", b"old")
        await put(ground, "b", b"1")
        async with ground.store.watch(ground.prefix, after=before) as changes:
            await put(ground, "c", b"2")
            await ground.store.txn(Txn(deletes=(ground.prefix + "a",)))
            seen: list[tuple[str, bytes | None]] = []
            with trio.fail_after(5):
                while len(seen) < 3:
                    for change in await changes.receive():
                        seen.append((change.key.removeprefix(ground.prefix),
                                     change.entry.value if change.entry else None))
        assert seen == [("b", b"1"), ("c", b"2"), ("a", None)]


async def test_a_watch_tells_nothing_of_other_prefixes(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        revision = await put(ground, "x/a")
        async with ground.store.watch(ground.prefix + "x/", after=revision) as changes:
            await put(ground, "y/b")
            await put(ground, "x/c")
            with trio.fail_after(5):
                (change,) = await changes.receive()
            assert change.key == ground.prefix + "x/c"


async def test_an_expired_lease_is_seen_by_a_watch(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        lease = await ground.store.lease(60)
        revision = await put(ground, "a", lease=lease.id)
        async with ground.store.watch(ground.prefix, after=revision) as changes:
            await lease.revoke()
            with trio.fail_after(5):
                (change,) = await changes.receive()
        assert change.entry is None


async def test_a_watch_from_a_compacted_revision_says_so(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        first = await put(ground, "a")
        for _ in range(4):
            last = await put(ground, "a")
        await ground.compact(last)
        with trio.fail_after(5), pytest.raises(Compacted) as raised:  # noqa: PT012 - entering or receiving
            async with ground.store.watch(ground.prefix, after=first) as changes:
                async for _ in changes:
                    pytest.fail("a change out of a compacted past")
        assert raised.value.revision == last


async def test_a_broken_watch_ends_its_channel_and_the_gap_can_be_read(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        revision = await put(ground, "a")
        async with ground.store.watch(ground.prefix, after=revision) as changes:
            await ground.break_watches()
            with trio.fail_after(5), pytest.raises(trio.EndOfChannel):
                await changes.receive()


async def test_leaving_a_watch_by_an_error_shows_that_error_itself(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        revision = await put(ground, "a")
        with pytest.raises(KeyError, match="mine"):
            async with ground.store.watch(ground.prefix, after=revision):
                raise KeyError("mine")


async def test_status_names_a_leader_and_the_revision(open_ground: OpenGround) -> None:
    async with open_ground() as ground:
        revision = await put(ground, "a")
        status = await ground.store.status()
        assert status.has_leader
        assert status.revision >= revision
        assert status.alarms == ()
