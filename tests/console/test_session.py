"""The console over a real socket, with raw messages and with the drivers that people have."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import asyncpg
import psycopg
import pytest
import structlog
import trio

from pooler.console.session import CommandResult, ConsoleUser, Interrupt, serve_console
from pooler.errors import FleetUnreachable
from pooler.net.stream import Broken, RawSocket
from pooler.wire import messages
from pooler.wire.startup import Encryption, read_first_packet
from tests.support.rawclient import TrioRawClient

T = TypeVar("T")
ADMIN = ConsoleUser("admin", is_admin=True, address="127.0.0.1")
STATS = ConsoleUser("stats", is_admin=False, address="127.0.0.1")


class Fleet:
    """Two workers, as the console sees them."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.result = CommandResult(done=["w0", "w1"])
        self.unreachable = False
        self.interrupt = Interrupt()
        self.waits = False  # a command goes on until it is cancelled
        self.waiting, self.wait_ended = trio.Event(), trio.Event()

    async def show(self, item: str, argument: str | None) -> list[dict[str, Any]]:
        if self.unreachable:
            raise FleetUnreachable("no coordinator answers")
        pool = {"database": "orders", "user": "app", "pool_mode": "transaction", "cl_active": 2, "maxwait": 0,
                "maxwait_us": 5}
        rows: dict[str, list[dict[str, Any]]] = {
            "pools": [pool | {"worker": worker} for worker in ("w0", "w1")],
            "stats": [{"database": "orders", "total_xact_count": 10**12, "worker": w} for w in ("w0", "w1")],
            "ledger": [{"database": "a", "state": "OPEN", "slot": 1}, {"database": "b", "state": "OPEN"}],
        }
        return rows.get(item, [])

    async def command(self, name: str, args: dict[str, Any]) -> CommandResult:
        self.commands.append((name, args))
        if self.waits:
            self.waiting.set()
            try:
                await trio.sleep_forever()
            finally:
                self.wait_ended.set()
        return self.result


async def admit(stream: trio.SocketStream, who: ConsoleUser, fleet: Fleet) -> None:
    """Login without questions, then the console."""
    sock = RawSocket(socket.socket(fileno=os.dup(stream.socket.fileno())))
    await stream.aclose()
    try:
        buffer = b""
        while True:
            buffer += await sock.recv()
            while (asked := read_first_packet(buffer)) is not None:
                buffer = buffer[asked[1] :]
                if not isinstance(asked[0], Encryption):
                    await serve_console(sock, who, fleet, owed=messages.AUTHENTICATION_OK, leftover=buffer,
                                        interrupt=fleet.interrupt)
                    return
                await sock.send_all(b"N")
    except Broken:
        return
    finally:
        sock.close()


@asynccontextmanager
async def console(fleet: Fleet, who: ConsoleUser = ADMIN) -> AsyncIterator[int]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, partial(admit, who=who, fleet=fleet), [listener])
        with trio.fail_after(20):
            yield port
        nursery.cancel_scope.cancel()


async def with_psycopg(
    port: int, work: Callable[[psycopg.Connection[Any]], T], *, autocommit: bool = True
) -> T:
    def run() -> T:
        dsn = f"host=127.0.0.1 port={port} user=admin dbname=pgbouncer"
        with psycopg.connect(dsn, autocommit=autocommit) as connection:
            return work(connection)

    return await trio.to_thread.run_sync(run)


@asynccontextmanager
async def raw(port: int) -> AsyncIterator[TrioRawClient]:
    client = await TrioRawClient.connect(port)
    async with client.stream:
        yield await client.login("admin", "", "pgbouncer")


async def answers(client: TrioRawClient, *sent: bytes) -> list[tuple[str, bytes]]:
    """Messages up to ReadyForQuery."""
    await client.send(b"".join(sent))
    found: list[tuple[str, bytes]] = []
    while not found or found[-1][0] != "Z":
        said = await client.receive()
        found.append((said.type, said.body))
    return found


def types(found: list[tuple[str, bytes]]) -> str:
    return "".join(kind for kind, _ in found)


async def test_show_answers_for_the_whole_fleet() -> None:
    async with console(Fleet()) as port:
        def work(connection: psycopg.Connection[Any]) -> list[dict[str, Any]]:
            cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
            return cursor.execute("show pools;").fetchall()

        (row,) = await with_psycopg(port, work)
        assert (row["database"], row["cl_active"], row["maxwait_us"]) == ("orders", 4, 5)
        assert row["worker"] == "w0,w1"


async def test_show_can_answer_worker_by_worker() -> None:
    async with console(Fleet()) as port:
        rows = await with_psycopg(port, lambda c: c.execute("SHOW POOLS WORKERS").fetchall())
        assert [row[-1] for row in rows] == ["w0", "w1"]


