"""The coordinator's own eyes at the servers: one connection at a time to each node, one statement a look.

A look is sent outside any transaction block, where the list of sessions is not frozen. psycopg runs in a
worker thread that may be abandoned; time limits at the server and at the socket end it then.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
import trio
from psycopg import pq
from psycopg.rows import tuple_row

from coordinator.ledger.proofs import Look, Row
from coordinator.ledger.record import Backend
from coordinator.server_session import OpenFailed, ServerSession
from coordinator.spec import Monitor

CONNECT_TIMEOUT_SECONDS = 5
STATEMENT_TIMEOUT_SECONDS = 5
LOOK_TIMEOUT_SECONDS = 12.0
CLOSE_TIMEOUT_SECONDS = 2

# One statement, so one moment: who answers, whether this role may see everybody, everybody, and the pids of
# those that are starting and have no name yet (pg_locks shows their virtualxid before they have a row).
_LOOK_SQL = """
SELECT pg_backend_pid(),
       (SELECT round(extract(epoch FROM backend_start)::numeric * 1000000)::bigint
          FROM pg_stat_activity WHERE pid = pg_backend_pid()),
       host(inet_server_addr()),
       (SELECT system_identifier::text FROM pg_control_system()),
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END,
       round(extract(epoch FROM pg_postmaster_start_time())::numeric * 1000000)::bigint,
       pg_is_in_recovery(),
       pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'),
       (SELECT setting::int FROM pg_settings WHERE name = 'authentication_timeout'),
       (SELECT setting::int FROM pg_settings WHERE name = 'max_connections'),
       (SELECT sum(setting::int)::int FROM pg_settings
         WHERE name IN ('superuser_reserved_connections', 'reserved_connections')),
       (SELECT setting::int FROM pg_settings WHERE name = 'max_wal_senders'),
       (SELECT coalesce(json_agg(json_build_array(
                   pid, round(extract(epoch FROM backend_start)::numeric * 1000000)::bigint, usename, datname,
                   application_name, state, backend_type, host(client_addr))), '[]')
          FROM pg_stat_activity WHERE pid <> pg_backend_pid()),
       (SELECT coalesce(json_agg(DISTINCT pid), '[]') FROM pg_locks
         WHERE virtualxid IS NOT NULL AND pid <> pg_backend_pid()
           AND pid NOT IN (SELECT pid FROM pg_stat_activity))
"""
_NULL, _BEYOND = type(None), 1 << 63
_LOOK_TYPES: tuple[type | tuple[type, ...], ...] = (
    int, (int, _NULL), (str, _NULL), str, int, int, bool, bool, int, int, (int, _NULL), int, list, list)
_RENAME_SQL = "SELECT set_config('application_name', %s, false)"
_TERMINATE_SQL = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE pid = %s AND round(extract(epoch FROM backend_start)::numeric * 1000000)::bigint = %s
"""


# How the monitor's login may be made where TLS does not verify who answers: none of these gives the password
# away. On loopback also the hash that can be used again, never the password itself.
AUTH_UNVERIFIED = "scram-sha-256,none"
AUTH_LOOPBACK = "scram-sha-256,md5,none"
_VERIFIED = frozenset({"verify-ca", "verify-full"})
_LIBPQ_REQUIRES_AUTH = 160_000  # the first version of libpq that has require_auth

NEEDS_GRANT = "to terminate sessions of other roles the monitor role needs GRANT pg_signal_backend"


class LookFailed(Exception):
    """The node could not be looked at: says where and why, without any secret.

    `ended`: whether our session there is certainly over; None if its thread is still at it.
    """

    def __init__(self, text: str, *, ended: bool | None = True) -> None:
        super().__init__(text)
        self.ended = ended


class Eyes(Protocol):
    """What reconciliation needs of a looker; tests give it one of their own."""

    async def look(self, address: str, *, fresh: bool = False) -> Look:
        """What the server at `address` (host:port) shows. `fresh`: over a connection opened for this look.

        Raises LookFailed.
        """
        ...

    async def terminate(self, address: str, pid: int, backend_start_us: int) -> bool:
        """pg_terminate_backend for exactly that session, as one statement. Raises LookFailed."""
        ...

    async def close(self, *addresses: str) -> None:
        """Gives the sessions at these nodes (none named: at all) back."""
        ...


@dataclass(frozen=True, slots=True)
class Door:
    """How to get in at a node."""

    monitor: Monitor
    dbname: str
    application_name: str


