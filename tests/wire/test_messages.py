"""Messages as bytes, both directions, against bytes written down by hand from the protocol's description."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.errors import ProtocolViolation
from pooler.wire import messages
from pooler.wire.frames import FrameReader
from pooler.wire.messages import Column, Fault

CASES: list[tuple[bytes, bytes]] = [
    (messages.AUTHENTICATION_OK, b"R\0\0\0\x08\0\0\0\0"),
    (messages.AUTHENTICATION_CLEARTEXT, b"R\0\0\0\x08\0\0\0\x03"),
    (messages.authentication_md5(b"salt"), b"R\0\0\0\x0c\0\0\0\x05salt"),
    (messages.authentication_sasl(["SCRAM-SHA-256"]), b"R\0\0\0\x17\0\0\0\x0aSCRAM-SHA-256\0\0"),
    (messages.authentication_sasl_continue(b"r=x"), b"R\0\0\0\x0b\0\0\0\x0br=x"),
    (messages.authentication_sasl_final(b"v=x"), b"R\0\0\0\x0b\0\0\0\x0cv=x"),
    (messages.negotiate_protocol_version(2, ["_pq_.a"]), b"v\0\0\0\x13\0\x03\0\x02\0\0\0\x01_pq_.a\0"),
    (messages.parameter_status("a", "b"), b"S\0\0\0\x08a\0b\0"),
    (messages.backend_key_data(b"\0\0\0\x07" + b"k" * 32), b"K\0\0\0\x28\0\0\0\x07" + b"k" * 32),
    (messages.ready_for_query(), b"Z\0\0\0\x05I"),
    (messages.error_response(Fault("FATAL", "28P01", "no", "d", "h")),
     b"E\0\0\0\x2cSFATAL\0VFATAL\0C28P01\0Mno\0Dd\0Hh\0Rpooler\0\0"),
    (messages.notice_response(Fault("NOTICE", "00000", "n")),
     b"N\0\0\0\x27SNOTICE\0VNOTICE\0C00000\0Mn\0Rpooler\0\0"),
    (messages.row_description([messages.int8_column("n")]),
     b"T\0\0\0\x1a\0\x01n\0\0\0\0\0\0\0\0\0\0\x14\0\x08\xff\xff\xff\xff\0\0"),
    (messages.data_row(["ab", None, 12]),
     b"D\0\0\0\x16\0\x03\0\0\0\x02ab\xff\xff\xff\xff\0\0\0\x0212"),
    (messages.command_complete("SHOW"), b"C\0\0\0\x09SHOW\0"),
    (messages.password(b"pw"), b"p\0\0\0\x07pw\0"),
    (messages.sasl_initial_response("M", b"data"), b"p\0\0\0\x0eM\0\0\0\0\x04data"),
    (messages.sasl_response(b"x"), b"p\0\0\0\x05x"),
    (messages.query("SELECT 1"), b"Q\0\0\0\x0dSELECT 1\0"),
    (messages.parse("s", "q", [23]), b"P\0\0\0\x0es\0q\0\0\x01\0\0\0\x17"),
    (messages.bind("", "s", [b"1", None]),
     b"B\0\0\0\x16\0s\0\0\0\0\x02\0\0\0\x011\xff\xff\xff\xff\0\0"),
    (messages.describe(b"S", "s"), b"D\0\0\0\x07Ss\0"),
    (messages.close(b"P", ""), b"C\0\0\0\x06P\0"),
    (messages.execute(), b"E\0\0\0\x09\0\0\0\0\0"),
    (messages.SYNC, b"S\0\0\0\x04"),
    (messages.TERMINATE, b"X\0\0\0\x04"),
]


@pytest.mark.parametrize(("built", "expected"), CASES, ids=[str(i) for i in range(len(CASES))])
def test_a_message_is_these_bytes_and_one_frame_at_every_split(built: bytes, expected: bytes) -> None:
    assert built == expected
    for cut in range(len(built) + 1):
        reader = FrameReader()
        reader.feed(built[:cut])
        frames = list(reader)
        reader.feed(built[cut:] + b"Z")
        frames += list(reader)
        assert frames == [(built[:1], built[5:])]
        assert reader.take_rest() == b"Z"


def test_untyped_packets_are_these_bytes() -> None:
    assert messages.startup({"user": "u"}, minor=2) == b"\0\0\0\x10\0\x03\0\x02user\0u\0\0"
    assert messages.SSL_REQUEST == b"\0\0\0\x08\x04\xd2\x16\x2f"
    assert messages.GSSENC_REQUEST == b"\0\0\0\x08\x04\xd2\x16\x30"
    assert messages.cancel_request(b"12345678") == b"\0\0\0\x10\x04\xd2\x16\x2e12345678"


def test_an_error_reads_back_as_it_was_said() -> None:
    fault = Fault("FATAL", "53300", "full", "why", "wait")
    assert messages.read_fault(messages.error_response(fault)[5:]) == fault


def test_the_untranslated_severity_wins_and_unknown_fields_are_kept() -> None:
    body = b"SSCHWERWIEGEND\0VFATAL\0C57P01\0Mweg\0zq\0\0"
    assert messages.read_fault(body).severity == "FATAL"
    assert messages.read_fields(body)[b"z"] == b"q"


def test_a_zero_byte_cannot_be_smuggled_into_a_string() -> None:
    with pytest.raises(ValueError, match="zero byte"):
        messages.query("SELECT 1\0; DROP")
    assert b"a?b" in messages.error_response(Fault("FATAL", "28000", "a\0b"))


def test_rows_and_their_description_read_back() -> None:
    columns = [messages.text_column("t"), messages.int4_column("i"), messages.numeric_column("n")]
    assert messages.read_row_description(messages.row_description(columns)[5:]) == columns
    assert columns[2] == Column("n", 1700, -1)
    assert messages.read_data_row(messages.data_row([b"\xff", None, ""])[5:]) == [b"\xff", None, b""]


def test_a_key_and_a_parameter_read_back() -> None:
    assert messages.read_backend_key_data(b"\0\0\0\x05" + b"s" * 256) == (5, b"s" * 256)
    assert messages.read_parameter_status(b"TimeZone\0UTC\0") == (b"TimeZone", b"UTC")


def test_text_that_is_not_utf8_passes_unchanged() -> None:
    assert messages.text(messages.shown(b"caf\xe9")) == b"caf\xe9"


READERS: list[Callable[[bytes], Any]] = [
    messages.read_fields, messages.read_fault, messages.read_parameter_status,
    messages.read_backend_key_data, messages.read_row_description, messages.read_data_row,
]


@given(st.sampled_from(READERS), st.binary(max_size=64))
def test_garbage_is_read_or_a_violation_and_nothing_else(reader: Callable[[bytes], Any], body: bytes) -> None:
    try:
        reader(body)
    except ProtocolViolation:
        return


@pytest.mark.parametrize(
    "body", [b"\0\x01\0\0\0\x05abc", b"\0\x01\xff\xff\xff\xfe", b"\xff\xff", b"\0\0x", b"\0"])
def test_a_row_whose_lengths_lie_is_a_violation(body: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        messages.read_data_row(body)
