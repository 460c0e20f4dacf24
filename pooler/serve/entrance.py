"""How a client comes in: login, its pool, the greeting, and then the reactor has it.

One task per login, with `client_login_timeout`. What is refused here is refused with FATAL; from the greeting
on nothing a pool does disconnects a client.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import structlog
import trio

from pooler.console.as_pgbouncer import check_startup, reworded_login
from pooler.errors import FleetUnreachable, LoginRefused, NotServing, PoolerError, TooManyClients, WaitEnded
from pooler.net.client_count import ClientCount
from pooler.net.dial import DialFailed
from pooler.net.handshake import HandshakeFailed, HandshakeLeft
from pooler.net.login import Door, LoggedIn, Welcome, greet, login, refuse
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import Broken, PeerGone, RawSocket
from pooler.observe.events import Event
from pooler.pool.janitor import why_none
from pooler.pool.pool import Pool
from pooler.relay.asking import Asked, check_class
from pooler.relay.client import ClientConn
from pooler.serve import replication
from pooler.serve.registry import Registry
from pooler.wire.cancel_keys import RANDOM_BYTES, make_key
from pooler.wire.own_parameters import CLASS, OwnFault, take_startup
from pooler.wire.parameters import ParameterSet
from pooler.wire.startup import CancelAsked, Replication, clean_ascii, settings_of

log = structlog.get_logger()

# these follow a client with PgBouncer, too, whatever ignore_startup_parameters names
_KEPT = frozenset(("client_encoding", "datestyle", "timezone", "standard_conforming_strings",
                   "application_name"))

Handle = Callable[[RawSocket, PeerAddress], Awaitable[None]]


class Entrance:
    """Lets clients of one worker in."""

    def __init__(
        self,
        registry: Registry,
        count: ClientCount,
        cancel: Callable[[bytes], Awaitable[None]],
        console: Callable[[RawSocket, LoggedIn], Awaitable[None]],
        parameters_of: Callable[[dict[bytes, bytes]], ParameterSet],
    ) -> None:
        self._registry = registry
        self._count = count
        self._cancel = cancel
        self._console = console
        self._parameters_of = parameters_of
        self.logins = 0
        self.refusals = 0
        self.consoles = 0

    def handler(self, service: str | None, door_of: Callable[[PeerAddress], Door]) -> Handle:
        """What an acceptor calls for the sockets of one service (None: the shared port)."""
        return partial(self._admit, service, door_of)

    async def _admit(
        self, service: str | None, door_of: Callable[[PeerAddress], Door], raw: RawSocket, peer: PeerAddress
    ) -> None:
        try:
            await self._admit_or_be_refused(service, door_of, raw, peer)
        except HandshakeLeft:
            pass  # as one that leaves before its start-up packet
        except HandshakeFailed as failed:
            self.refusals += 1
            log.info(Event.CLIENT_REFUSED, address=peer.host, reason=str(failed))
        except (PeerGone, Broken, OSError):
            pass  # the client went away: nobody to tell
        except Exception:
            log.exception(Event.SOMETHING_FAILED, where="login")
        raw.close()  # nothing of it is left if a client was made of it

    async def _admit_or_be_refused(
        self, service: str | None, door_of: Callable[[PeerAddress], Door], raw: RawSocket, peer: PeerAddress
    ) -> None:
        try:
            await self._admit_or_refuse(service, door_of(peer), raw, peer)
        except PoolerError as error:
            self.refusals += 1
            log.info(Event.CLIENT_REFUSED, address=peer.host, reason=str(error))
            settings = self._registry.settings
            as_pgbouncer = settings.admin.as_pgbouncer
            await refuse(raw, reworded_login(error, settings.auth.type) if as_pgbouncer else error)

    async def _admit_or_refuse(
        self, service: str | None, door: Door, raw: RawSocket, peer: PeerAddress
    ) -> None:
        limit = self._registry.settings.pool.client_login_timeout_seconds or float("inf")
        deadline = trio.current_time() + limit
        try:
            with trio.fail_at(deadline):
                asked = await login(raw, door, peer)
        except trio.TooSlowError:
            raise LoginRefused("client_login_timeout", "08P01") from None
        if isinstance(asked, CancelAsked):
            await self._cancel_request(raw, asked.key, deadline)
        elif asked.console:
            await self._serve_console(raw, asked)
        else:
            await self._seat(service, raw, asked, deadline)

    async def _cancel_request(self, raw: RawSocket, key: bytes, deadline: float) -> None:
        """As PostgreSQL: no answer, whether it found anything or not. Anybody may send one, so that it holds
        a place among the logins no longer than a login may."""
        try:
            with suppress(FleetUnreachable), trio.move_on_at(deadline):
                await self._cancel(key)
        finally:
            raw.close()

    async def _serve_console(self, raw: RawSocket, asked: LoggedIn) -> None:
        """An administrator is counted as a client, and never refused as one."""
        settings = self._registry.settings
        is_admin = asked.is_owner or asked.user in settings.admin.users
        if not self._count.enter(sys.maxsize if is_admin else settings.pool.max_client_conn):
            raise _too_many(settings.pool.max_client_conn)
        try:
            admit = self._registry.admit_always if is_admin else self._registry.admit
            admit(asked.database, asked.user)
        except TooManyClients:
            self._count.leave()
            raise
        self.consoles += 1
        try:
            await self._console(raw, asked)
        finally:
            self._registry.dismiss(asked.database, asked.user)
            self.consoles -= 1
            self._count.leave()
            raw.close()

    async def _seat(self, service: str | None, raw: RawSocket, asked: LoggedIn, deadline: float) -> None:
        registry = self._registry
        name = replication.entry_for(registry.settings, asked, service)
        if name is None:
            raise LoginRefused(f"no such database: {asked.database}", "3D000")
        if name in registry.disabled:
            raise LoginRefused(f'database "{name}" is disabled', "3D000")
        if registry.stopping or registry.leaving:
            raise NotServing("the pooler is shutting down")
        if not self._count.enter(registry.settings.pool.max_client_conn):
            raise _too_many(registry.settings.pool.max_client_conn)
        entered = admitted = False

        def leave() -> None:
            self._count.leave()
            if admitted:
                registry.dismiss(name, asked.user)

        try:
            registry.admit(name, asked.user)
            admitted = True
            if asked.replication is not Replication.NONE:
                await replication.seat(registry, name, service, raw, asked, deadline, leave)
                entered = True
                self.logins += 1
                return
            pool = registry.pool(name, asked.user, service, asked.secret)
            client = await self._greet(pool, raw, asked, deadline)
            entered = True
        finally:
            if not entered:
                leave()
        self.logins += 1
        pool.logins += 1
        pool.clients.add(client)
        registry.entered(client)
        client.start(asked.leftover)

    async def _greet(self, pool: Pool, raw: RawSocket, asked: LoggedIn, deadline: float) -> ClientConn:
        query = pool.plan.settings.query_timeout_seconds  # a login that waits is a query that does
        until = min(deadline, trio.current_time() + query) if query else deadline
        try:
            with trio.fail_at(until):
                start, asking = self._start_of(asked)
                told, parameters = await self._started(pool, asked, start, until)
        except (trio.TooSlowError, WaitEnded):  # whichever of the two clocks sees first that it is time
            if until < deadline:
                raise _servers_word(pool) or LoginRefused("query_timeout", "57014") from None
            raise _servers_word(pool) or LoginRefused(
                f"client_login_timeout: {why_none(pool)}", "08P01") from None
        registry = self._registry
        session = await pool.promises.session()
        try:
            key = make_key(registry.key_owner, os.urandom(RANDOM_BYTES),
                           protocol_minor=asked.protocol_minor, process_id=session.pid if session else 0)
            await greet(raw, Welcome(
                asked.owed, list(told.items()), key, registry.settings.pool.login_notify_message))
            application_name = asked.parameters.get("application_name", "")
            address = f"{asked.address.host}:{asked.address.port}"
            client = ClientConn(
                registry.parts.reactor, pool, raw.release(), address, key, parameters,
                application_name, asking)
        except BaseException:
            if session is not None:
                pool.core.break_promise(session)
            raise
        client.ticket.promised = session
        client.proven = True
        return client

    def _start_of(self, asked: LoggedIn) -> tuple[dict[bytes, bytes], Asked]:
        """What a client's start sets on its session, and who it says is asking. Raises LoginRefused."""
        settings = self._registry.settings.pool
        ignored = {name.lower() for name in settings.ignore_startup_parameters}
        kept = _KEPT | {name.lower() for name in settings.track_extra_parameters}
        start = settings_of(asked.options, asked.parameters, ignored=ignored, kept=kept)
        try:
            own = take_startup(start)
            if CLASS in own:
                check_class(CLASS, own[CLASS])
        except OwnFault as fault:
            raise LoginRefused(f"{fault}. {fault.hint}", fault.code) from None
        if self._registry.settings.admin.as_pgbouncer:
            check_startup(start, asked.parameters, kept)
        return start, self._registry.asked(
            asked.user, asked.database, asked.parameters.get("application_name", ""), asked.address.host, own)

    async def _started(
        self, pool: Pool, asked: LoggedIn, start: dict[bytes, bytes], deadline: float
    ) -> tuple[dict[bytes, bytes], ParameterSet]:
        """What this client is told at login, and its session parameters: its own where it gave some and a
        server has taken them, else the server's."""
        settings = self._registry.settings.pool
        greeting = await pool.greeting_parameters(deadline - trio.current_time())
        base = self._parameters_of({**greeting, b"application_name": b""})
        name = start.pop(b"application_name", b"")
        if settings.application_name_add_host:
            name = b"%b - %b" % (name or b"app", _where(asked.address))
        taken = await pool.starts.proved(base, start, greeting, deadline - trio.current_time())
        start[b"application_name"] = clean_ascii(name, greeting.get(b"server_version", b""))
        parameters = taken.onto(base.with_startup(start))
        return greeting | dict(taken.told) | dict(parameters.items()), parameters


def _where(peer: PeerAddress) -> bytes:
    """As PgBouncer puts it behind an application_name."""
    return f"{peer.host}:{peer.port}".encode() if peer.host != "unix" else b"unix"


def _servers_word(pool: Pool) -> DialFailed | None:
    """Why a server would give no session, as it says that itself: that it is full, or starts up."""
    error = pool.last_error
    return error if isinstance(error, DialFailed) and error.server_error else None


def _too_many(limit: int) -> TooManyClients:
    return TooManyClients(f"no more connections allowed (max_client_conn = {limit})")
