"""The store on a real etcd: etcd3's generated stubs over `grpc.aio`, inside a trio-asyncio loop.

This file, `etcd_messages` and `etcd_wire` are the only ones that know etcd. A request that certainly was not
carried out is tried at the next member; one whose outcome is unknown is never repeated here.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import grpc
import grpc.aio
import trio
import trio_asyncio

from coordinator.store.api import (
    TXN_OPERATIONS_MAX,
    Change,
    Compacted,
    LeaseGone,
    Lost,
    Snapshot,
    StoreStatus,
    StoreUnavailable,
    StoreUnknown,
    Txn,
    Won,
    prefix_end,
)
from coordinator.store.etcd_messages import changes, entries, meaning, range_op, rpc
from coordinator.store.etcd_wire import TXN_METHOD, decode_txn_answer, encode_txn

REQUEST_TIMEOUT_SECONDS = 2.0
WATCH_BATCHES_MAX = 256  # waiting for their reader; then etcd waits
CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # a write repeated behind our back would be two writes
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """File contents, PEM: the CA to trust, and a client certificate with its key where etcd asks for one."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None

    def __repr__(self) -> str:
        return "Tls(…)"


@asynccontextmanager
async def open_etcd(
    endpoints: Sequence[str], *, user: str = "", password: str = "", tls: Tls | None = None,
    request_timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
) -> AsyncIterator[EtcdStore]:
    """A store on the etcd members at `endpoints` (host:port each). Nothing is asked yet."""
    async with trio_asyncio.open_loop() as loop:
        credentials = tls and grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
        members = [_Member(target, credentials) for target in endpoints]
        store = EtcdStore(loop, members, _Login(user, password), request_timeout_seconds)
        try:
            yield store
        finally:
            with trio.move_on_after(1, shield=True):
                await store.close()
            # gRPC's poller thread outlives this loop and may still tell it how cancelled calls ended: to a
            # closed loop that is an error, raised in whichever loop the process runs then
            loop.call_soon_threadsafe = _nobody_waits


def _nobody_waits(*_: object) -> None:
    """What a loop that is over does with a late callback."""


