"""CancelRequests that come in to this worker, whoever of the fleet the client belongs to.

The key says whose it is. Another worker of this host gets it through the coordinator. For a worker of another
host the coordinator knows an address at which that host takes cancel requests, and it is sent there as one,
marked as passed on; there it is a request like any other. It is passed on so many times at most. One with the
process id of a session says nothing of whose it is: every worker of this host and every other host is asked,
and those ask nobody but their own workers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import structlog
import trio

from pooler.errors import FleetUnreachable
from pooler.net.connect import connect
from pooler.net.handshake import HandshakeFailed, request_tls
from pooler.net.stream import Broken, RawSocket
from pooler.net.tls_context import server_tls
from pooler.observe.events import Event
from pooler.pool.permits import Permits
from pooler.relay.turns import Turns
from pooler.serve.holder import WorkerHolder
from pooler.serve.registry import Registry
from pooler.settings import ServerTlsSettings, Settings
from pooler.settings_host import host_name
from pooler.wire.cancel_keys import forwarded, may_be_anybodys, ordinal_of, read_forwarded
from pooler.wire.messages import cancel_request

HOPS_MAX = 2
AT_ONCE = 64
CONNECT_SECONDS = 3.0
CLOSE_SECONDS = 5.0
_ANY_ADDRESS = frozenset({"0.0.0.0", "::", "*", ""})

log = structlog.get_logger()


def cancel_address(settings: Settings) -> str:
    """host:port at which other hosts reach this one with a cancel request; "" where nothing listens."""
    told = settings.fleet.cancel_address
    if told is not None:
        return str(told)
    listen = sorted(settings.fleet.listen, key=lambda each: _is_loopback(each.host))
    if not listen:
        return ""
    host = host_name() if listen[0].host in _ANY_ADDRESS else listen[0].host
    return f"[{host}]:{listen[0].port}" if ":" in host else f"{host}:{listen[0].port}"


class Cancelling:
    """One worker's part. `nursery` is where what was begun goes on when who asked for it leaves."""

    def __init__(
        self, registry: Registry, holder: WorkerHolder, permits: Permits, nursery: trio.Nursery
    ) -> None:
        self._registry, self._holder, self._permits = registry, holder, permits
        self._turns = Turns(nursery)
        self._limit = trio.CapacityLimiter(AT_ONCE)

    async def take(self, key: bytes) -> None:
        """A CancelRequest's key. Returns when it was done, or there is nothing to do.

        Raises FleetUnreachable where the worker that it is for cannot be reached.
        """
        key, hops = read_forwarded(key)
        if self._holder.has(key):
            await self._holder.cancel(key)
            return
        ordinal = ordinal_of(key)
        if ordinal is not None and ordinal != self._registry.key_owner:
            # a request that comes round again must not wait for itself
            await self._turns.take(key + bytes([hops]), partial(self._pass_on, ordinal, key, hops))
        elif may_be_anybodys(key):
            await self._turns.take(key + bytes([hops]), partial(self._ask_all, key, hops))

    async def _pass_on(self, ordinal: int, key: bytes, hops: int) -> None:
        address = ""
        try:
            async with self._limit:
                address = self._peer(ordinal) or await self._permits.forward_cancel(ordinal, key)
                if address and hops < HOPS_MAX:
                    await self._send(address, forwarded(key, hops + 1))
        except FleetUnreachable as why:  # anybody may send any key: this is not worth a line each time
            log.debug(Event.CANCEL_NOT_DELIVERED, ordinal=ordinal, reason=str(why))
        except (Broken, ValueError) as why:
            log.warning(Event.CANCEL_NOT_DELIVERED, ordinal=ordinal, reason=f"{address}: {why}")

    async def _ask_all(self, key: bytes, hops: int) -> None:
        """Whoever may have made it. It goes from here to the other hosts, and from those nowhere."""
        async with self._limit, trio.open_nursery() as nursery:
            for address in self._peers().values() if not hops else ():
                nursery.start_soon(self._send_or_tell, address, key)
            try:
                addresses = await self._permits.offer_cancel(key, to_hosts=not hops)
            except FleetUnreachable as why:
                log.debug(Event.CANCEL_NOT_DELIVERED, reason=str(why))
                return
            for address in addresses:
                nursery.start_soon(self._send_or_tell, address, key)

    async def _send_or_tell(self, address: str, key: bytes) -> None:
        try:
            await self._send(address, forwarded(key, 1))
        except (Broken, ValueError) as why:
            log.warning(Event.CANCEL_NOT_DELIVERED, reason=f"{address}: {why}")

    def _peer(self, number: int) -> str:
        """Where the process with this number among the peers is; "" for none."""
        return self._peers().get(number, "")

    def _peers(self) -> dict[Any, str]:
        """host:port of the other processes on this port, by their number."""
        settings = self._registry.settings
        own = settings.fleet.peer_id
        return {peer: f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
                for peer, host, port, _ in settings.admin.show_peers if own and peer != own}

    async def _send(self, address: str, key: bytes) -> None:
        """Encrypted if the other side can, for it is as good as a password. Raises Broken."""
        settings = self._registry.settings
        if address == cancel_address(settings) and not settings.fleet.peer_id:
            raise Broken("a worker of another host says that its address is ours: set fleet.cancel_address")
        with trio.move_on_after(CONNECT_SECONDS + CLOSE_SECONDS):
            try:
                raw = await self._open(address, encrypts=True)
            except HandshakeFailed:
                raw = await self._open(address, encrypts=False)
            try:
                await raw.send_all(cancel_request(key))
                await raw.recv()  # closed when it was done there
            finally:
                raw.close()
            return
        raise Broken("no answer")

    async def _open(self, address: str, *, encrypts: bool) -> RawSocket:
        settings = self._registry.settings
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        raw = RawSocket(await connect(host, int(port)))
        try:
            if settings.fleet.listen_proxy:  # there as here: the address that counts is the socket's own
                await raw.send_all(b"PROXY UNKNOWN\r\n")
            own = settings.client_tls
            tls = None if own.sslmode == "disable" or not encrypts else server_tls(
                ServerTlsSettings(sslmode="prefer", cert_file=own.cert_file, key_file=own.key_file))
            if tls is not None:
                await request_tls(raw, tls, host)
        except BaseException:
            raw.close()
            raise
        return raw


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"
