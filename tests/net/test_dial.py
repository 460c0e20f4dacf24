"""A login to a scripted server: what each way of failing says about a session, and cancels at every step."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from coordinator.ledger.states import Proof
from pooler.net import connect
from pooler.net.dial import DialFailed, Dialled, Outcome, Progress, Target, dial, hang_up
from pooler.net.stream import RawSocket
from pooler.wire import messages, scram
from pooler.wire.auth import ServerSecret
from pooler.wire.messages import Fault
from tests.net.servers import FULL, GREETING, VERIFIER, WAYS, Script, asking_scram, server_doing
from tests.net.wires import Peer, connected, tcp_pair


async def failure(target: Target, timeout_seconds: float = 5, progress: Progress | None = None) -> DialFailed:
    with pytest.raises(DialFailed) as failed:
        await dial(target, connect_timeout_seconds=timeout_seconds, progress=progress)
    return failed.value


@pytest.mark.parametrize("script", WAYS)
async def test_a_session_opens_by_every_method(script: Script) -> None:
    async with server_doing(script) as target:
        got = await dial(target, connect_timeout_seconds=5)
        assert (got.pid, got.secret_key, got.leftover) == (256, b"k" * 32, b"")
        assert got.cancel_key == b"\0\0\x01\0" + b"k" * 32
        assert got.parameters[b"server_version"] == b"18.1"
        got.sock.close()


async def test_a_clients_own_keys_log_in_where_no_password_is_held() -> None:
    keys = scram.Keys.from_salted(scram.salted_password(b"pw", VERIFIER.salt, VERIFIER.iterations))
    async with server_doing(asking_scram) as target:
        got = await dial(replace(target, secret=ServerSecret(keys=keys)), connect_timeout_seconds=5)
        got.sock.close()


async def test_a_server_that_speaks_one_byte_at_a_time_and_more_than_it_must() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_packet()
        for byte in GREETING + b"A":
            await peer.send(bytes([byte]))
        await peer.stream.receive_some()

    async with server_doing(script) as target:
        got = await dial(target, connect_timeout_seconds=5)
        assert got.pid == 256
        got.sock.close()


async def test_the_startup_packet_has_the_birth_tag_and_is_reported_when_written() -> None:
    seen: list[bytes] = []

    async def script(peer: Peer) -> None:
        seen.append(await peer.read_packet())
        await peer.send(GREETING)
        await peer.stream.receive_some()

    progress, calls = Progress(), []
    async with server_doing(script) as target:
        wanted = replace(
            target, options="-c geqo=off", parameters={"client_encoding": "UTF8"}, protocol_minor=2)
        got = await dial(wanted, connect_timeout_seconds=5, progress=progress,
                         on_startup_sent=lambda: calls.append(progress.startup_sent))
        got.sock.close()
    assert seen == [messages.startup({
        "user": "ann", "database": "db", "application_name": "pooler:tag:m1.2", "options": "-c geqo=off",
        "client_encoding": "UTF8"}, minor=2)]
    assert calls == [True]


async def test_nobody_listening_means_never_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    progress = Progress()
    failed = await failure(Target("127.0.0.1", port, "u", "d", "t"), progress=progress)
    assert (failed.outcome, failed.proof, failed.code) == (Outcome.NEVER_STARTED, Proof.UNUSED, "08006")
    assert not progress.startup_sent
    assert not failed.is_permanent


@pytest.mark.parametrize("host", ["/nonexistent", "no-such-host.invalid"])
async def test_no_such_place_means_never_started(host: str) -> None:
    assert (await failure(Target(host, 5432, "u", "d", "t"))).outcome is Outcome.NEVER_STARTED


async def test_a_connect_that_hangs_means_never_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        failed = await failure(Target("127.0.0.1", port, "u", "d", "t"), 0.05)
        for filler in fillers:
            filler.close()
    assert failed.outcome is Outcome.NEVER_STARTED
    assert "no answer within 0.05 s" in str(failed)


async def test_a_fatal_and_an_orderly_end_mean_ended_with_the_servers_words() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(FULL)

    async with server_doing(script) as target:
        failed = await failure(target)
    assert (failed.outcome, failed.proof, failed.code) == (Outcome.ENDED, Proof.EOF, "53300")
    assert str(failed) == "sorry, too many clients already"
    assert failed.server_error == FULL[5:]


async def test_a_wrong_password_is_permanent_and_ended() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(messages.AUTHENTICATION_CLEARTEXT)
        await peer.frame()
        await peer.send(messages.error_response(Fault("FATAL", "28P01", "password authentication failed")))

    async with server_doing(script) as target:
        failed = await failure(target)
    assert (failed.outcome, failed.is_permanent) == (Outcome.ENDED, True)


async def test_a_postmaster_that_cannot_fork_is_understood() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(b"Ecould not fork new process for connection: Resource temporarily unavailable\n\0")

    async with server_doing(script) as target:
        failed = await failure(target)
    assert (failed.outcome, failed.code) == (Outcome.ENDED, "53300")
    assert str(failed).startswith("could not fork new process")


async def reset(peer: Peer) -> None:
    peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await peer.stream.aclose()


async def closing_without_a_word(peer: Peer) -> None:
    await peer.read_packet()


async def resetting(peer: Peer) -> None:
    await peer.read_packet()
    await reset(peer)


async def resetting_after_fatal(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(FULL)
    await peer.stream.wait_send_all_might_not_block()
    await reset(peer)


async def talking_rubbish(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def greeting_with_rubbish(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(messages.AUTHENTICATION_OK + messages.PARSE_COMPLETE)


async def forging_scram(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(messages.authentication_sasl(["SCRAM-SHA-256"]))
    await peer.frame()
    await peer.send(messages.authentication_sasl_continue(b"r=mine,s=c2FsdA==,i=4096"))
    await peer.stream.receive_some()


async def skipping_scram(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(messages.authentication_sasl(["SCRAM-SHA-256"]))
    await peer.frame()
    await peer.send(GREETING)
    await peer.stream.receive_some()


@pytest.mark.parametrize("script", [
    closing_without_a_word, resetting, talking_rubbish, greeting_with_rubbish, forging_scram, skipping_scram])
async def test_anything_else_after_the_startup_packet_is_silent(script: Script) -> None:
    async with server_doing(script) as target:
        failed = await failure(target)
    assert (failed.outcome, failed.proof, failed.code) == (Outcome.SILENT, None, "08006")


async def test_a_fatal_that_ends_in_a_reset_is_silent() -> None:
    async with server_doing(resetting_after_fatal) as target:
        assert (await failure(target)).outcome is Outcome.SILENT


async def test_no_answer_is_silent_and_the_server_is_reset() -> None:
    ends: list[str] = []

    async def script(peer: Peer) -> None:
        await peer.read_packet()
        try:
            ends.append("end" if not await peer.stream.receive_some() else "data")
        except trio.BrokenResourceError:
            ends.append("reset")

    async with server_doing(script) as target:
        failed = await failure(target, 0.05)
        assert failed.outcome is Outcome.SILENT
        await trio.testing.wait_all_tasks_blocked()
    assert ends == ["reset"]


async def test_a_fatal_without_an_end_keeps_the_servers_words_and_is_silent() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(FULL)
        await peer.stream.receive_some()

    async with server_doing(script) as target:
        failed = await failure(target, 0.05)
    assert (failed.outcome, failed.code) == (Outcome.SILENT, "53300")


@pytest.mark.parametrize("request_", [
    messages.AUTHENTICATION_CLEARTEXT, messages.authentication_md5(b"salt"),
    messages.authentication_sasl(["SCRAM-SHA-256"]), messages.authentication_sasl(["OTHER"]),
    messages.authentication(7)])
@pytest.mark.parametrize("closes", [True, False])
async def test_a_question_that_cannot_be_answered_is_left_in_an_orderly_way(
    request_: bytes, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pooler.net.dial.WITHDRAWAL_SECONDS", 0.05)

    async def script(peer: Peer) -> None:
        await peer.read_packet()
        await peer.send(request_)
        assert (await peer.frame()).kind == b"X"
        if not closes:
            await peer.stream.receive_some()

    async with server_doing(script) as target:
        failed = await failure(replace(target, secret=ServerSecret()))
    assert failed.outcome is (Outcome.ENDED if closes else Outcome.SILENT)
    assert "asks for" in str(failed) or "offers" in str(failed)


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope after a task's n-th step."""

    def __init__(self, steps: int, task: trio.lowlevel.Task, scope: trio.CancelScope) -> None:
        self.left, self.task, self.scope, self.fired = steps, task, scope, False

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task and not self.fired:
            self.left -= 1
            if self.left < 0:
                self.fired = True
                self.scope.cancel()


