"""How a server session comes to be and how it ends, each under its permit.

Whatever happens, at whichever await, the permit ends with what is known: given back where no session can
exist, reported unknown where one may. Nobody connects without a receipt in hand, and no session is handed out
before it is recorded as open.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Protocol, TypeVar

import trio

from coordinator.ledger.record import Backend, Kind, Permit
from coordinator.ledger.states import Proof
from pooler.errors import BackendLost, NoPermit
from pooler.net.dial import DialFailed, Dialled, Outcome, Progress, Target, dial, hang_up
from pooler.net.facts import SessionFacts, session_facts
from pooler.net.stream import Broken, KeepAlive, RawSocket
from pooler.net.tls_context import ServerTls
from pooler.pool.duty import BackendUnfit, Duty
from pooler.pool.gate import BUSY, Gate, OpenGate
from pooler.pool.permits import Granted, Permits, Wish
from pooler.wire.auth import ServerSecret

GIVE_UP_SECONDS_MAX = 3.0  # for the orderly end of a session that is given up before anybody used it
SHIELD_SECONDS_MAX = 2 * GIVE_UP_SECONDS_MAX

T = TypeVar("T")
AskFacts = Callable[[Dialled, str], Awaitable[SessionFacts]]
"""(an idle session, its address as dialled) → what its server says of it; raises as session_facts."""


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """What to open. `seats`: sessions that the pool (dbname, user) may have over the whole fleet; `pool`:
    which of several for one role in one database.

    `options` and `parameters` go into the startup packet; `ask` learns who the server is; `duty`: what
    it has to be; `gate`: it is passed before a permit is asked for.
    `eof_is_proof`: whether the server's end of file proves a session gone; None: where pid and both socket
    ends are the same on either side, so that nothing stands between.
    """

    db: str
    dbname: str
    user: str
    secret: ServerSecret = field(repr=False)
    seats: int
    wait_seconds: float
    connect_timeout_seconds: float
    kind: Kind = Kind.MAIN
    pool: str = ""
    record_timeout_seconds: float = 10.0
    keepalive: KeepAlive | None = field(default_factory=KeepAlive)
    eof_is_proof: bool | None = None
    tls: ServerTls | None = None
    options: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    ask: AskFacts = session_facts
    duty: Duty = field(default_factory=Duty)
    gate: Gate = field(default_factory=OpenGate)


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session that is recorded as open. `sock` is non-blocking and the holder's; nothing is unread. `tls`
    is how it was encrypted, None for not at all."""

    sock: socket.socket
    pid: int
    secret_key: bytes = field(repr=False)
    parameters: dict[bytes, bytes]
    db: str
    permit: Permit
    epoch: int
    backend: Backend
    backend_start_us: int
    facts: SessionFacts
    eof_is_proof: bool
    tls: ServerTls | None = None


class Closable(Protocol):
    """What closing needs of a session."""

    @property
    def sock(self) -> socket.socket: ...
    @property
    def db(self) -> str: ...
    @property
    def permit(self) -> Permit: ...
    @property
    def eof_is_proof(self) -> bool: ...


async def open_session(permits: Permits, plan: OpenPlan) -> OpenSession:
    """Pass the gate, reserve, dial, ask the server who it is, record.

    Raises NoPermit (none to be had, or it could not be recorded), DialFailed (the server's own words),
    PermitLost, OpenRefused, BackendLost, FactsRefused, ProtocolViolation, NotWanted. Nothing is left behind
    then, nor when cancelled.
    """
    wish = Wish(plan.db, plan.kind, plan.dbname, plan.user, plan.seats, plan.pool)
    deadline = trio.current_time() + plan.wait_seconds
    granted: Granted | None = None
    while True:
        if not await _enter(permits, plan, granted):
            granted = None
            continue
        try:
            granted = granted or await _try_permit(permits, plan, wish)
            if granted is not None:
                opening = _Opening(permits, plan, granted)
                dialled = await opening.dial()
                break
        finally:
            plan.gate.leave()
        granted = await permits.reserve(wish, max(0.0, deadline - trio.current_time()))
    return await opening.record(dialled)


