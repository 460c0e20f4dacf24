"""Replication connections: each on a session of its own, under a permit of its own kind, which ends with it.

They never see a pool. A session for logical replication is asked who it is like any other. One for physical
replication takes no SQL, so that a session of the same user's pool tells what the server shows of it. The
startup packet bears the permit's birth tag as `application_name`; for logical replication the client's own
name is set once the session is recorded, for physical replication the server takes no other any more.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import structlog
import trio

from coordinator.ledger.record import Kind, Permit
from coordinator.session_table import encode_who
from pooler.errors import BackendLost, LoginRefused, NoPermit, NotServing, PoolerError
from pooler.net.dial import Dialled
from pooler.net.facts import FactsRefused, SessionFacts
from pooler.net.login import LoggedIn, Welcome, greet
from pooler.net.stream import Broken, RawSocket
from pooler.observe.events import Event
from pooler.pool.opener import OpenPlan, OpenSession, close_session, open_session, session_ended
from pooler.pool.plan import PoolPlan, plan_for
from pooler.relay.cancel import cancel_and_wait, end_without_word
from pooler.relay.passing import Passing
from pooler.wire import messages
from pooler.wire.cancel_keys import RANDOM_BYTES, make_key
from pooler.wire.frames import FrameReader
from pooler.wire.messages import Fault, error_response
from pooler.wire.own_parameters import PREFIX, without_own
from pooler.wire.startup import Replication

if TYPE_CHECKING:
    from pooler.relay.task import TaskClient
    from pooler.serve.registry import Registry
    from pooler.settings import Settings

PERMIT_WAIT_SECONDS = 3.0  # a client that comes again at once meets its own last session, which is closing
PERMIT_PAUSE_SECONDS = 0.1
HEARD_SECONDS_MAX = 5.0
FAREWELL_SECONDS = 1.0
CANCEL_SECONDS = 3.0
CLOSE_SECONDS = 5.0
END_SECONDS_MAX = FAREWELL_SECONDS + CANCEL_SECONDS + 2 * CLOSE_SECONDS
PHYSICAL_DATABASE = "replication"  # what libpq calls the database of a physical replication connection
_SHOWN = (
    "SELECT pg_catalog.round(extract(epoch from backend_start) OPERATOR(pg_catalog.*) 1000000)"
    "::pg_catalog.int8, pg_catalog.host(client_addr), client_port "
    "FROM pg_catalog.pg_stat_get_activity({pid})")

log = structlog.get_logger()


class ReplicationClient:
    """A client and its session, from the greeting to the end of both."""

    def __init__(
        self, registry: Registry, plan: PoolPlan, asked: LoggedIn, raw: RawSocket, opened: OpenSession,
        key: bytes, left: Callable[[], None],
    ) -> None:
        self.plan, self.opened, self.cancel_key = plan, opened, key
        self.kind = asked.replication
        self.address = f"{asked.address.host}:{asked.address.port}"
        self.application_name = asked.parameters.get("application_name", "")
        self.connected_at = monotonic()
        self.client, self.server = raw, RawSocket(opened.sock)
        self.passing = Passing(self.client, self.server)
        self._registry = registry
        self._left = left
        self._life = trio.CancelScope()
        self._last_word = b""
        table = registry.parts.table
        self._row = None if table is None else table.take(plan.ledger, opened.permit, opened.pid)
        if self._row is not None:
            parts = registry.parts
            parts.tickets += 1
            asking = registry.asked(
                asked.user, asked.database, self.application_name, asked.address.host, {})
            who = encode_who(asking.tenant, asking.klass, self.address)
            self._row.busy(parts.tickets, who, int(self.connected_at * 1e6))

    @property
    def permit(self) -> Permit:
        """What its session stands on."""
        return self.opened.permit

    def take_permit(self, permit: Permit) -> None:
        """A rebuilt ledger has its session under this one."""
        self.opened = replace(self.opened, permit=permit)
        if self._row is not None:
            self._row.identify(self.plan.ledger, permit, self.opened.pid)

    @property
    def may_end(self) -> bool:
        """Whether nothing is lost by an end now: it asks for nothing, or streams and can begin again where
        it was. A base backup could not."""
        return self.passing.streams or not self.passing.is_busy

    def start(self, leftover: bytes) -> None:
        """Pass on; `leftover` came in behind the login."""
        self._registry.parts.nursery.start_soon(self._run, leftover)

    def break_off(self, sqlstate: str, text: str) -> None:
        """FATAL to the client; its session is closed."""
        self._last_word = self._last_word or error_response(Fault("FATAL", sqlstate, text))
        self._life.cancel()

    async def cancel(self) -> None:
        """A CancelRequest with its key: there is no next client that it could hit."""
        await cancel_and_wait(self, self._registry.settings.pool.cancel_wait_timeout_seconds)

    async def _run(self, leftover: bytes) -> None:
        log.info(Event.SESSION_OPENED, database=self.plan.name, user=self.plan.user, permit=str(self.permit),
                 pid=self.opened.pid, epoch=self.opened.epoch, replication=str(self.kind))
        try:
            with self._life:
                await self.passing.run(leftover)
        finally:
            with trio.move_on_after(END_SECONDS_MAX, shield=True):
                await self._end()
            self._forget()

    async def _end(self) -> None:
        """Both sides, whichever ended first."""
        passing = self.passing
        log.info(Event.SESSION_CLOSED, database=self.plan.name, permit=str(self.permit),
                 reason=_reason(passing.server_ended, self._last_word))
        if self._last_word and passing.client_is_whole:
            with trio.move_on_after(FAREWELL_SECONDS):
                await _say(self.client, self._last_word)
        self.client.close()
        permits = self._registry.parts.permits
        if passing.server_ended is not None:
            await session_ended(permits, self.opened, orderly=passing.server_ended)
            return
        if passing.is_busy and not passing.streams:  # Terminate alone would not be read before it ends
            await cancel_and_wait(self, CANCEL_SECONDS)
        if passing.server_is_whole:
            await close_session(permits, self.opened, CLOSE_SECONDS)
        else:
            orderly = await end_without_word(self.opened.sock, CLOSE_SECONDS)
            await session_ended(permits, self.opened, orderly=orderly)

    def _forget(self) -> None:
        parts = self._registry.parts
        self._registry.replications.pop(self.cancel_key, None)
        self._registry.numbers.drop(self)
        if self._row is not None:
            self._row.free()
        self._left()
        parts.server_forgotten.set()
        parts.server_forgotten = trio.Event()


def entry_for(settings: Settings, asked: LoggedIn, service: str | None) -> str | None:
    """The `databases` entry of a login: by name; for physical replication, which has no database, also the
    one ledger that the service, or the config, has for writing. None if there is none.

    Raises LoginRefused where there are several.
    """
    if asked.replication is not Replication.PHYSICAL or asked.database in settings.databases:
        return settings.database_for(asked.database, service)
    named = settings.database_for(asked.database, service)
    if named is not None and asked.database != PHYSICAL_DATABASE:
        return named
    role = "write" if service is None else settings.services[service].database_role
    fitting = {entry.ledger: name for name, entry in reversed(settings.databases.items())
               if entry.role == role and name != "*"}
    if len(fitting) > 1:
        raise LoginRefused(
            f"physical replication: there are several database clusters here; connect with dbname set to one "
            f"of {', '.join(sorted(fitting.values()))}, or name one of the `databases` {PHYSICAL_DATABASE}",
            "3D000")
    return next(iter(fitting.values()), None)


async def seat(
    registry: Registry, name: str, service: str | None, raw: RawSocket, asked: LoggedIn, deadline: float,
    left: Callable[[], None],
) -> None:
    """Open a session for this client and pass everything on from there; `left` is called at its end.

    Raises LoginRefused where there is no permit for it, DialFailed with the server's own words, and what else
    `open_session` raises. The client's socket is taken over only if it returns.
    """
    secret = registry.secret_for(name, asked.secret)
    plan = plan_for(registry.settings, name, asked.user, secret, service)
    if registry.is_paused(name):
        raise NotServing(f'database "{name}" is paused')
    try:
        with trio.fail_at(deadline):
            opened = await _open(registry, service, plan, asked)
    except trio.TooSlowError:
        raise LoginRefused("client_login_timeout", "08P01") from None
    client: ReplicationClient | None = None
    try:
        told = await _own_name(opened, asked)
        key = make_key(registry.key_owner, os.urandom(RANDOM_BYTES),
                       protocol_minor=asked.protocol_minor, process_id=opened.pid)
        await greet(raw, Welcome(asked.owed, list(told.items()), key))
        client = ReplicationClient(registry, plan, asked, RawSocket(raw.release()), opened, key, left)
    finally:
        if client is None:
            with trio.move_on_after(2 * CLOSE_SECONDS, shield=True):
                await close_session(registry.parts.permits, opened, CLOSE_SECONDS)
    registry.replications[key] = client
    registry.numbers.give(client, registry.parts.permits.ordinal)
    client.start(asked.leftover)


async def _open(registry: Registry, service: str | None, plan: PoolPlan, asked: LoggedIn) -> OpenSession:
    with trio.move_on_after(HEARD_SECONDS_MAX):  # a ledger that is just begun is no refusal
        while not getattr(registry.parts.permits.ledgers.get(plan.ledger), "policy", None):  # noqa: ASYNC110
            await trio.sleep(PERMIT_PAUSE_SECONDS)  # noqa: TID251 - it is told to pools alone
    view = registry.parts.permits.ledgers.get(plan.ledger)
    slots = int(view.policy.get("replicationReserve", 0)) if view is not None else 0
    if not slots:
        raise LoginRefused(
            f'replication connections are not served here: the policy of "{plan.ledger}" has no '
            f"replicationReserve", "0A000")
    ask = _plan_of(registry, plan, asked)
    if asked.replication is Replication.LOGICAL:
        return await _try_open(registry, ask, slots)
    async with _beside(registry, service, plan, asked) as session:
        return await _try_open(registry, replace(ask, ask=partial(_facts_of_walsender, session)), slots)


async def _try_open(registry: Registry, ask: OpenPlan, slots: int) -> OpenSession:
    """For a moment, while all permits are held."""
    give_up_at = trio.current_time() + PERMIT_WAIT_SECONDS
    while True:
        try:
            return await open_session(registry.parts.permits, ask)
        except NoPermit as refused:
            if refused.reason != "full":
                raise
        if trio.current_time() >= give_up_at:
            raise LoginRefused(f'all {slots} replication permits of "{ask.db}" are in use', "53300")
        await trio.sleep(PERMIT_PAUSE_SECONDS)  # noqa: TID251 - nobody tells of a permit that others give back


def _plan_of(registry: Registry, plan: PoolPlan, asked: LoggedIn) -> OpenPlan:
    return OpenPlan(
        db=plan.ledger, dbname=plan.dbname, user=plan.user, secret=plan.secret, seats=0, wait_seconds=0.0,
        connect_timeout_seconds=plan.settings.server_connect_timeout_seconds or float("inf"),
        kind=Kind.REPLICATION, keepalive=plan.keepalive, eof_is_proof=plan.eof_is_proof,
        tls=registry.parts.server_tls, options=without_own(asked.options),
        parameters=_startup_of(asked, plan))


def _startup_of(asked: LoggedIn, plan: PoolPlan) -> dict[str, str]:
    """What the client asked for goes to its server, which says what it does not take."""
    ignored = {"application_name", *map(str.lower, plan.settings.ignore_startup_parameters)}
    wanted = {name: value for name, value in asked.parameters.items()
              if name.lower() not in ignored and not name.lower().startswith(PREFIX)}
    is_logical = asked.replication is Replication.LOGICAL
    return {**wanted, "replication": "database" if is_logical else "true"}


@asynccontextmanager
async def _beside(
    registry: Registry, service: str | None, plan: PoolPlan, asked: LoggedIn
) -> AsyncIterator[TaskClient]:
    """An ordinary session of the same user, had before anything is opened that only it can tell of."""
    pool = registry.pool(plan.name, asked.user, service, asked.secret)
    async with AsyncExitStack() as stack:
        try:
            session = await stack.enter_async_context(pool.checkout())
        except PoolerError as fault:
            raise LoginRefused(
                f"physical replication needs an ordinary session of user {plan.user!r} in database "
                f"{plan.dbname!r} for a moment, which could not be had: {fault}",
                getattr(fault, "code", "") or fault.sqlstate) from fault
        yield session


async def _facts_of_walsender(session: TaskClient, dialled: Dialled, address: str) -> SessionFacts:
    """What the server shows of a session that takes no SQL."""
    rows = await session.query(_SHOWN.format(pid=dialled.pid))
    beside = session.server.opened if session.server is not None else None
    if beside is None or not rows or rows[0][0] is None or beside.backend.address != address:
        raise FactsRefused(f"server {address} does not show its own process {dialled.pid}: what answers "
                           f"there is not the server itself")
    start_us, host, port = ((value or b"").decode() for value in rows[0])
    return SessionFacts(
        dialled.pid, int(start_us), beside.backend, host, max(0, int(port or 0)), beside.facts.server_address,
        beside.facts.server_port, {})


async def _own_name(opened: OpenSession, asked: LoggedIn) -> dict[bytes, bytes]:
    """The parameters for the greeting. Raises Broken, ProtocolViolation, LoginRefused."""
    if asked.replication is Replication.PHYSICAL:
        return opened.parameters
    name = asked.parameters.get("application_name", "")
    if name.startswith("pooler"):
        name = f"_{name}"  # names that begin so say which permit a session stands on
    quoted = name.replace("\\", "\\\\").replace("'", "''")
    server, reader = RawSocket(opened.sock), FrameReader()
    told = dict(opened.parameters)
    await server.send_all(messages.query(
        f"SELECT pg_catalog.set_config('application_name', E'{quoted}', false)"))
    while True:
        for frame in reader:
            if frame.kind == b"S":
                told.update([messages.read_parameter_status(frame.body)])
            elif frame.kind == b"E":
                raise _refused(frame.body)
            elif frame.kind == b"Z":
                return told
        data = await server.recv()
        if not data:
            raise BackendLost("the server went away during the login")
        reader.feed(data)


def _refused(body: bytes) -> LoginRefused:
    fault = messages.read_fault(body)
    return LoginRefused(fault.message, fault.code)


async def _say(sock: RawSocket, data: bytes) -> None:
    try:
        await sock.send_all(data)
    except Broken:
        return  # it is gone


def _reason(server_ended: bool | None, last_word: bytes) -> str:
    if server_ended is None:
        return "broken off by the pooler" if last_word else "its client left"
    return "the server ended it" if server_ended else "the connection to the server broke"