class _Member:
    """One etcd member: its channel is made on first use, within the asyncio loop."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.target = target
        self._credentials = credentials

    @cached_property
    def channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.target, CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.target, self._credentials, CHANNEL_OPTIONS)

    @cached_property
    def kv(self) -> Any:
        return rpc.KVStub(self.channel)

    @cached_property
    def txn(self) -> Any:
        """Takes a Txn, answers Won or Lost."""
        return self.channel.unary_unary(
            TXN_METHOD, request_serializer=encode_txn, response_deserializer=decode_txn_answer)

    @cached_property
    def lease(self) -> Any:
        return rpc.LeaseStub(self.channel)

    @cached_property
    def watch(self) -> Any:
        return rpc.WatchStub(self.channel)

    @cached_property
    def maintenance(self) -> Any:
        return rpc.MaintenanceStub(self.channel)

    @cached_property
    def auth(self) -> Any:
        return rpc.AuthStub(self.channel)


@dataclass(slots=True)
class _Login:
    """Who we are to etcd; `token` is what it gave us for the password."""

    user: str
    password: str = field(repr=False)
    token: str = field(default="", repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self.token),) if self.token else ()


Call = Callable[[_Member], Awaitable[Any]]


class EtcdStore:
    """The Store. `requests` counts what was asked of etcd, by kind (keep-alives and watches included)."""

    def __init__(
        self, loop: trio_asyncio.TrioEventLoop, members: Sequence[_Member], login: _Login,
        timeout_seconds: float,
    ) -> None:
        if not members:
            raise ValueError("etcd without an endpoint")
        self.requests: Counter[str] = Counter()
        self._loop = loop
        self._members = members
        self._at = 0
        self._login = login
        self._timeout = timeout_seconds

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of each member, as given."""
        return tuple(member.target for member in self._members)

    async def close(self) -> None:
        """Close every connection."""
        async def close_all() -> None:
            for member in self._members:
                await member.channel.close()

        await trio_asyncio.aio_as_trio(close_all, loop=self._loop)()

    async def read(self, *keys: str) -> Snapshot:
        if len(keys) > TXN_OPERATIONS_MAX:
            raise ValueError(f"{len(keys)} keys in one read")
        request = rpc.TxnRequest(success=[range_op(key, None) for key in keys])
        answer = await self._unary("read", lambda member: member.kv.Txn, request, writes=False)
        found = itertools.chain.from_iterable(entries(each.response_range) for each in answer.responses)
        return Snapshot(tuple(found), answer.header.revision)

    async def range(self, prefix: str) -> Snapshot:
        request = rpc.RangeRequest(key=prefix.encode(), range_end=prefix_end(prefix).encode())
        answer = await self._unary("range", lambda member: member.kv.Range, request, writes=False)
        return Snapshot(entries(answer), answer.header.revision)

    async def txn(self, txn: Txn) -> Won | Lost:
        if len(set(txn.deletes)) != len(txn.deletes):  # the one repetition that etcd lets pass
            raise ValueError("a key is named twice in one transaction")
        writes = bool(txn.puts or txn.deletes)
        outcome: Won | Lost = await self._unary("txn", lambda member: member.txn, txn, writes=writes)
        return outcome

    def watch(
        self, prefix: str, *, after: int
    ) -> AbstractAsyncContextManager[trio.MemoryReceiveChannel[Sequence[Change]]]:
        return self._watch(prefix, after)

    async def lease(self, ttl_seconds: float, *, lease_id: int = 0) -> EtcdLease:
        if not lease_id:
            request = rpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_seconds)))
            answer = await self._unary("lease", lambda member: member.lease.LeaseGrant, request, writes=True)
            lease_id = answer.ID
        return EtcdLease(self, lease_id)

    async def status(self) -> StoreStatus:
        status = await self._unary(
            "status", lambda member: member.maintenance.Status, rpc.StatusRequest(), writes=False)
        ask = rpc.AlarmRequest(action=rpc.AlarmRequest.GET)
        alarms = await self._unary("status", lambda member: member.maintenance.Alarm, ask, writes=False)
        return StoreStatus(
            version=status.version, cluster_id=status.header.cluster_id, revision=status.header.revision,
            db_size_bytes=status.dbSize, has_leader=bool(status.leader),
            alarms=tuple(rpc.AlarmType.Name(each.alarm) for each in alarms.alarms),
        )

    async def keep_alive(self, lease_id: int) -> bool:
        """Renew a lease: False if it is gone."""
        async def ask(member: _Member) -> bool:
            call = member.lease.LeaseKeepAlive(timeout=self._timeout, metadata=self._login.metadata)
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
                answer = await call.read()
                return answer is not grpc.aio.EOF and answer.TTL > 0
            finally:
                call.cancel()

        alive: bool = await self._ask("keep_alive", ask, writes=True)
        return alive

    async def revoke(self, lease_id: int) -> None:
        """End a lease with its keys; one that is gone is no error."""
        with suppress(LeaseGone):
            request = rpc.LeaseRevokeRequest(ID=lease_id)
            await self._unary("revoke", lambda member: member.lease.LeaseRevoke, request, writes=True)

    # ---- requests

    async def _unary(self, kind: str, method: Callable[[_Member], Any], request: Any, *, writes: bool) -> Any:
        async def ask(member: _Member) -> Any:
            return await method(member)(request, timeout=self._timeout, metadata=self._login.metadata)

        return await self._ask(kind, ask, writes=writes)

    async def _ask(self, kind: str, ask: Call, *, writes: bool) -> Any:
        """One request, at the next member where this one certainly did not carry it out."""
        failure: Exception = StoreUnavailable("no member was asked")
        for _ in range(len(self._members) + bool(self._login.user)):  # once more for a token that ran out
            member = self._members[self._at]
            self.requests[kind] += 1
            try:
                if self._login.user and not self._login.token:
                    await self._log_in(member)
                return await trio_asyncio.aio_as_trio(ask, loop=self._loop)(member)
            except grpc.aio.AioRpcError as error:
                failure = meaning(error, writes)
                self._after_failure(error, failure)
                if type(failure) is not StoreUnavailable:
                    break
            except asyncio.CancelledError:  # the channel was closed here, not the task cancelled
                raise (StoreUnknown if writes else StoreUnavailable)("the store was closed") from None
        raise failure

    def _after_failure(self, error: grpc.aio.AioRpcError, failure: Exception) -> None:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            self._login.token = ""
        elif type(failure) in (StoreUnavailable, StoreUnknown):
            self._at = (self._at + 1) % len(self._members)

    async def _log_in(self, member: _Member) -> None:
        async def ask(member: _Member) -> Any:
            request = rpc.AuthenticateRequest(name=self._login.user, password=self._login.password)
            return await member.auth.Authenticate(request, timeout=self._timeout)

        try:
            answer = await trio_asyncio.aio_as_trio(ask, loop=self._loop)(member)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise StoreUnavailable(f"etcd refuses the user {self._login.user!r}") from None
            raise StoreUnavailable(f"{member.target}: {error.details()}") from None
        self._login.token = answer.token

    # ---- watches

    @asynccontextmanager
    async def _watch(
        self, prefix: str, after: int
    ) -> AsyncIterator[trio.MemoryReceiveChannel[Sequence[Change]]]:
        call = await self._ask("watch", lambda member: self._open_watch(member, prefix, after), writes=False)
        send, receive = trio.open_memory_channel[Sequence[Change]](WATCH_BATCHES_MAX)
        pump = _Pump(call, send, after)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pump.run, self._loop)
                try:
                    with receive:
                        yield receive
                finally:
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # of the reader's own: the pump raises nothing
            error = group.exceptions[0] if len(group.exceptions) == 1 else group
            if not isinstance(error, trio.EndOfChannel) or pump.compacted is None:
                raise error from None
        if pump.compacted is not None:
            raise pump.compacted

    async def _open_watch(self, member: _Member, prefix: str, after: int) -> Any:
        metadata = (*self._login.metadata, ("hasleader", "true"))  # a member cut off from the leader ends it
        call = member.watch.Watch(metadata=metadata)
        create = rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=prefix_end(prefix).encode(), start_revision=after + 1)
        try:
            async with asyncio.timeout(self._timeout):
                await call.write(rpc.WatchRequest(create_request=create))
                answer = await call.read()
            if answer is grpc.aio.EOF or not answer.created or answer.canceled:
                raise StoreUnavailable(f"{member.target} refuses the watch")
        except BaseException as why:
            call.cancel()
            if isinstance(why, TimeoutError):
                raise StoreUnavailable(f"{member.target} does not answer a watch") from None
            raise
        return call