async def test_psycopg_works_without_autocommit_and_with_prepared_statements() -> None:
    """R60."""
    async with console(Fleet()) as port:
        def work(connection: psycopg.Connection[Any]) -> list[Any]:
            rows = [connection.execute("SHOW STATS", prepare=True).fetchall() for _ in range(2)]
            connection.commit()
            return rows

        first, second = await with_psycopg(port, work, autocommit=False)
        assert first == second
        assert first[0][2] == 2 * 10**12


async def test_psycopg_reads_binary_results() -> None:
    async with console(Fleet()) as port:
        def work(connection: psycopg.Connection[Any]) -> Any:
            with connection.cursor(binary=True) as cursor:
                return cursor.execute("SHOW STATS").fetchone()

        row = await with_psycopg(port, work)
        assert row[:3] == ("orders", None, 2 * 10**12)


async def test_asyncpg_works() -> None:
    """R60."""
    async with console(Fleet()) as port:
        async def work() -> tuple[Any, Any, str]:
            connection = await asyncpg.connect(
                host="127.0.0.1", port=port, user="admin", database="pgbouncer", ssl=False)
            try:
                row = await connection.fetchrow("SHOW POOLS")
                stats = await connection.fetchval("SHOW STATS", column=2)
                return dict(row), stats, await connection.execute("PAUSE orders")
            finally:
                await connection.close()

        row, stats, tag = await trio.to_thread.run_sync(asyncio.run, work())
        assert (row["cl_active"], row["worker"]) == (4, "w0,w1")
        assert stats == 2 * 10**12
        assert tag == "PAUSE"


async def test_an_error_keeps_the_session_and_names_the_nearest() -> None:
    """R60."""
    async with console(Fleet()) as port:
        def work(connection: psycopg.Connection[Any]) -> tuple[str, Any]:
            with pytest.raises(psycopg.errors.SyntaxError) as caught:
                connection.execute("SHOW POLS")
            return str(caught.value.diag.message_hint), connection.execute("SELECT 1").fetchone()

        assert await with_psycopg(port, work) == ("Did you mean SHOW POOLS?", (1,))


async def test_what_the_fleet_cannot_answer_is_an_error_and_no_end() -> None:
    fleet = Fleet()
    fleet.unreachable = True
    async with console(fleet) as port:
        def work(connection: psycopg.Connection[Any]) -> str:
            with pytest.raises(psycopg.Error) as caught:
                connection.execute("SHOW POOLS")
            connection.execute("SHOW VERSION")
            return str(caught.value)

        assert "no coordinator answers" in await with_psycopg(port, work)


async def test_a_command_goes_to_the_fleet_and_is_logged_with_who_and_from_where() -> None:
    fleet = Fleet()
    with structlog.testing.capture_logs() as logs:
        async with console(fleet) as port:
            await with_psycopg(port, lambda c: c.execute("KILL orders"))
    assert fleet.commands == [("kill", {"database": "orders"})]
    (line,) = [line for line in logs if line["event"] == "command_issued"]
    assert (line["user"], line["address"], line["command"], line["database"]) == (
        "admin", "127.0.0.1", "kill", "orders")


async def test_a_value_that_is_set_is_not_logged() -> None:
    fleet = Fleet()
    with structlog.testing.capture_logs() as logs:
        async with console(fleet) as port:
            await with_psycopg(port, lambda c: c.execute("SET auth_query = 'hunter2'"))
    assert fleet.commands == [("set", {"key": "auth_query", "value": "hunter2"})]
    assert "hunter2" not in str(logs)


async def test_workers_that_failed_or_kept_silent_are_named() -> None:
    fleet = Fleet()
    fleet.result = CommandResult(done=["w0"], failed={"w1": "is draining"}, missing=["w2"])
    async with console(fleet) as port:
        def work(connection: psycopg.Connection[Any]) -> str:
            with pytest.raises(psycopg.Error) as caught:
                connection.execute("PAUSE")
            return str(caught.value.diag.message_detail)

        assert await with_psycopg(port, work) == "w1: is draining; w2: no answer; done by w0"


async def test_a_reason_that_all_workers_share_is_the_error() -> None:
    fleet = Fleet()
    fleet.result = CommandResult(done=[], failed={"w0": "no such database: x", "w1": "no such database: x"})
    async with console(fleet) as port, raw(port) as client:
        found = await answers(client, messages.query("kill x"))
        assert types(found) == "EZ"
        assert b"Mno such database: x\0" in found[0][1]
        assert b"C08P01\0" in found[0][1]


