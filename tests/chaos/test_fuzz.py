"""The short form of the fuzz: hostile bytes end their sender alone."""

from __future__ import annotations

import pytest

from chaos.fuzz import fuzz
from chaos.fuzz_client import made
from chaos.fuzz_relay import fuzz_relay, replay_relay
from chaos.fuzz_run import FULL_AFTER, flat
from chaos.fuzz_said import in_service
from chaos.fuzz_words import Hearing, Nonsense, mark, marks, may_close
from chaos.words import complete, error, message, ready, row
from pooler.demo.etcd import find_etcd
from pooler.demo.postgres import installations
from tests.support.need import missing


def test_an_input_is_made_again_from_its_number() -> None:
    assert [made(3, n) for n in range(50)] == [made(3, n) for n in range(50)]
    assert made(3, 7) != made(4, 7)
    assert [in_service(3, n, b"x") for n in range(50)] == [in_service(3, n, b"x") for n in range(50)]
    assert in_service(3, 7, b"x") != in_service(4, 7, b"x")


def test_a_mark_is_known_again_and_a_spoilt_one_is_none() -> None:
    assert marks(b"a" + mark(17).encode() + b"b" + mark(0).encode()) == {17, 0}
    assert marks(mark(17).encode().replace(b"17", b"16")) == set()


@pytest.mark.parametrize(
    "said", [b"\0\0\0\0\0", b"Z\0\0\0\3", message(b"Z", b"?"), b"D\xff\xff\xff\xff", b"Q\0\0\0\4"])
def test_what_is_no_protocol_is_not_taken_for_it(said: bytes) -> None:
    with pytest.raises(Nonsense):
        Hearing().take(complete("SELECT 1") + said)


def test_anothers_mark_is_noticed() -> None:
    hearing = Hearing()
    hearing.asked.add(1)
    hearing.take(row([mark(1)]) + row([mark(2)]) + ready())
    assert (hearing.strange, hearing.readies) == ({2}, 1)


@pytest.mark.parametrize("odd", [False, True])
def test_what_an_input_to_the_relay_did_is_seen_again_from_its_number(odd: bool) -> None:
    seen = []
    for _ in range(2):
        lines: list[str] = []
        assert replay_relay(1, 803, lines.append, odd=odd) == []
        seen.append(lines)
    assert seen[0] == seen[1]


def test_memory_that_goes_on_growing_is_told_from_caches_that_fill() -> None:
    mib = 1 << 20
    filling, growing = [10, 30, 50, 60, 61, 62, 60, 61], [10, 20, 30, 40, 50, 60, 70, 80]
    leaking = [10, 60, 60, 60, 61, 62, 64, 65]
    for sizes, inputs, held in ((filling, 2 * FULL_AFTER, True), (growing, FULL_AFTER, False),
                                (leaking, 2 * FULL_AFTER, False), (leaking, FULL_AFTER, True)):
        assert flat("who", [size * mib for size in sizes], inputs).held is held


FATAL = error("57P01", "bye", "FATAL")


@pytest.mark.parametrize(("said", "cut", "is_right"), [
    (FATAL, False, True), (row([]) + FATAL, False, True), (b"", False, False), (b"", True, False),
    (row(["x"]), True, False), (row(["x"])[:-1], True, True), (row(["x"])[:-1], False, False),
    (FATAL + ready(), False, False), (error("57P01", "no"), False, False)])
def test_a_client_may_be_closed_behind_a_fatal_or_inside_a_message_that_its_server_broke_off(
    said: bytes, cut: bool, is_right: bool,
) -> None:
    hearing = Hearing()
    hearing.take(said)
    assert may_close(hearing, was_cut=cut) == is_right


@pytest.mark.parametrize("odd", [False, True])
def test_hostile_bytes_to_the_relay_end_their_sender_alone(odd: bool) -> None:
    outcome = fuzz_relay(seed=1, inputs=1_500, odd=odd)
    assert [verdict for verdict in outcome.verdicts if not verdict.held] == []


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.etcd
def test_hostile_bytes_end_their_sender_alone() -> None:
    if not installations() or find_etcd() is None:
        missing("the fuzz needs a PostgreSQL and an etcd")
    outcome = fuzz(seed=1, seconds=5, say=print)
    assert [verdict for verdict in outcome.verdicts if not verdict.held] == []
