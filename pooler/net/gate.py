"""A client's proof of who it is.

Decides which proof is asked for and whether the one given fits; it says nothing about databases or servers,
and takes the same time and the same words for a user that does not exist as for a wrong password.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from pooler.errors import LoginRefused, PoolerError, ProtocolViolation
from pooler.net.failures import FailedLogins
from pooler.net.hba import Hba, Rule, Visitor
from pooler.net.ident import IdentMaps
from pooler.net.passwords import Known, PasswordDialogue, Proof, send
from pooler.net.proxy_protocol import PeerAddress
from pooler.net.stream import RawSocket
from pooler.net.turns import LOGIN_TURNS
from pooler.wire import auth, messages, sqlstate
from pooler.wire.auth import AuthType, Certificate, Method, Secret, ServerSecret
from pooler.wire.frames import AUTH_BYTES_MAX, FrameReader
from pooler.wire.scram import ITERATIONS_DEFAULT, Verifier
from pooler.wire.startup import Replication, StartupAsked

OWNER_NAMES = frozenset({"pgbouncer", "pooler"})
PAM_AT_ONCE = trio.CapacityLimiter(8)  # a stack that hangs must not take the threads of key derivations
_PASSWORDS = (AuthType.PASSWORD, AuthType.MD5, AuthType.SCRAM)


async def _nobody(*_: object) -> Secret | None:
    return None


def _no_pam(_user: str, _password: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class GateRules:
    """What is asked of clients.

    `find_user` gives the stored secret of (user, database), None for a user that does not exist; `ask_again`
    is told one that was just found wrong and gives a newer one, or None. `mock_key`, iterations: see Known;
    `unknown_method`: see choose_method. `ident_map` is for types cert and peer; `hba` names its own.
    `failures` of None: nobody is slowed down. `check_pam` blocks. `owner_databases`: there the user whom this
    process runs as, over a unix socket, comes in under one of OWNER_NAMES without more proof.
    """

    auth_type: AuthType
    find_user: Callable[[str, str], Awaitable[Secret | None]]
    mock_key: bytes = field(repr=False)
    unknown_method: Method = Method.SCRAM
    scram_iterations: int = ITERATIONS_DEFAULT
    auth_bytes_max: int = AUTH_BYTES_MAX
    derived: dict[str, tuple[Secret, Verifier]] = field(default_factory=dict, repr=False)  # a memo
    ask_again: Callable[[str, str, Secret | None], Awaitable[Secret | None]] = _nobody
    hba: Hba = field(default_factory=Hba)
    ident: IdentMaps = field(default_factory=IdentMaps)
    ident_map: str | None = None
    failures: FailedLogins | None = None
    check_pam: Callable[[str, bytes], bool] = _no_pam
    owner_databases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Proven:
    """What the client is owed at the greeting, what its login lets us say to a server, and whether it is the
    owner of this process (`is_owner`) or came in under any name (`is_anybody`)."""

    owed: bytes = field(repr=False)
    secret: ServerSecret = field(default_factory=ServerSecret)
    is_owner: bool = False
    is_anybody: bool = False


class Gate:
    """One client's way in."""

    def __init__(
        self, sock: RawSocket, rules: GateRules, asked: StartupAsked, address: PeerAddress, received: bytes
    ) -> None:
        self._sock = sock
        self._reader = FrameReader(limit_bytes=rules.auth_bytes_max, allowed=b"pX")
        self._reader.feed(received)
        self._rules = rules
        self._asked = asked
        self._user = asked.user
        self._address = address
        self._tls = sock.tls

    def leftover(self) -> bytes:
        """What came after the last login message."""
        return self._reader.take_rest()

    async def prove(self) -> Proven:
        """Raises LoginRefused, ProtocolViolation, PeerGone."""
        if self._is_owner():
            return Proven(messages.AUTHENTICATION_OK, is_owner=True)
        failures = self._rules.failures
        source = None if failures is None else failures.source(self._address.host)
        if failures is None or source is None:
            return await self._prove()
        if failures.refuses(source):
            raise LoginRefused("too many failed logins from this address", sqlstate.TOO_MANY_CONNECTIONS)
        try:
            return await self._prove()
        except (LoginRefused, ProtocolViolation):
            await _answer_late(failures, source)
            raise

    async def _prove(self) -> Proven:
        rule = self._rule()
        self._check_certificate(rule)
        if rule.method is AuthType.ANY:
            await send(self._sock, messages.AUTHENTICATION_OK)
            return Proven(b"", is_anybody=True)
        if rule.method is AuthType.PAM:
            return await self._ask_pam()
        secret = await self._rules.find_user(self._user, self._asked.database)
        await LOGIN_TURNS.take()
        if rule.method in _PASSWORDS:
            return await self._ask_password(rule.method, secret)
        if rule.method is not AuthType.TRUST:
            await self._check_name(rule)
        if rule.method is AuthType.TRUST:
            await send(self._sock, messages.AUTHENTICATION_OK)
        if secret is None:
            raise LoginRefused(f'role "{self._user}" does not exist')
        owed = b"" if rule.method is AuthType.TRUST else messages.AUTHENTICATION_OK
        return Proven(owed, ServerSecret.of(secret))

    def _rule(self) -> Rule:
        """The rule for this client. Raises LoginRefused where it is to be sent away unasked."""
        rules = self._rules
        if rules.auth_type is not AuthType.HBA:
            return Rule.plain(rules.auth_type, rules.ident_map)
        visitor = Visitor.of(
            self._user, self._asked.database, self._address.host, is_tls=self._tls is not None,
            is_replication=self._asked.replication is Replication.PHYSICAL)
        rule = rules.hba.rule_for(visitor)
        if rule is None:
            raise LoginRefused(f"no pg_hba.conf entry for {self._described(visitor)}")
        if rule.method is AuthType.REJECT:
            raise LoginRefused(f"pg_hba.conf rejects connection for {self._described(visitor)}")
        return rule

    def _described(self, visitor: Visitor) -> str:
        host = "[local]" if visitor.address is None else str(visitor.address)
        what = ("replication connection" if visitor.is_replication else "", f'host "{host}"',
                f'user "{self._user}"', "" if visitor.is_replication else f'database "{visitor.database}"',
                "SSL encryption" if visitor.is_tls else "no encryption")
        return ", ".join(part for part in what if part)

    def _check_certificate(self, rule: Rule) -> None:
        """What a rule asks of a client's certificate besides its proof."""
        needed = Certificate.SIGNED if rule.method is AuthType.CERT else rule.certificate
        if needed is Certificate.NONE:
            return
        if self._tls is None or not self._tls.distinguished_name:
            raise LoginRefused("connection requires a valid client certificate")
        if needed is Certificate.NAMED and self._certificate_name(rule) != self._user:
            raise LoginRefused(f'certificate authentication failed for user "{self._user}"')

    def _certificate_name(self, rule: Rule) -> str:
        assert self._tls is not None  # _check_certificate looked
        return self._tls.distinguished_name if rule.by_distinguished_name else self._tls.common_name

    async def _check_name(self, rule: Rule) -> None:
        """Whether the certificate's or the unix user's name may be this user."""
        if rule.method is AuthType.CERT:
            name, kind = self._certificate_name(rule), "certificate"
        else:
            name, kind = await self._unix_user(), "Peer"
        if not name or not self._rules.ident.allows(rule.ident_map, name, self._user):
            raise LoginRefused(f'{kind} authentication failed for user "{self._user}"')

    async def _unix_user(self) -> str:
        uid = self._peer_uid()
        if uid is None:
            raise LoginRefused("peer authentication is for unix sockets only")
        try:
            found = await trio.to_thread.run_sync(pwd.getpwuid, uid, abandon_on_cancel=True)
        except KeyError:
            return ""
        return found.pw_name

    def _peer_uid(self) -> int | None:
        sock = self._sock.plain
        if sock.family != socket.AF_UNIX or self._address.host != "unix":
            return None
        uid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        return uid

    def _is_owner(self) -> bool:
        asked = self._asked
        return (asked.database in self._rules.owner_databases and asked.user in OWNER_NAMES
                and self._peer_uid() == os.getuid())

    async def _ask_password(self, kind: AuthType, secret: Secret | None) -> Proven:
        rules = self._rules

        async def ask_again() -> Secret | None:
            return await rules.ask_again(self._user, self._asked.database, secret)

        method = auth.choose_method(kind, secret, rules.unknown_method)
        known = Known(rules.mock_key, ask_again, rules.derived, rules.scram_iterations)
        return self._granted(await self._dialogue(known).prove(method, secret))

    async def _ask_pam(self) -> Proven:
        password = await self._dialogue(Known(b"", _nobody, {})).password()
        fits = bool(password) and await trio.to_thread.run_sync(
            self._rules.check_pam, self._user, password, abandon_on_cancel=True, limiter=PAM_AT_ONCE)
        return self._granted(Proof(secret=ServerSecret(plain=password)) if fits else None)

    def _dialogue(self, known: Known) -> PasswordDialogue:
        end_point = b"" if self._tls is None else self._tls.server_end_point
        return PasswordDialogue(self._sock, self._reader, self._user, known, end_point)

    def _granted(self, proof: Proof | None) -> Proven:
        if proof is None:
            raise LoginRefused(
                f'password authentication failed for user "{self._user}"', sqlstate.INVALID_PASSWORD)
        return Proven(proof.last_words + messages.AUTHENTICATION_OK, proof.secret)


async def _answer_late(failures: FailedLogins, source: str) -> None:
    """The time for which the answer to a failure is held back."""
    seconds = failures.failed(source, trio.current_time())
    try:
        with trio.move_on_after(seconds):
            if seconds:
                await trio.sleep_forever()
    finally:
        failures.answered(source)


def refusal_message(error: PoolerError) -> bytes:
    """The FATAL for a client that cannot come in; a server's own words pass unchanged."""
    own: bytes = getattr(error, "server_error", b"")
    if own:
        return messages.message(b"E", own)
    code = getattr(error, "code", "") or error.sqlstate
    detail = getattr(error, "detail", "")
    return messages.error_response(messages.Fault("FATAL", code, str(error), detail=detail))