async def _enter(permits: Permits, plan: OpenPlan, granted: Granted | None) -> bool:
    """Whether it is let in. A permit that was waited for is not held while standing at the gate: it goes
    back, and (False) all begins anew."""
    is_in = False
    try:
        is_in = await plan.gate.enter(waits=granted is None)
    finally:
        if granted is not None and not is_in:
            permits.released(plan.db, granted.permit, Proof.UNUSED)
    if granted is None and not is_in:
        raise NoPermit(f'other sessions of database "{plan.db}" are being opened, as many as may be at once '
                       "(scaling_max_parallel_creates, max_server_creates)", BUSY)
    return is_in


async def _try_permit(permits: Permits, plan: OpenPlan, wish: Wish) -> Granted | None:
    """One that is there at once, for the gate is not held while the ledger is waited for."""
    try:
        return await permits.reserve(wish, 0.0)
    except NoPermit:
        if plan.wait_seconds <= 0:
            raise
    return None


async def close_session(
    permits: Permits, session: Closable, terminate_timeout_seconds: float
) -> Proof | None:
    """Terminate, wait for the server's orderly end, and give the permit back with that proof.

    Without it, or cancelled, the socket is reset and the permit reported unknown: None.
    """
    proof: Proof | None = None
    try:
        await permits.closing(session.db, session.permit)
        if session.sock.fileno() >= 0:
            proof = await hang_up(RawSocket(session.sock), timeout_seconds=terminate_timeout_seconds)
    finally:
        session.sock.close()
        proof = _end(permits, session, orderly=proof is Proof.EOF)
    return proof


async def session_ended(permits: Permits, session: Closable, *, orderly: bool) -> Proof | None:
    """The server ended a session, or the connection broke. `orderly`: an end of file was read.

    Returns at once, with the proof if that is one.
    """
    session.sock.close()
    return _end(permits, session, orderly=orderly)


def _end(permits: Permits, session: Closable, *, orderly: bool) -> Proof | None:
    if orderly and session.eof_is_proof:
        permits.released(session.db, session.permit, Proof.EOF)
        return Proof.EOF
    permits.unknown(session.db, session.permit, abandoned=False)
    return None