async def test_a_stats_user_may_show_and_nothing_else() -> None:
    """R84."""
    fleet = Fleet()
    async with console(fleet, STATS) as port:
        def work(connection: psycopg.Connection[Any]) -> None:
            connection.execute("SHOW POOLS")
            connection.execute("SET extra_float_digits = 3")
            for command in ("PAUSE", "RESUME", "SUSPEND", "RELOAD", "RECONNECT", "KILL db", "KILL_CLIENT 1",
                            "DISABLE db", "ENABLE db", "WAIT_CLOSE", "SET pool_mode = session", "SHUTDOWN"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(command)

        await with_psycopg(port, work)
    assert fleet.commands == []


async def test_several_statements_stop_at_the_first_error() -> None:
    async with console(Fleet()) as port, raw(port) as client:
        assert types(await answers(client, messages.query("show version; show x; show version"))) == "TDCEZ"
        assert types(await answers(client, messages.query("show version; show state"))) == "TDCTCZ"
        assert types(await answers(client, messages.query(" ; "))) == "IZ"


async def test_help_is_a_notice() -> None:
    async with console(Fleet()) as port, raw(port) as client:
        assert types(await answers(client, messages.query("show help"))) == "NCZ"


async def test_an_extended_error_skips_to_sync_and_sends_one_ready() -> None:
    """R60."""
    async with console(Fleet()) as port, raw(port) as client:
        found = await answers(
            client, messages.parse("", "show pols"), messages.bind("", ""), messages.execute(), messages.SYNC)
        assert types(found) == "EZ"
        again = await answers(
            client, messages.parse("a", "show version"), messages.describe(b"S", "a"), messages.bind("", "a"),
            messages.describe(b"P", ""), messages.execute(), messages.close(b"S", "a"), messages.SYNC)
        assert types(again) == "1tT2TDC3Z"
        assert types(await answers(client, messages.bind("", "a"), messages.SYNC)) == "EZ"


async def test_rows_can_be_had_in_portions() -> None:
    async with console(Fleet()) as port, raw(port) as client:
        found = await answers(
            client, messages.parse("", "show ledger"), messages.bind("", ""), messages.execute("", 1),
            messages.execute("", 1), messages.SYNC)
        assert types(found) == "12DsDCZ"


async def test_the_ledger_can_be_narrowed_to_one_database() -> None:
    async with console(Fleet()) as port:
        rows = await with_psycopg(port, lambda c: c.execute("SHOW LEDGER a").fetchall())
        assert [row[0] for row in rows] == ["a"]


async def test_a_begun_block_is_shown_in_the_status() -> None:
    async with console(Fleet()) as port, raw(port) as client:
        assert (await answers(client, messages.query("begin")))[-1] == ("Z", b"T")
        assert (await answers(client, messages.query("show x")))[-1] == ("Z", b"T")
        assert (await answers(client, messages.query("commit")))[-1] == ("Z", b"I")


@pytest.mark.parametrize(
    "broken", [messages.message(b"Q", b"no end"), messages.message(b"d", b"x"), b"Q\0\0\0\0", b"Q\x7f\0\0\0",
               messages.message(b"D", b"xa\0"), messages.message(b"B", b"\0\0\0\x01")])
async def test_a_broken_message_ends_the_session_with_a_fatal_error(broken: bytes) -> None:
    async with console(Fleet()) as port, raw(port) as client:
        await answers(client, messages.parse("", "show version"), messages.SYNC)
        await client.send(broken)
        said = await client.receive()
        assert said.type == "E"
        assert b"VFATAL\0C08P01\0" in said.body
        assert await client.stream.receive_some() == b""


async def test_terminate_ends_the_session_at_once() -> None:
    async with console(Fleet()) as port, raw(port) as client:
        await client.send(messages.TERMINATE + messages.query("show version"))
        assert await client.stream.receive_some() == b""


async def test_a_user_that_leaves_ends_the_wait_of_its_command() -> None:
    fleet = Fleet()
    fleet.waits = True
    async with console(fleet) as port:
        async with raw(port) as client:
            await client.send(messages.query("PAUSE") + messages.query("SHOW VERSION"))
            await fleet.waiting.wait()
        await fleet.wait_ended.wait()


async def test_a_reset_connection_ends_the_wait_of_its_command() -> None:
    fleet = Fleet()
    fleet.waits = True
    async with console(fleet) as port:
        async with raw(port) as client:
            await client.send(messages.query("PAUSE"))
            await fleet.waiting.wait()
            assert isinstance(client.stream, trio.SocketStream)
            client.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await fleet.wait_ended.wait()


async def test_a_cancel_request_ends_the_wait_and_what_was_sent_meanwhile_is_answered() -> None:
    fleet = Fleet()
    fleet.waits = True
    async with console(fleet) as port, raw(port) as client:
        await client.send(messages.query("PAUSE"))
        await fleet.waiting.wait()
        await client.send(messages.query("SHOW VERSION"))
        fleet.interrupt.cancel()
        first = await answers(client)
        assert types(first) == "EZ"
        assert b"C57014\0" in first[0][1]
        assert types(await answers(client)) == "TDCZ"
        fleet.interrupt.cancel()  # of a command that is over: nothing
        fleet.waits = False
        assert types(await answers(client, messages.query("RESUME"))) == "CZ"


async def test_what_must_be_known_of_a_command_is_a_notice_before_its_tag() -> None:
    fleet = Fleet()
    fleet.result = CommandResult(done=["supervisor"], notices=["http changed", "etcd changed"])
    async with console(fleet) as port, raw(port) as client:
        found = await answers(client, messages.query("RELOAD"))
        assert types(found) == "NNCZ"
        assert b"Mhttp changed\0" in found[0][1]
