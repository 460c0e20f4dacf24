"""From publication to promotion and back: which moves there are, and what stands between their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from coordinator.ledger.ledger import Ledger
from coordinator.ledger.notes import ShadowCount
from coordinator.ledger.record import Alias, Kind
from coordinator.ledger.snapshot import Held
from coordinator.policy import Policy, decode_policy, encode_policy, load_policy
from coordinator.policy_moves import (
    Drained,
    MoveRefused,
    Plan,
    Standing,
    Swap,
    plan_promote,
    plan_rollback,
    plan_shadow,
    plan_takeover,
)
from coordinator.publishing import (
    Checked,
    Mover,
    NoRoom,
    check_servers,
    publish,
    read_shadow_counts,
    read_standing,
)
from coordinator.resolved import Resolved
from coordinator.spec import DatabaseSpec, Monitor
from coordinator.store.api import Entry, Lost, Put, StoreUnknown, Txn, Won
from coordinator.store.memory import Keyspace, MemoryStore
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import FakeEyes, Server
from tests.ledger.ground import BACKEND, FLEET, KEYS, found, ledger_on, session, write

DB = KEYS.database
PUBLISHED = dict.fromkeys((1, 2, 3), b"")


def standing(alias: Alias) -> Standing:
    return Standing(Entry(KEYS.alias(), alias.encode(), 1, 1), PUBLISHED)


shadow, promote = partial(plan_shadow, generation=2), partial(plan_promote, generation=2)
takeover = partial(plan_takeover, generation=2, fraction=0.05, role="read")
Move = Callable[[Standing], Plan]

MOVES: dict[str, tuple[Move, Alias, list[Alias | int]]] = {
    "shadow": (shadow, Alias(1), [Alias(1, 2)]),
    "another shadow": (shadow, Alias(1, 3), [Alias(1, 2)]),
    "the shadow again": (shadow, Alias(1, 2), []),
    "takeover": (takeover, Alias(1, 2), [Alias(1, 2, 0.05)]),
    "more of it": (takeover, Alias(1, 2, 0.01), [Alias(1, 2, 0.05)]),
    "promote": (promote, Alias(1), [Alias(2, previous=1)]),
    "promote the shadow": (promote, Alias(1, 2), [Alias(2, previous=1)]),
    "promote what takes over": (promote, Alias(1, 2, 0.05), [Alias(2, previous=1)]),
    "promote the active": (promote, Alias(2, previous=1), []),
    "forget a shadow": (plan_rollback, Alias(1, 2), [Alias(1)]),
    "end a takeover": (plan_rollback, Alias(1, 2, 0.05), [Alias(1, 2, withdrawn=2), 2, Alias(1)]),
    "go back": (plan_rollback, Alias(2, previous=1), [Alias(2, previous=1, withdrawn=2), 2, Alias(1)]),
    "go on going back": (plan_rollback, Alias(2, previous=1, withdrawn=2), [2, Alias(1)]),
    "go on ending": (plan_rollback, Alias(1, 2, withdrawn=2), [2, Alias(1)]),
    "the shadow goes first": (plan_rollback, Alias(2, 3, previous=1), [Alias(2, previous=1)]),
}
REFUSED: dict[str, tuple[Move, Alias, str]] = {
    "not published": (partial(plan_shadow, generation=9), Alias(1), "9 is not published (published: 1, 2"),
    "older": (promote, Alias(3, previous=2), "2 is not newer than the active one, 3"),
    "while it is rolled back": (shadow, Alias(3, previous=1, withdrawn=3), "3 is being rolled back"),
    "the active as shadow": (shadow, Alias(2), "not newer than the active one, 2"),
    "shadow beside a takeover": (shadow, Alias(1, 3, 0.1), "3 takes over 0.1 of the requests"),
    "promote beside another's takeover": (promote, Alias(1, 3, 0.1), "3 takes over 0.1"),
    "takeover of no shadow": (takeover, Alias(1), "2 is not the shadow"),
    "takeover of all and more": (partial(takeover, fraction=1.5), Alias(1, 2), "1.5 is no fraction"),
    "takeover of nothing": (partial(takeover, fraction=0.0), Alias(1, 2), "0 is no fraction"),
    "takeover of writes": (partial(takeover, role="write"), Alias(1, 2), "it is of role write"),
    "takeover of who knows": (partial(takeover, role=""), Alias(1, 2), "not known here"),
    "nothing to go back to": (plan_rollback, Alias(1), "nothing to roll back"),
}


def told(plan: Plan) -> list[Alias | int]:
    return [step.alias if isinstance(step, Swap) else step.generation for step in plan]


@pytest.mark.parametrize("name", MOVES)
def test_each_move_is_a_plan_of_compared_steps(name: str) -> None:
    move, alias, steps = MOVES[name]
    assert told(move(standing(alias))) == steps


@pytest.mark.parametrize("name", REFUSED)
def test_a_move_that_cannot_be_made_says_why(name: str) -> None:
    move, alias, why = REFUSED[name]
    with pytest.raises(MoveRefused) as refused:
        move(standing(alias))
    assert why in str(refused.value)


@pytest.mark.parametrize("name", MOVES)
def test_between_two_steps_one_generation_grants_and_never_one_that_is_withdrawn(name: str) -> None:
    move, alias, _ = MOVES[name]
    for step in move(standing(alias)):
        if isinstance(step, Swap):
            assert step.alias.granting
            assert not step.alias.withdrawn or step.alias.withdrawn not in {
                step.alias.granting, step.alias.taking_over}


# ---- publication


def document(generation: int, slots: int = 4, **more: Any) -> tuple[Policy, dict[str, Any]]:
    text = policy_text(slots, db=DB).replace("generation: 1", f"generation: {generation}")
    return load_policy(text + "".join(f"{name}: {value}\n" for name, value in more.items()))


async def published(store: MemoryStore, policy: Policy, text: dict[str, Any]) -> tuple[bool, Alias]:
    return await publish(
        store, KEYS, policy, text, Checked(), can_fail_over=False, hosts=(), role="write")


@pytest.fixture
def store() -> MemoryStore:
    """A founded ledger without any policy."""
    keyspace = found()
    write(keyspace, deletes=(KEYS.alias(), KEYS.policy(1)))
    return MemoryStore(keyspace)


async def test_the_first_generation_may_be_any_and_is_active_at_once(store: MemoryStore) -> None:
    assert await published(store, *document(27)) == (True, Alias(27))
    assert await published(store, *document(28, 8)) == (True, Alias(27))
    assert (await read_standing(store, KEYS)).generations.keys() == {27, 28}


async def test_the_same_number_and_content_again_changes_nothing(store: MemoryStore) -> None:
    await published(store, *document(27))
    before = dict(store.keyspace.entries)
    spelled_out = document(27, otherClients=0)  # a default
    assert await published(store, *spelled_out) == (False, Alias(27))
    assert store.keyspace.entries == before


async def test_the_same_number_with_other_content_is_refused_with_the_difference(store: MemoryStore) -> None:
    await published(store, *document(27))
    with pytest.raises(MoveRefused) as refused:
        await published(store, *document(27, 3, otherClients=5))
    text = str(refused.value)
    assert "serverSessionPermits 3 (published: 4)" in text
    assert "executionClasses.interactive.permits 3 (published: 4)" in text
    assert "otherClients 5 (published: 0)" in text
    assert "publish it as 28 or more" in text


async def test_a_number_that_is_not_above_the_last_is_refused_with_both(store: MemoryStore) -> None:
    await published(store, *document(27))
    with pytest.raises(MoveRefused, match="generation 26 is not above the last one, 27"):
        await published(store, *document(26))


@pytest.mark.parametrize(("more", "can", "kept"), [
    ({}, True, 2), ({}, False, 0), ({"failoverPermits": 5}, False, 5), ({"failoverPermits": 0}, True, 0)])
async def test_open_defaults_are_worked_out_at_publication(
    store: MemoryStore, more: dict[str, int], can: bool, kept: int
) -> None:
    policy, text = document(1, 20, **more)
    checked = Checked(room=97, not_seen={})
    await publish(store, KEYS, policy, text, checked, can_fail_over=can, hosts=("a:1", "b:1"), role="read")
    stored = decode_policy(store.keyspace.entries[KEYS.policy(1)].value)
    assert (stored.failover_slots, stored.resolved.hard_connection_limit) == (kept, 97)
    assert (stored.resolved.hosts, stored.resolved.role) == (("a:1", "b:1"), "read")
    snapshot = await ledger_on(store).snapshot()
    assert snapshot.active_limits is not None
    assert snapshot.active_limits.failover == kept


class Racing(MemoryStore):
    """Another publisher is faster, once."""

    def __init__(self, keyspace: Keyspace) -> None:
        super().__init__(keyspace)
        self.first: Callable[[], None] | None = None

    async def txn(self, txn: Txn) -> Won | Lost:
        if txn.puts and self.first is not None:
            first, self.first = self.first, None
            first()
        return await super().txn(txn)


async def test_of_two_publishers_one_sees_the_others_number(store: MemoryStore) -> None:
    racing = Racing(store.keyspace)
    await published(racing, *document(1))

    def faster() -> None:
        entry = racing.keyspace.entries[KEYS.alias()]
        write(racing.keyspace, Put(KEYS.policy(9), racing.keyspace.entries[KEYS.policy(1)].value),
              Put(entry.key, entry.value))

    racing.first = faster
    with pytest.raises(MoveRefused, match="generation 8 is not above the last one, 9"):
        await published(racing, *document(8))


# ---- against the servers


def ledgers(*hosts: str) -> dict[str, tuple[DatabaseSpec, ...]]:
    return {DB: (DatabaseSpec(DB, "shop", "app", hosts, "write", None, Monitor("m", "p")),)}


async def test_what_the_server_has_no_room_for_is_refused_with_the_names_of_all_that_meet(
    store: MemoryStore,
) -> None:
    """Two databases of 100 on a server of 150."""
    other, text = FLEET.db("other/write"), policy_text(100, db="other/write")
    policy, _ = load_policy(text)
    await publish(store, other, policy, load_policy(text)[1], Checked(), can_fail_over=False,
                  hosts=(BACKEND.address,), role="write")
    eyes = FakeEyes({BACKEND.address: Server(max_connections=150, reserved_connections=3)})
    with pytest.raises(NoRoom, match=r"other/write 101 \+ orders/write 101 sessions") as refused:
        await check_servers(store, FLEET, document(1, 100)[0], ledgers(BACKEND.address), eyes)
    assert "room for 147 sessions" in str(refused.value)
    checked = await check_servers(store, FLEET, document(1, 40)[0], ledgers(BACKEND.address, "b:1"), eyes)
    assert checked == Checked(147, {"b:1": "b:1: unreachable"})


async def test_where_no_server_can_be_seen_nothing_says_that_there_is_room(store: MemoryStore) -> None:
    with pytest.raises(NoRoom, match="no server could be looked at"):
        await check_servers(store, FLEET, document(1)[0], ledgers("b:1"), FakeEyes())
    assert await check_servers(store, FLEET, document(1)[0], ledgers("b:1"), None) == Checked()


# ---- the moves, carried out


class Unsure(MemoryStore):
    """The next writes are answered with nothing; `applied`: whether they happened."""

    unsure, applied = 0, True

    async def txn(self, txn: Txn) -> Won | Lost:
        if txn.puts and self.unsure:
            self.unsure -= 1
            if self.applied:
                await super().txn(txn)
            raise StoreUnknown("no answer")
        return await super().txn(txn)


def mover(store: MemoryStore, tell: Callable[[int, list[Held]], None] = lambda *_: None) -> Mover:
    ledger: Ledger = ledger_on(store)
    return Mover(store, KEYS, ledger, tell)


@pytest.mark.parametrize("applied", [True, False])
async def test_an_answer_that_was_lost_is_settled_by_what_stands(applied: bool) -> None:
    unsure = Unsure(found())
    write(unsure.keyspace, Put(KEYS.policy(2), unsure.keyspace.entries[KEYS.policy(1)].value))
    unsure.unsure, unsure.applied = 2, applied
    assert await mover(unsure).move(promote) == Alias(2, previous=1)
    assert Alias.decode(unsure.keyspace.entries[KEYS.alias()].value) == Alias(2, previous=1)


async def test_who_was_overtaken_moves_nothing() -> None:
    racing = Racing(found())
    stored = racing.keyspace.entries[KEYS.policy(1)].value
    write(racing.keyspace, Put(KEYS.policy(2), stored), Put(KEYS.policy(3), stored))
    racing.first = lambda: void(write(racing.keyspace, Put(KEYS.alias(), Alias(3, previous=1).encode())))
    with pytest.raises(MoveRefused, match="moved meanwhile"):
        await mover(racing).move(promote)
    assert Alias.decode(racing.keyspace.entries[KEYS.alias()].value) == Alias(3, previous=1)


def void(_: object) -> None:
    return None


async def test_a_rollback_waits_for_the_proof_of_each_session_and_then_moves_the_alias(
    clock: MockClock,
) -> None:
    store = MemoryStore(found())
    write(store.keyspace, Put(KEYS.policy(2), store.keyspace.entries[KEYS.policy(1)].value),
          Put(KEYS.alias(), Alias(2, previous=1).encode()))
    for slot, generation in enumerate((1, 2, 2)):
        write(store.keyspace, Put(KEYS.session(Kind.MAIN, slot), session(
            slot=slot, seat=-1, request_id=f"r{slot}", policy_generation=generation).encode()))
    heard: list[tuple[int, int]] = []
    ended: list[Alias] = []

    async def roll_back() -> None:
        moves = mover(store, lambda generation, left: heard.append((generation, len(left))))
        ended.append(await moves.move(plan_rollback))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(roll_back)
        for slot in (1, 2):
            with trio.move_on_after(1):
                await trio.sleep_forever()
            now = Alias.decode(store.keyspace.entries[KEYS.alias()].value)
            assert now == Alias(2, previous=1, withdrawn=2)
            write(store.keyspace, deletes=(KEYS.session(Kind.MAIN, slot),))
        await wait_all_tasks_blocked()
    assert ended == [Alias(1)]
    assert list(dict.fromkeys(heard)) == [(2, 2), (2, 1), (2, 0)]
    assert KEYS.session(Kind.MAIN, 0) in store.keyspace.entries  # what the old one granted stays


async def test_what_shadows_counted_is_summed_over_the_hosts_and_forgotten_with_the_next() -> None:
    store = MemoryStore(found())
    write(store.keyspace, Put(KEYS.shadow(2, "a"), ShadowCount(1, 2, 3, since_us=9).encode()),
          Put(KEYS.shadow(2, "b/c"), ShadowCount(10, 20, 30, since_us=7).encode()),
          Put(KEYS.shadow(3, "a"), ShadowCount(5, 5, 5).encode()))
    assert await read_shadow_counts(store, KEYS, 2) == ShadowCount(11, 22, 33, since_us=7)
    await mover(store).forget_counts()
    assert await read_shadow_counts(store, KEYS, 2) == ShadowCount()


def test_a_plan_waits_for_nothing_but_a_generation_that_is_withdrawn() -> None:
    for move, alias, _ in MOVES.values():
        withdrawn = alias.withdrawn
        for step in move(standing(alias)):
            if isinstance(step, Drained):
                assert step.generation == withdrawn
            else:
                withdrawn = step.alias.withdrawn


async def test_who_published_is_told_only_by_whose_write_it_was() -> None:
    racing = Racing(found())
    policy, text = document(2)
    theirs = encode_policy(text, Resolved(hosts=("theirs:1",)))
    racing.first = lambda: void(write(racing.keyspace, Put(KEYS.policy(2), theirs), Put(
        KEYS.alias(), Alias(1).encode())))
    assert await published(racing, policy, text) == (False, Alias(1))


@pytest.mark.parametrize("applied", [True, False])
async def test_a_publication_whose_answer_was_lost_is_its_own_by_what_stands(applied: bool) -> None:
    unsure = Unsure(found())
    unsure.unsure, unsure.applied = 1, applied
    assert await published(unsure, *document(2)) == (True, Alias(1))