class _Opening:
    """One attempt under one permit."""

    def __init__(self, permits: Permits, plan: OpenPlan, granted: Granted) -> None:
        self._permits = permits
        self._plan = plan
        self._granted = granted
        self._eof_is_proof = bool(plan.eof_is_proof)  # until the ends were seen

    async def dial(self) -> Dialled:
        """Log in; the permit is ended if that fails."""
        plan, permit = self._plan, self._granted.permit
        if self._permits.lease_left_seconds() <= 0:  # we were paused: others may think us dead by now
            self._permits.released(plan.db, permit, Proof.UNUSED)
            raise NoPermit("the worker's lease ran out before it could connect", "unreachable")
        progress = Progress()
        dialled: Dialled | None = None
        proven = False
        try:
            plan.gate.connecting()
            self._permits.connecting(plan.db, permit)
            dialled = await dial(
                self._target(), connect_timeout_seconds=plan.connect_timeout_seconds, progress=progress)
        except DialFailed as failed:
            proven = failed.outcome is not Outcome.SILENT
            raise
        finally:
            if dialled is None:
                self._not_born(proven or not progress.startup_sent)
        return dialled

    async def record(self, dialled: Dialled) -> OpenSession:
        """Learn who the server is and record the session; it is closed if that fails."""
        session: OpenSession | None = None
        try:
            facts = await self._answered(self._plan.ask(dialled, self._granted.address))
            verified = _nothing_between(dialled, facts)
            self._eof_is_proof = verified if self._plan.eof_is_proof is None else self._plan.eof_is_proof
            self._check(facts)
            await self._check_duty(dialled, facts)
            await self._put_open(facts)
            session = self._session(dialled, facts)
        finally:
            if session is None:
                with trio.move_on_after(SHIELD_SECONDS_MAX, shield=True):
                    await self._give_up(dialled)
        return session

    def _target(self) -> Target:
        host, _, port = self._granted.address.rpartition(":")
        return Target(
            host=host.strip("[]"), port=int(port), user=self._plan.user, database=self._plan.dbname,
            application_name=self._granted.tag, secret=self._plan.secret, keepalive=self._plan.keepalive,
            tls=self._plan.tls, options=self._plan.options, parameters=self._plan.parameters)

    def _not_born(self, proven: bool) -> None:
        """No session came of it, or (not proven) nobody can say."""
        if proven:
            self._permits.released(self._plan.db, self._granted.permit, Proof.EOF)
        else:
            self._permits.unknown(self._plan.db, self._granted.permit, abandoned=True)

    async def _give_up(self, dialled: Dialled) -> None:
        """Close a session that was not recorded as open, or perhaps was: its permit cannot say CLOSING."""
        proof: Proof | None = None
        try:
            proof = await hang_up(dialled.sock, timeout_seconds=GIVE_UP_SECONDS_MAX)
        finally:
            self._not_born(proof is Proof.EOF and self._eof_is_proof)

    async def _answered(self, asking: Awaitable[T]) -> T:
        where = f"server {self._granted.address}"
        try:
            with trio.fail_after(self._plan.connect_timeout_seconds):
                return await asking
        except trio.TooSlowError:
            raise BackendLost(f"{where}: no answer to the first query") from None
        except Broken as broken:
            raise BackendLost(f"{where}: {broken}") from broken

    async def _check_duty(self, dialled: Dialled, facts: SessionFacts) -> None:
        """One that is not what it has to be, or (read from) not what it was, is worth a look at all."""
        view, duty = self._permits.ledgers.get(self._plan.db), self._plan.duty
        recorded = view.backend if view is not None else None
        if recorded is not None and recorded.in_recovery and not facts.backend.in_recovery:
            self._permits.backend_hint(self._plan.db)
        try:
            await self._answered(duty.check(dialled, facts))
        except BackendUnfit:
            self._permits.backend_hint(self._plan.db)
            raise

    def _check(self, facts: SessionFacts) -> None:
        """A session at another database cluster than the epoch's is none of this ledger's."""
        view = self._permits.ledgers.get(self._plan.db)
        expected = view.backend.system_identifier if view is not None and view.backend is not None else ""
        found = facts.backend.system_identifier
        if expected and found != expected:
            raise BackendLost(f"server {self._granted.address} is cluster {found}, not {expected}")

    async def _put_open(self, facts: SessionFacts) -> None:
        try:
            with trio.fail_after(self._plan.record_timeout_seconds):
                await self._permits.opened(self._plan.db, self._granted.permit, facts.pid,
                                           facts.backend_start_us, backend=facts.backend)
        except trio.TooSlowError:
            raise NoPermit(
                f'the ledger of database "{self._plan.db}" could not record a new session',
                "unreachable") from None

    def _session(self, dialled: Dialled, facts: SessionFacts) -> OpenSession:
        return OpenSession(
            tls=None if dialled.sock.tls is None else self._plan.tls,
            sock=dialled.sock.release(), pid=dialled.pid, secret_key=dialled.secret_key,
            parameters={**dialled.parameters, **facts.parameters}, db=self._plan.db,
            permit=self._granted.permit, epoch=self._granted.epoch, backend=facts.backend,
            backend_start_us=facts.backend_start_us, facts=facts, eof_is_proof=self._eof_is_proof)


def _nothing_between(dialled: Dialled, facts: SessionFacts) -> bool:
    """Whether both ends of our socket, and the pid we were told, are those that the server sees."""
    if dialled.pid != facts.pid:
        return False
    sock = dialled.sock.plain
    if sock.family == socket.AF_UNIX:
        return not facts.client_address and not facts.server_address
    try:
        ours, theirs = sock.getsockname(), sock.getpeername()
    except OSError:
        return False
    return _same_end(ours, facts.client_address, facts.client_port) and _same_end(
        theirs, facts.server_address, facts.server_port)


def _same_end(end: tuple[str, int], address: str, port: int) -> bool:
    return bool(address) and end[1] == port and _bare(end[0]) == _bare(address)


def _bare(address: str) -> str:
    """One spelling of an address: no zone, and IPv4 as such where it is mapped into IPv6."""
    found = ip_address(address.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)