async def asking_what_nobody_can_answer(peer: Peer) -> None:
    await peer.read_packet()
    await peer.send(messages.authentication(7))
    await peer.frame()


@pytest.mark.parametrize("script", [*WAYS, asking_what_nobody_can_answer])
async def test_cancelled_at_any_step_leaves_no_socket_and_says_how_far_it_came(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []
    real = connect._finish_connect

    async def watched(sock: socket.socket, address: object) -> None:
        made.append(sock)
        await real(sock, address)

    monkeypatch.setattr(connect, "_finish_connect", watched)
    told_before, told_after, outcome = False, False, Outcome.ENDED
    async with server_doing(script) as target:
        for steps in range(200):
            progress, got = Progress(), None
            with trio.CancelScope() as scope:
                instrument = CancelAtStep(steps, trio.lowlevel.current_task(), scope)
                trio.lowlevel.add_instrument(instrument)
                try:
                    got = await dial(target, connect_timeout_seconds=5, progress=progress)
                except DialFailed as failed:
                    outcome = failed.outcome
                    break
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            if got is not None:
                got.sock.close()
                break
            assert instrument.fired
            told_before |= not progress.startup_sent
            told_after |= progress.startup_sent
            assert all(sock.fileno() == -1 for sock in made)
        else:
            pytest.fail("the dial never came to its end")
    assert made
    assert told_before
    assert told_after
    assert outcome is Outcome.ENDED


async def test_hanging_up_is_proof_only_with_an_orderly_end() -> None:
    with connected(tcp_pair) as (raw, peer):
        async with trio.open_nursery() as nursery:
            @nursery.start_soon
            async def server() -> None:
                assert (await peer.frame()).kind == b"X"
                await peer.stream.aclose()
            assert await hang_up(raw, timeout_seconds=5) is Proof.EOF
    with connected(tcp_pair) as (raw, peer):
        assert await hang_up(raw, timeout_seconds=0.05) is None
        await peer.frame()
        with pytest.raises(trio.BrokenResourceError):
            await peer.stream.receive_some()
    with connected(tcp_pair) as (raw, peer):
        await reset(peer)
        assert await hang_up(raw, timeout_seconds=5) is None


async def test_hanging_up_on_who_hung_up_before_is_proof_and_sends_nothing() -> None:
    with connected(tcp_pair) as (raw, peer):
        await peer.stream.send_eof()
        assert await hang_up(raw, timeout_seconds=5) is Proof.EOF
        assert await peer.at_end()


def test_nothing_secret_is_shown() -> None:
    target = Target("h", 1, "u", "d", "t", ServerSecret(plain=b"topsecret"))
    with connected_plain() as raw:
        shown = repr(target) + repr(Dialled(raw, 1, b"topsecret", {}, b""))
        assert "topsecret" not in shown


class connected_plain:  # noqa: N801 - a context manager
    """A raw socket outside a run of trio."""

    def __enter__(self) -> RawSocket:
        self._pair = socket.socketpair()
        return RawSocket(self._pair[0])

    def __exit__(self, *_: object) -> None:
        for sock in self._pair:
            sock.close()
