"""What an operator may say of a worker: end its sessions, or that its process has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from coordinator.ledger.attestation import attestations_of
from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.rules import MarkOwnerGone
from coordinator.ledger.states import SessionState
from coordinator.link import LinkRefused
from coordinator.link_values import parse_permit, permit_list
from coordinator.looks import Eyes, LookFailed
from coordinator.revoking import Fencing, NotThis, attest_death, fence_worker, find_worker
from coordinator.session_table import SessionTable
from coordinator.store.api import Lost, Snapshot, Txn, Won
from pooler.cli.death import seen_here
from tests.coordinator.parts import Worker
from tests.coordinator.stage import DB, FakeEyes, Server, Stage, StallingStore, row, stage
from tests.ledger.ground import BACKEND, FLEET, KEYS, NOW_US, record_exit, register, session


async def opened(worker: Worker, pid: int) -> Permit:
    answer = await worker.reserve(db=DB)
    backend = {"address": BACKEND.address, "system_identifier": BACKEND.system_identifier,
               "timeline": 1, "postmaster_start_us": BACKEND.postmaster_start_us}
    await worker.call(
        "open", db=DB, permit=answer["permit"], pid=pid, backend_start_us=pid, backend=backend)
    return parse_permit(answer["permit"])


async def fence(on: Stage, boot_id: str, eyes: Eyes | None, seconds: float = 5.0) -> Fencing:
    return await fence_worker(on.store, FLEET, {DB: on.ledger}, {DB: eyes}, boot_id, who="root@a",
                              evidence="hangs", now_us=lambda: NOW_US, seconds_max=seconds)


class Killing(FakeEyes):
    """A session that is told to end does, and the leader sees that."""

    def __init__(self, on: Stage) -> None:
        super().__init__(on.eyes.servers)
        self._on = on

    async def terminate(self, address: str, pid: int, backend_start_us: int) -> bool:
        self.server.rows = [each for each in self.server.rows
                            if (each.pid, each.backend_start_us) != (pid, backend_start_us)]
        await super().terminate(address, pid, backend_start_us)
        await self._on.reconcile()
        return True


async def test_a_fenced_workers_sessions_are_terminated_and_proven_and_its_lease_is_revoked(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as fenced, on.worker("B") as other:
        gone, stays = await opened(fenced, 42), await opened(other, 43)
        on.eyes.server.rows = [row(42, 42), row(43, 43)]
        lease = on.keyspace.entries[FLEET.worker("A")].lease
        eyes = Killing(on)
        done = await fence(on, "A", eyes)
        assert (done.exit_code, done.terminated, done.left) == (0, {DB: [gone]}, {DB: []})
        assert eyes.terminated == [42]
        assert FLEET.worker("A") not in on.keyspace.entries
        assert lease not in {entry.lease for entry in on.keyspace.entries.values()}
        assert (await on.ledger.snapshot()).find(stays) is not None
        kept = (await on.store.range(FLEET.operators())).entries
        assert [each.what for each in attestations_of(kept, DB)] == ["fence worker A"]


async def test_a_fenced_worker_that_comes_back_is_refused_its_session(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        permit = await opened(worker, 42)
        on.eyes.server.rows = [row(42, 42)]
        done = await fence(on, "A", on.eyes, 1.0)  # the server does not end it
        assert (done.exit_code, done.left) == (1, {DB: [f"{permit}: SESSION_UNKNOWN, pid 42"]})
        answer = await worker.hello()
        assert answer["unknown"] == [[DB, permit_list(permit)]]
        with pytest.raises(LinkRefused) as refused:
            await worker.call("reassert", db=DB, permit=permit_list(permit), closing=False)
        assert refused.value.code == "terminating"


async def test_one_that_registers_anew_in_between_is_revoked_again(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        register(on.keyspace, "A")
        held = session(SessionState.OPEN, owner="A", pid=42, backend_start_us=42)
        await on.put(KEYS.session(held.kind, 0), held.encode())
        on.eyes.server.rows = [row(42, 42)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fence, on, "A", Killing(on))
            for _ in range(3):
                await trio.testing.wait_all_tasks_blocked()
                if FLEET.worker("A") not in on.keyspace.entries:
                    register(on.keyspace, "A")
        assert await on.states() == {}


async def test_another_server_at_that_address_is_told_nothing(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        await opened(worker, 42)
        on.eyes.server.rows = [row(42, 42)]
        on.eyes.server.backend = type(BACKEND)(BACKEND.address, BACKEND.system_identifier, 1, 9_000)
        assert (await fence(on, "A", on.eyes, 1.0)).exit_code == 1
        assert on.eyes.terminated == []


async def test_a_worker_is_named_by_its_boot_id_or_the_beginning_of_one(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        for name in ("abc1", "abc2"):
            register(on.keyspace, name)
        held = session(SessionState.UNKNOWN, owner="dead1")
        await on.put(KEYS.session(held.kind, 0), held.encode())
        assert await find_worker(on.store, FLEET, [on.ledger], "abc2") == "abc2"
        assert await find_worker(on.store, FLEET, [on.ledger], "de") == "dead1"
        for name, why in (("abc", "2 workers"), ("xyz", "no worker"), ("", "no worker")):
            with pytest.raises(NotThis, match=why):
                await find_worker(on.store, FLEET, [on.ledger], name)


async def attest(on: Stage, boot_id: str, *, visible: str = "", evidence: str = "rack 4 is off") -> bool:
    return await attest_death(on.store, FLEET, boot_id, DB, who="root@a", evidence=evidence, visible=visible,
                              now_us=lambda: NOW_US)


async def test_a_death_on_an_operators_word_lets_looks_prove_what_was_never_born(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on:
        held = session(SessionState.UNKNOWN, owner="dead", pid=0)
        await on.put(KEYS.session(held.kind, 0), held.encode())
        await on.reconcile()
        assert "known dead" in on.reconciler.backends.awaiting[DB][str(held.permit)]
        assert await attest(on, "dead")
        assert not await attest(on, "dead")
        for _ in range(2):
            await on.reconcile()
            await trio.sleep(5)  # noqa: TID251 - on a clock that jumps
        await on.reconcile()
        assert on.reconciler.backends.released == {"never_born": 1}
        (kept,) = attestations_of((await on.store.range(FLEET.operators())).entries, DB)
        assert (kept.what, kept.who, kept.evidence) == ("worker dead is dead", "root@a", "rack 4 is off")


async def test_nobodys_word_makes_dead_who_can_be_seen_or_has_a_key(tmp_path: Path, clock: MockClock) -> None:
    async with stage(tmp_path) as on:
        register(on.keyspace, "A")
        with pytest.raises(NotThis, match="has a worker key"):
            await attest(on, "A")
        with pytest.raises(NotThis, match="process 12 runs"):
            await attest(on, "B", visible="its process 12 runs on this host")
        with pytest.raises(ValueError, match="evidence"):
            await attest(on, "B", evidence=" ")
        record_exit(on.keyspace, "C")
        assert not await attest(on, "C")
        assert FLEET.worker_exit("A") not in on.keyspace.entries
        assert FLEET.worker_exit("B") not in on.keyspace.entries


def test_a_process_that_wrote_its_session_table_is_seen_on_its_host(tmp_path: Path) -> None:
    SessionTable.create(tmp_path, "mine").close()
    assert "runs on this host" in seen_here(tmp_path, "mine")
    assert seen_here(tmp_path, "other") == ""
    assert seen_here(None, "mine") == ""


class Slow(StallingStore):
    """Its next read of a worker key waits until it is let go."""

    def __init__(self, on: Stage) -> None:
        super().__init__(on.keyspace)
        self.go = trio.Event()

    async def read(self, *keys: str) -> Snapshot:
        if keys == (FLEET.worker("A"),):
            await self.go.wait()
        return await super().read(*keys)


async def test_what_is_granted_until_the_lease_is_revoked_is_terminated_too(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker, trio.open_nursery() as nursery:
        store, done = Slow(on), list[Fencing]()
        over = trio.Event()

        async def fence_it() -> None:
            done.append(await fence_worker(store, FLEET, {DB: on.ledger}, {DB: Killing(on)}, "A", who="me",
                                           evidence="", now_us=lambda: NOW_US, seconds_max=5.0))
            over.set()

        nursery.start_soon(fence_it)
        await trio.testing.wait_all_tasks_blocked()  # it has looked at what there was: nothing
        late = await opened(worker, 42)
        on.eyes.server.rows = [row(42, 42)]
        store.go.set()
        await over.wait()
        assert (done[0].terminated, done[0].left) == ({DB: [late]}, {DB: []})
        kept = (await on.store.range(FLEET.operators())).entries
        assert [each.what for each in attestations_of(kept, DB)] == ["fence worker A"]


async def test_a_worker_that_registered_anew_meanwhile_keeps_its_registration_and_what_it_gets_then(
    tmp_path: Path, clock: MockClock
) -> None:
    async with stage(tmp_path) as on, on.worker("A") as worker:
        old = await opened(worker, 42)
        on.eyes.server.rows = [row(42, 42)]

        class Anew(StallingStore):
            """Between the end of the lease and the delete of its key the worker is there again."""

            def __init__(self) -> None:
                super().__init__(on.keyspace)
                self.is_anew = False

            async def txn(self, txn: Txn) -> Won | Lost:
                if FLEET.worker("A") in txn.deletes and not self.is_anew:
                    self.is_anew = True
                    await on.ledger.apply(MarkOwnerGone(old))
                    worker.permits[DB, old] = "OPEN"
                    await worker.hello()
                    await opened(worker, 43)
                    on.eyes.server.rows.append(row(43, 43))
                return await super().txn(txn)

        done = await fence_worker(Anew(), FLEET, {DB: on.ledger}, {DB: Killing(on)}, "A", who="me",
                                  evidence="", now_us=lambda: NOW_US, seconds_max=5.0)
        assert done.terminated == {DB: [old]}
        assert FLEET.worker("A") in on.keyspace.entries
        assert await on.states() == {1: "OPEN"}


async def test_why_nothing_was_terminated_is_named_of_every_server_even_of_one_that_is_asked_as_the_time_ends(
    tmp_path: Path, clock: MockClock
) -> None:
    class Refusing(FakeEyes):
        """No pg_signal_backend; each look but the first at a server takes its time."""

        asked: list[str]

        async def look(self, address: str, *, fresh: bool = False) -> Look:
            self.asked.append(address)
            if self.asked.count(address) > 1:
                await trio.sleep(1.0)  # noqa: TID251 - on a clock that jumps
            return await super().look(address, fresh=fresh)

        async def terminate(self, address: str, pid: int, backend_start_us: int) -> bool:
            await trio.lowlevel.checkpoint()
            raise LookFailed(f"{address}: permission denied")

    other = replace(BACKEND, address="127.0.0.1:5499")
    async with stage(tmp_path) as on:
        register(on.keyspace, "A")
        on.eyes.servers[other.address] = Server(other)
        for slot, backend in enumerate((BACKEND, other)):
            held = session(SessionState.UNKNOWN, slot=slot, seat=slot, owner="A", pid=40 + slot,
                           request_id=f"r{slot}", backend_start_us=1, backend=backend)
            await on.put(KEYS.session(Kind.MAIN, slot), held.encode())
        eyes = Refusing(on.eyes.servers)
        eyes.asked = []
        done = await fence(on, "A", eyes)
        assert eyes.asked.count(other.address) > 1
        assert set(done.failed) == {BACKEND.address, other.address}
        assert done.exit_code == 1
