"""What only a real etcd can show: it fills up, it dies, it expires leases by itself, members come and go."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from coordinator.store.api import (
    Entry,
    Lost,
    Put,
    StoreFull,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
    absent,
    unchanged,
)
from coordinator.store.etcd import EtcdStore, open_etcd
from coordinator.store.etcd_messages import rpc
from pooler.demo.etcd import Etcd, find_etcd
from pooler.demo.process import Child, free_ports
from tests.contract.conftest import etcd_call
from tests.support.etcd import MakeEtcd

pytestmark = pytest.mark.etcd


@pytest.fixture
def small_etcd(tmp_path: Path, etcd: Etcd) -> Iterator[str]:
    """An etcd with room for a few MiB: its endpoint. (`etcd` skips where there is no binary.)"""
    client = free_ports(2)
    peer = client + 1
    binary = find_etcd()
    assert binary is not None
    urls = [f"http://127.0.0.1:{port}" for port in (client, peer)]
    child = Child(
        [binary, "--data-dir", tmp_path / "data", "--quota-backend-bytes", str(4 << 20), "--name", "small",
         "--listen-client-urls", urls[0], "--advertise-client-urls", urls[0], "--listen-peer-urls", urls[1],
         "--initial-advertise-peer-urls", urls[1], "--initial-cluster", f"small={urls[1]}",
         "--logger", "zap"],
        tmp_path / "log")
    child.wait_until(lambda: _listens(client), "etcd listens")
    yield f"127.0.0.1:{client}"
    child.stop()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


async def fill(store: EtcdStore) -> None:
    with pytest.raises(StoreFull):  # noqa: PT012 - one of many puts is the first refused
        for number in range(64):
            await store.txn(Txn(puts=(Put(f"/fill/{number}", bytes(512 << 10)),)))


async def test_a_full_etcd_refuses_puts_and_leases_but_a_pure_delete_passes(small_etcd: str) -> None:
    async with open_etcd([small_etcd], request_timeout_seconds=10) as store:
        won = await store.txn(Txn(puts=(Put("/slot", b""), Put("/seat", b""))))
        assert isinstance(won, Won)
        await fill(store)
        with pytest.raises(StoreFull):
            await store.lease(10)
        with pytest.raises(StoreFull):
            await store.txn(Txn((unchanged("/slot", won.revision),), puts=(Put("/slot", b"2"),)))
        release = Txn((unchanged("/slot", won.revision),), deletes=("/slot", "/seat"))
        assert isinstance(await store.txn(release), Won)
        assert (await store.read("/slot", "/seat")).entries == ()
        assert "NOSPACE" in (await store.status()).alarms


async def test_a_lease_nobody_renews_ends_by_itself_with_its_keys(etcd: Etcd, etcd_prefix: str) -> None:
    async with open_etcd(etcd.endpoints) as store:
        lease = await store.lease(1)
        won = await store.txn(Txn(puts=(Put(f"/{etcd_prefix}/a", b"", lease.id),)))
        async with store.watch(f"/{etcd_prefix}/", after=won.revision) as changes:
            with trio.fail_after(20):
                (change,) = await changes.receive()
        assert change.entry is None
        assert not await lease.keep_alive()


async def test_an_etcd_that_never_listened_is_unavailable_even_for_writes() -> None:
    port = free_ports(1)
    async with open_etcd([f"127.0.0.1:{port}"]) as store:
        with pytest.raises(StoreUnavailable):
            await store.txn(Txn(puts=(Put("/a", b""),)))
        with pytest.raises(StoreUnavailable):
            await store.read("/a")


async def test_a_member_that_is_gone_is_skipped(etcd: Etcd, etcd_prefix: str) -> None:
    port = free_ports(1)
    async with open_etcd([f"127.0.0.1:{port}", *etcd.endpoints]) as store:
        assert isinstance(await store.txn(Txn(puts=(Put(f"/{etcd_prefix}/a", b""),))), Won)


async def test_a_write_that_gets_no_answer_is_unknown_and_a_read_is_not(make_etcd: MakeEtcd) -> None:
    own = make_etcd()
    child = own.members[0].child
    assert child is not None
    async with open_etcd(own.endpoints, request_timeout_seconds=0.5) as store:
        await store.txn(Txn(puts=(Put("/a", b""),)))
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnknown):
            await store.txn(Txn((absent("/b"),), puts=(Put("/b", b""),)))
        with pytest.raises(StoreUnavailable):
            await store.read("/a")
        os.kill(child.pid, signal.SIGCONT)
        with trio.fail_after(20):
            await settled(store)


async def settled(store: EtcdStore) -> None:
    """The late write landed once etcd went on, or the same compare wins now: never both."""
    while True:
        try:
            outcome = await store.txn(Txn((absent("/b"),), puts=(Put("/b", b"again"),)))
        except (StoreUnavailable, StoreUnknown):
            continue
        assert isinstance(outcome, Won | Lost)
        assert len((await store.read("/b")).entries) == 1
        return


async def test_a_killed_etcd_ends_its_watches_and_keeps_what_was_won(make_etcd: MakeEtcd) -> None:
    own = make_etcd()
    async with open_etcd(own.endpoints) as store:
        won = await store.txn(Txn(puts=(Put("/a", b"kept"),)))
        async with store.watch("/", after=won.revision) as changes:
            await trio.to_thread.run_sync(own.kill)
            with trio.fail_after(20), pytest.raises(trio.EndOfChannel):
                await changes.receive()
        with pytest.raises(StoreUnavailable):
            await store.read("/a")
        await trio.to_thread.run_sync(own.start)
        with trio.fail_after(20):
            while not (found := await read_when_up(store)):
                pass
        assert found[0].value == b"kept"


async def read_when_up(store: EtcdStore) -> tuple[Entry, ...]:
    try:
        return (await store.read("/a")).entries
    except StoreUnavailable:
        await trio.lowlevel.checkpoint()
        return ()


async def test_requests_are_counted_by_kind(etcd: Etcd, etcd_prefix: str) -> None:
    async with open_etcd(etcd.endpoints) as store:
        await store.read(f"/{etcd_prefix}/a")
        await store.range(f"/{etcd_prefix}/")
        lease = await store.lease(5)
        await lease.keep_alive()
        await lease.revoke()
        assert store.requests == {"read": 1, "range": 1, "lease": 1, "keep_alive": 1, "revoke": 1}


async def test_a_cancelled_request_leaves_the_store_usable(etcd: Etcd, etcd_prefix: str) -> None:
    async with open_etcd(etcd.endpoints) as store:
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.txn(Txn(puts=(Put(f"/{etcd_prefix}/a", b""),)))
        assert scope.cancelled_caught
        assert isinstance(await store.txn(Txn(puts=(Put(f"/{etcd_prefix}/b", b""),))), Won)


async def test_a_user_logs_in_with_its_password_and_a_wrong_one_is_refused(make_etcd: MakeEtcd) -> None:
    own = make_etcd()
    async with open_etcd(own.endpoints) as admin:
        await etcd_call(admin, "auth", "UserAdd", rpc.AuthUserAddRequest(name="root", password="secret"))
        role = rpc.AuthUserGrantRoleRequest(user="root", role="root")
        await etcd_call(admin, "auth", "UserGrantRole", role)
        await etcd_call(admin, "auth", "AuthEnable", rpc.AuthEnableRequest())
    async with open_etcd(own.endpoints, user="root", password="secret") as store:
        assert isinstance(await store.txn(Txn(puts=(Put("/a", b""),))), Won)
        store._login.token = "stale"
        assert len((await store.read("/a")).entries) == 1
    async with open_etcd(own.endpoints, user="root", password="wrong") as store:
        with pytest.raises(StoreUnavailable, match="root") as raised:
            await store.read("/a")
        assert "wrong" not in str(raised.value)