class EtcdLease:
    """A lease in etcd; nothing renews it but `keep_alive`."""

    def __init__(self, store: EtcdStore, lease_id: int) -> None:
        self._store = store
        self.id = lease_id

    async def keep_alive(self) -> bool:
        return await self._store.keep_alive(self.id)

    async def revoke(self) -> None:
        await self._store.revoke(self.id)


class _Pump:
    """Moves one watch's answers into its channel, in order, and remembers how it ended."""

    def __init__(self, call: Any, send: trio.MemorySendChannel[Sequence[Change]], after: int) -> None:
        self.compacted: Compacted | None = None
        self._call = call
        self._send = send
        self._after = after

    async def run(self, loop: trio_asyncio.TrioEventLoop) -> None:
        """Until the watch breaks or is left; then the channel ends."""
        try:
            while True:
                answer = await trio_asyncio.aio_as_trio(self._call.read, loop=loop)()
                if answer is grpc.aio.EOF or answer.canceled:
                    self._ended(answer)
                    return
                batch = changes(answer, self._after)
                if batch:
                    await self._send.send(batch)
        except (grpc.aio.AioRpcError, asyncio.CancelledError, trio.BrokenResourceError):
            return  # asyncio's cancellation is the channel's end: trio's own passes
        finally:
            self._send.close()
            self._call.cancel()

    def _ended(self, answer: Any) -> None:
        if answer is not grpc.aio.EOF and answer.compact_revision:
            self.compacted = Compacted(answer.compact_revision)
