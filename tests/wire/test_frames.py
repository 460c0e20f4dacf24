"""Cutting messages out of a stream: the same messages however the bytes arrive, and no way to crash it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.errors import ProtocolViolation
from pooler.wire import messages
from pooler.wire.frames import Frame, FrameReader

STREAM = b"".join([
    messages.AUTHENTICATION_OK,
    messages.parameter_status("client_encoding", "UTF8"),
    messages.backend_key_data(b"\0\0\0\1\0\0\0\2"),
    messages.data_row(["a" * 300, None, 7]),
    messages.ready_for_query(b"T"),
])
WHOLE = [b"R", b"S", b"K", b"D", b"Z"]


def read_in(pieces: list[bytes], reader: FrameReader | None = None) -> list[Frame]:
    reader = reader or FrameReader()
    frames = []
    for piece in pieces:
        reader.feed(piece)
        frames += list(reader)
    return frames


def test_any_split_in_two_gives_the_same_messages() -> None:
    expected = read_in([STREAM])
    assert [frame.kind for frame in expected] == WHOLE
    for cut in range(len(STREAM) + 1):
        assert read_in([STREAM[:cut], STREAM[cut:]]) == expected


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_chunking_gives_the_same_messages(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(edges)]
    assert read_in(pieces) == read_in([STREAM])


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_garbage_gives_messages_or_a_violation_and_nothing_else(pieces: list[bytes]) -> None:
    try:
        frames = read_in(pieces, FrameReader(limit_bytes=100))
    except ProtocolViolation:
        return
    assert all(len(frame.body) <= 96 for frame in frames)


@pytest.mark.parametrize("size", [-1, 0, 3, 0x40000001])
def test_a_bad_length_is_a_violation_before_any_body_is_waited_for(size: int) -> None:
    reader = FrameReader()
    reader.feed(b"Q" + size.to_bytes(4, "big", signed=True))
    with pytest.raises(ProtocolViolation, match="invalid length"):
        reader.next()


def test_the_limit_is_inclusive() -> None:
    reader = FrameReader(limit_bytes=10)
    reader.feed(messages.message(b"p", b"123456") + messages.message(b"p", b"1234567"))
    assert reader.next() == Frame(b"p", b"123456")
    with pytest.raises(ProtocolViolation):
        reader.next()


def test_a_type_that_may_not_come_is_named_at_its_first_byte() -> None:
    reader = FrameReader(allowed=b"pX")
    reader.feed(b"Q")
    with pytest.raises(ProtocolViolation, match="unexpected message type 'Q'"):
        reader.next()
    other = FrameReader(allowed=b"pX")
    other.feed(b"\x16")
    with pytest.raises(ProtocolViolation, match="0x16"):
        other.next()


def test_what_follows_the_last_message_is_kept_for_the_next_reader() -> None:
    reader = FrameReader()
    reader.feed(messages.SYNC + b"Q\0\0")
    assert reader.next() == Frame(b"S", b"")
    assert reader.next() is None
    assert (reader.buffered, reader.take_rest(), reader.buffered) == (3, b"Q\0\0", 0)
