"""Cancel keys: the worker is in them, the rest cannot be guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.wire import cancel_keys


@given(
    st.integers(0, cancel_keys.ORDINAL_MAX), st.binary(min_size=34, max_size=34), st.sampled_from([0, 1, 2]))
def test_the_ordinal_comes_back_and_drivers_see_a_positive_number(
    ordinal: int, random: bytes, minor: int
) -> None:
    key = cancel_keys.make_key(ordinal, random, protocol_minor=minor)
    assert cancel_keys.ordinal_of(key) == ordinal
    assert len(key) == (36 if minor == 2 else 8)
    assert int.from_bytes(key[:4], "big", signed=True) > 0


@given(st.integers(1, (1 << 30) - 1), st.binary(min_size=34, max_size=34), st.sampled_from([0, 1, 2]))
def test_the_process_id_of_a_session_is_told_as_it_is_and_says_nothing_of_the_worker(
    process_id: int, random: bytes, minor: int
) -> None:
    key = cancel_keys.make_key(5, random, protocol_minor=minor, process_id=process_id)
    assert int.from_bytes(key[:4], "big") == process_id
    assert key[4:] == random[2:][: 32 if minor == 2 else 4]
    assert cancel_keys.may_be_anybodys(key)
    assert cancel_keys.ordinal_of(key) is None


@given(st.integers(0, cancel_keys.ORDINAL_MAX), st.binary(min_size=34, max_size=34))
def test_a_made_up_process_id_is_no_sessions(ordinal: int, random: bytes) -> None:
    for process_id in (0, 1 << 30, 1 << 31):
        key = cancel_keys.make_key(ordinal, random, protocol_minor=0, process_id=process_id)
        assert not cancel_keys.may_be_anybodys(key)
        assert not cancel_keys.may_be_anybodys(cancel_keys.forwarded(key, 1))
        assert cancel_keys.ordinal_of(key) == ordinal


def test_every_random_bit_but_one_is_used() -> None:
    base = cancel_keys.make_key(5, bytes(34), protocol_minor=2)
    changed = 0
    for bit in range(34 * 8):
        random = (1 << bit).to_bytes(34, "big")
        changed += cancel_keys.make_key(5, random, protocol_minor=2) != base
    assert changed == 34 * 8 - 1


@pytest.mark.parametrize("key", [b"", b"1234567", b"\xff" * 8, b"k" * 261])
def test_a_key_that_no_worker_made_has_no_ordinal(key: bytes) -> None:
    assert cancel_keys.ordinal_of(key) is None
    assert not cancel_keys.may_be_anybodys(key)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="ordinal"):
        cancel_keys.make_key(32_768, bytes(34), protocol_minor=0)
    with pytest.raises(ValueError, match="random"):
        cancel_keys.make_key(1, bytes(33), protocol_minor=0)


@given(st.binary(min_size=34, max_size=34), st.sampled_from([0, 2]), st.integers(1, 255))
def test_a_key_that_was_passed_on_is_no_clients_and_comes_out_as_it_was(
    random: bytes, minor: int, hops: int
) -> None:
    key = cancel_keys.make_key(700, random, protocol_minor=minor)
    passed = cancel_keys.forwarded(key, hops)
    assert cancel_keys.ordinal_of(passed) is None
    assert cancel_keys.read_forwarded(passed) == (key, hops)
    assert cancel_keys.read_forwarded(key) == (key, 0)


@given(st.binary(min_size=0, max_size=300))
def test_whatever_comes_is_read_as_some_key(key: bytes) -> None:
    read, hops = cancel_keys.read_forwarded(key)
    assert (read == key) or hops == key[-1]
