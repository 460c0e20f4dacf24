"""First packets: every variant a client sends, and what must be refused before anything is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.errors import LoginRefused, PoolerError, ProtocolViolation
from pooler.wire import messages, startup
from pooler.wire.startup import CancelAsked, Encryption, Replication, StartupAsked


def read(packet: bytes) -> object:
    found = startup.read_first_packet(packet)
    assert found is not None
    assert found[1] == len(packet)
    return found[0]


def asked(parameters: dict[str, str], minor: int = 0) -> StartupAsked:
    result = read(messages.startup(parameters, minor=minor))
    assert isinstance(result, StartupAsked)
    return result


PACKETS = [
    messages.SSL_REQUEST,
    messages.GSSENC_REQUEST,
    messages.cancel_request(b"k" * 8),
    messages.cancel_request(b"k" * 260),
    messages.startup({"user": "u", "database": "d"}),
]


@pytest.mark.parametrize("packet", PACKETS, ids=["ssl", "gss", "cancel", "long cancel", "startup"])
def test_a_packet_is_not_read_before_its_last_byte_and_never_beyond(packet: bytes) -> None:
    for cut in range(len(packet)):
        assert startup.read_first_packet(packet[:cut]) is None
    found = startup.read_first_packet(packet + b"more")
    assert found is not None
    assert found[1] == len(packet)


def test_requests_that_are_not_logins() -> None:
    assert read(messages.SSL_REQUEST) is Encryption.SSL
    assert read(messages.GSSENC_REQUEST) is Encryption.GSS
    assert read(messages.cancel_request(b"12345678")) == CancelAsked(b"12345678")
    assert "1234" not in repr(CancelAsked(b"12345678"))


def test_the_database_is_the_user_where_none_is_named() -> None:
    got = asked({"user": "ann", "application_name": "x", "extra_float_digits": "3"})
    assert (got.user, got.database) == ("ann", "ann")
    assert got.parameters == {"application_name": "x", "extra_float_digits": "3"}
    assert not got.must_negotiate


@pytest.mark.parametrize(
    ("minor", "spoken", "told"), [(0, 0, False), (2, 2, False), (3, 2, True), (9999, 2, True)])
def test_a_newer_minor_version_is_negotiated_down(minor: int, spoken: int, told: bool) -> None:
    got = asked({"user": "u"}, minor)
    assert (got.minor, got.must_negotiate) == (spoken, told)


def test_unknown_protocol_options_are_named_and_not_taken_for_settings() -> None:
    got = asked({"user": "u", "_pq_.foo": "1"})
    assert (got.unknown_options, got.must_negotiate, got.parameters) == (("_pq_.foo",), True, {})


@pytest.mark.parametrize("version", [2 << 16, 4 << 16, 1234 << 16])
def test_other_major_versions_are_refused(version: int) -> None:
    with pytest.raises(LoginRefused, match="unsupported frontend protocol"):
        startup.read_first_packet(b"\0\0\0\x09" + version.to_bytes(4, "big") + b"\0")


RUBBISH = [
    b"\0" * 8,
    b"\0\0\0\x07aaa",
    (10_001).to_bytes(4, "big"),
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01",  # a TLS hello
    b"\xff\xff\xff\xff",
    b"\0\0\0\x09\x04\xd2\x16\x2fx",  # an SSLRequest with a body
    b"\0\0\0\x0c\x04\xd2\x16\x2e1234",  # a cancel key of 4 bytes
    messages.cancel_request(b"k" * 261),
    b"\0\0\0\x08\0\x03\0\0",  # no terminator
    b"\0\0\0\x0e\0\x03\0\0user\0u",  # unterminated value
    b"\0\0\0\x11\0\x03\0\0user\0u\0\0x",  # bytes after the terminator
]


@pytest.mark.parametrize("packet", RUBBISH)
def test_rubbish_is_a_violation(packet: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        startup.read_first_packet(packet)


@given(st.binary(max_size=80))
def test_garbage_is_a_request_more_or_an_outcome(data: bytes) -> None:
    for packet in (data, (len(data) + 8).to_bytes(4, "big") + b"\0\x03\0\0" + data):
        try:
            startup.read_first_packet(packet)
        except PoolerError:
            continue


def test_a_login_without_a_user_is_refused() -> None:
    with pytest.raises(LoginRefused, match="no PostgreSQL user name"):
        startup.read_first_packet(messages.startup({"database": "d"}))


OPTIONS = [
    ("-c a=b", {"a": "b"}),
    ("-ca=b  --work-mem=4MB\t-c x.y=", {"a": "b", "work_mem": "4MB", "x.y": ""}),
    (r"-c search_path=a\ b\\c", {"search_path": r"a b\c"}),
    (r"--a=\-c\ b=c", {"a": "-c b=c"}),
    ("-c a=b=c -c a=d", {"a": "d"}),
    ("-c Ab=1 -c aB=2 -c Ab=3", {"aB": "2", "Ab": "3"}),
    ("", {}),
]


@pytest.mark.parametrize(("options", "settings"), OPTIONS)
def test_options_are_split_as_the_server_splits_them(options: str, settings: dict[str, str]) -> None:
    assert startup.read_options(options) == settings


@pytest.mark.parametrize(
    ("options", "code"),
    [("-d 5", "0A000"), ("a=b", "0A000"), ("--", "0A000"), ("-c a", "42601"), ("-c", "42601"),
     ("--=x", "42601")])
def test_options_that_cannot_be_honoured_are_refused(options: str, code: str) -> None:
    with pytest.raises(LoginRefused) as refused:
        startup.read_options(options)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", Replication.NONE), ("off", Replication.NONE), ("0", Replication.NONE), ("f", Replication.NONE),
     ("true", Replication.PHYSICAL), ("YES", Replication.PHYSICAL), ("on", Replication.PHYSICAL),
     ("1", Replication.PHYSICAL), ("database", Replication.LOGICAL)])
def test_replication_as_the_server_reads_it(value: str, expected: Replication) -> None:
    assert startup.read_replication(value) is expected


@pytest.mark.parametrize("value", ["o", "maybe", "2"])
def test_an_unclear_replication_is_refused(value: str) -> None:
    with pytest.raises(LoginRefused) as refused:
        startup.read_replication(value)
    assert refused.value.code == "22023"


def settings(options: str = "", ignored: tuple[str, ...] = (), **parameters: str) -> dict[str, str]:
    found = startup.settings_of(options, parameters, ignored=ignored, kept=("datestyle", "application_name"))
    return {name.decode(): value.decode() for name, value in found.items()}


def test_what_the_packet_names_itself_counts_more_than_options() -> None:
    assert settings("-c a=1 -c b=2", b="3") == {"a": "1", "b": "3"}


def test_ignored_start_parameters_are_left_out_and_those_that_follow_a_client_are_not() -> None:
    given = {"extra_float_digits": "2", "DateStyle": "ISO", "work_mem": "1MB"}
    assert settings("", ("extra_float_digits", "datestyle"), **given) == {
        "DateStyle": "ISO", "work_mem": "1MB"}
    assert settings("-c Work_mem=1 -c geqo=off", ("work_mem",)) == {"geqo": "off"}


def test_ignored_options_take_along_what_in_them_follows_no_client_or_cannot_be_read() -> None:
    assert settings("-c datestyle=ISO -c geqo=off", ("options",), jit="off") == {
        "datestyle": "ISO", "jit": "off"}
    assert settings("-d 5", ("options",), jit="off") == {"jit": "off"}
    with pytest.raises(LoginRefused, match="unsupported switch"):
        settings("-d 5")


@pytest.mark.parametrize(("name", "code", "message"), [
    ("+search_path", "42704", 'unrecognized configuration parameter "+search_path"'),
    ("1a.b", "42602", 'invalid configuration parameter name "1a.b"'),
    ("a.b;x", "42602", 'invalid configuration parameter name "a.b;x"'),
])
def test_what_cannot_be_a_name_is_refused_in_the_servers_words(name: str, code: str, message: str) -> None:
    with pytest.raises(LoginRefused) as refused:
        settings(f"-c{name}=1")
    assert (str(refused.value), refused.value.code) == (message, code)


@pytest.mark.parametrize(("version", "kept"), [
    (b"15.3 (Debian)", b"a ?? b"), (b"16beta1", b"a \\xc3\\xa9 b"), (b"", b"a ?? b")])
def test_an_application_name_is_kept_in_ascii(version: bytes, kept: bytes) -> None:
    assert startup.clean_ascii("a é b".encode(), version) == kept