class _Node:
    """One node's session, used by one thread at a time. Its thread closes it when it was abandoned."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.session: ServerSession | None = None
        self.name = ""
        self.abandoned = False
        self.ended = True  # what is known of the session that was closed last

    def execute(
        self, address: str, door: Door, sql: str, params: tuple[object, ...]
    ) -> tuple[Any, ...] | None:
        """Connects if need be; runs in a thread."""
        try:
            if self.session is None:
                self.session, self.name = _connect(address, door), door.application_name
            connection = self.session.connection
            if self.name != door.application_name:  # it was opened before the ledger had its tag
                connection.execute(_RENAME_SQL, (door.application_name,))
                self.name = door.application_name
            cursor = connection.cursor(row_factory=tuple_row)
            return cursor.execute(sql, params or None).fetchone()
        except BaseException:
            self.close()
            raise
        finally:
            if self.abandoned:
                self.close()

    def close(self) -> None:
        """Blocks until the server has ended the session, for a limited time."""
        session, self.session = self.session, None
        if session is not None:
            self.ended = session.close(CLOSE_TIMEOUT_SECONDS)


class Looker:
    """Looks at servers with the monitor's login, over one connection to each node.

    `reconnects`: a kept connection that died is replaced within the same look.
    """

    def __init__(
        self, door: Callable[[str], Door], *, provider_identity: bool = False, reconnects: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._door = door
        self._provider = provider_identity
        self._reconnects = reconnects
        self._clock = clock
        self._nodes: dict[str, _Node] = {}
        self._locks: dict[str, trio.Lock] = {}
        self._starts: dict[str, int] = {}  # the latest postmaster start seen, by address
        self._opened = 0

    async def look(self, address: str, *, fresh: bool = False) -> Look:
        """See Eyes.look."""
        async with self._locks.setdefault(address, trio.Lock()):
            if fresh:
                await self._drop(address)
            at_us = int(self._clock() * 1_000_000)
            row = await self._execute(address, _LOOK_SQL)
            if row is None:
                raise LookFailed(f"{address}: no answer to the look")
            try:
                return self._seen(address, at_us, _checked(row))
            except (ValueError, TypeError):
                raise LookFailed(f"{address}: what it answered to the look is none") from None

    async def ask(self, address: str, sql: str) -> tuple[Any, ...] | None:
        """The first row of what the server at `address` answers to one statement. Raises LookFailed."""
        async with self._locks.setdefault(address, trio.Lock()):
            return await self._execute(address, sql)

    async def terminate(self, address: str, pid: int, backend_start_us: int) -> bool:
        """See Eyes.terminate."""
        async with self._locks.setdefault(address, trio.Lock()):
            row = await self._execute(address, _TERMINATE_SQL, pid, backend_start_us)
            return bool(row and row[0])

    async def close(self, *addresses: str) -> None:
        """See Eyes.close."""
        for address in addresses or tuple(self._nodes):
            async with self._locks.setdefault(address, trio.Lock()):
                await self._drop(address)

    async def rename(self) -> None:
        """Sessions that were opened before their ledger had its tag get the name they should have."""
        for address, node in tuple(self._nodes.items()):
            async with self._locks.setdefault(address, trio.Lock()):
                if node.session is not None and node.name != self._door(address).application_name:
                    await self._execute(address, "SELECT 1")

    async def leave(self, address: str) -> bool:
        """Gives the session at this node back; whether it is certainly over."""
        async with self._locks.setdefault(address, trio.Lock()):
            return await self._drop(address)

    async def _execute(self, address: str, sql: str, *params: object) -> tuple[Any, ...] | None:
        door = self._door(address)  # raises LookFailed where nobody may log in
        for attempt in (1, 2):  # a kept connection may have died since: then once more over a new one
            kept = address in self._nodes
            node = self._nodes.get(address) or self._new_node(address)
            try:
                with trio.fail_after(LOOK_TIMEOUT_SECONDS):
                    return await trio.to_thread.run_sync(
                        node.execute, address, door, sql, params, abandon_on_cancel=True)
            except (psycopg.Error, OSError, ValueError) as failed:  # ValueError: no value of its type
                self._nodes.pop(address, None)
                again = kept and self._reconnects and isinstance(failed, psycopg.OperationalError)
                if attempt == 2 or not again:
                    ended = failed.ended if isinstance(failed, OpenFailed) else node.ended
                    raise LookFailed(f"{address}: {_one_line(failed)}", ended=ended) from None
            except trio.TooSlowError:
                self._abandon(address)
                raise LookFailed(f"{address}: no answer within {LOOK_TIMEOUT_SECONDS:g} s",
                                 ended=None) from None
            except trio.Cancelled:
                self._abandon(address)
                raise
        raise AssertionError("the second attempt returns or raises")

    def _new_node(self, address: str) -> _Node:
        self._opened += 1
        node = self._nodes[address] = _Node(self._opened)
        return node

    def _abandon(self, address: str) -> None:
        """Its thread may still be at work: it closes the connection itself when it ends."""
        node = self._nodes.pop(address, None)
        if node is not None:
            node.abandoned = True

    async def _drop(self, address: str) -> bool:
        node = self._nodes.pop(address, None)
        if node is None:
            return True
        node.ended = False
        with trio.move_on_after(2 * CLOSE_TIMEOUT_SECONDS, shield=True):
            await trio.to_thread.run_sync(node.close, abandon_on_cancel=True)
        return node.ended

    def _seen(self, address: str, at_us: int, row: tuple[Any, ...]) -> Look:
        pid, began_us, server, system, timeline, start_us, recovery, *more = row
        all_stats, auth_timeout, most, reserved, walsenders, rows, nameless = more
        node = self._nodes[address]
        local, right = _ends(node.session.connection if node.session else None, server)
        latest = self._starts.get(address, 0)
        self._starts[address] = max(latest, start_us)
        named = tuple(_row(each) for each in rows)
        starting = {each.pid for each in named if each.state == "starting"}
        return Look(
            backend=Backend(address, system, timeline, start_us, recovery),
            may_see_all=all_stats,
            is_node=self._provider or (right and start_us >= latest),
            rows=named,
            anonymous=frozenset(nameless) | starting,
            at_us=at_us,
            connection=node.number,
            authentication_timeout_seconds=float(auth_timeout),
            is_local=local,
            max_connections=most,
            reserved_connections=reserved or 0,
            max_wal_senders=walsenders,
            own_pid=pid,
            own_start_us=began_us or 0,
        )


def _connect(address: str, door: Door) -> ServerSession:
    host, port = split_address(address)
    parameters = {
        **door.monitor.tls,
        "user": door.monitor.user, "password": door.monitor.password, "dbname": door.dbname,
        "application_name": door.application_name,
        "options": f"-c statement_timeout={STATEMENT_TIMEOUT_SECONDS}s -c search_path=pg_catalog",
        "tcp_user_timeout": STATEMENT_TIMEOUT_SECONDS * 2000, "keepalives_idle": 5,
        "keepalives_interval": 2, "keepalives_count": 3,
    }
    auth = auth_allowed(host, door.monitor.tls)
    if auth:
        if pq.version() < _LIBPQ_REQUIRES_AUTH:
            raise OpenFailed("libpq before 16 would give the password to whoever answers: let TLS verify it",
                             ended=True)
        parameters["require_auth"] = auth
    return ServerSession.open(host, port, parameters, timeout_seconds=CONNECT_TIMEOUT_SECONDS,
                              close_timeout_seconds=CLOSE_TIMEOUT_SECONDS)


def auth_allowed(host: str, tls: Mapping[str, str]) -> str:
    """libpq's require_auth for a login at `host` (name, address or directory of a socket) with these TLS
    parameters; empty: whatever the server asks for.

    https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNECT-REQUIRE-AUTH
    """
    if host.startswith("/") or tls.get("sslmode") in _VERIFIED:
        return ""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return AUTH_LOOPBACK if is_loopback else AUTH_UNVERIFIED


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of host:port; the host may be in brackets or a directory of a unix socket."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _ends(connection: psycopg.Connection[Any] | None, server: str | None) -> tuple[bool, bool]:
    """(whether it is local, whether the server that answered has the address that was dialled)."""
    if server is None:
        return True, True  # a unix socket
    dialled = connection.info.hostaddr if connection is not None else ""
    try:
        here, there = ipaddress.ip_address(dialled), ipaddress.ip_address(server)
    except ValueError:
        return False, False
    return here.is_loopback, here == there


def _checked(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The answer to _LOOK_SQL, if it is one. Raises ValueError."""
    if len(row) != len(_LOOK_TYPES) or not all(map(isinstance, row, _LOOK_TYPES)):
        raise ValueError("not the columns that were asked for")
    if any(isinstance(value, int) and abs(value) >= _BEYOND for value in row):
        raise ValueError("a number that no server has")
    return row


def _row(values: list[Any]) -> Row:
    pid, start_us, user, dbname, name, state, backend_type, client = values
    return Row(pid, start_us, user, dbname, name or "", state, backend_type, client)


def _one_line(failed: BaseException) -> str:
    return " ".join(str(failed).split()) or type(failed).__name__
