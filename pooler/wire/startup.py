"""The first packets of a connection: what a peer asks for before anything is known about it.

Source: PostgreSQL documentation, "Start-up" and "Message Formats"; options as in the server's
pg_split_opts and ParseLongOption. Pure: bytes in, a request or ProtocolViolation or LoginRefused out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pooler.errors import LoginRefused, ProtocolViolation
from pooler.wire import sqlstate
from pooler.wire.cancel_keys import KEY_BYTES_MAX
from pooler.wire.frames import STARTUP_BYTES_MAX
from pooler.wire.messages import (
    CANCEL_CODE,
    GSSENC_CODE,
    PROTOCOL_MAJOR,
    SSL_CODE,
    shown,
    split_cstring,
    text,
)

MINOR_MAX = 2  # protocol 3.2, PostgreSQL 18
_PROTOCOL_OPTION = "_pq_."
_TRUE_WORDS = ("true", "yes", "on", "1")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*(?:\.[A-Za-z_][A-Za-z0-9_$]*)*")
_DIGITS = re.compile(rb"\d{1,9}")
_FALSE_WORDS = ("false", "no", "off", "0")


class NoPacket(ProtocolViolation):
    """What came cannot begin a connection: its sender may not speak the protocol, and is told nothing, as
    by PostgreSQL."""


class Encryption(StrEnum):
    """A request to encrypt the connection."""

    SSL = "SSL"
    GSS = "GSSAPI"


class Replication(StrEnum):
    """Whether the client wants a walsender."""

    NONE = ""
    PHYSICAL = "physical"
    LOGICAL = "database"


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """A CancelRequest: `key` is process id and secret as in BackendKeyData."""

    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class StartupAsked:
    """A startup packet: `minor` is the version to be spoken, `unknown_options` the `_pq_.` names not served,
    `must_negotiate` whether the client has to be told. `database` is the user where none was named;
    `options` as it came: see `settings_of`."""

    user: str
    database: str
    minor: int
    parameters: Mapping[str, str]
    options: str
    replication: Replication
    unknown_options: tuple[str, ...]
    must_negotiate: bool


FirstPacket = Encryption | CancelAsked | StartupAsked


def read_first_packet(buffer: bytes | bytearray) -> tuple[FirstPacket, int] | None:
    """What the untyped packet at the start of `buffer` asks for and how many bytes it took; None when more
    bytes are needed.

    Raises NoPacket for a bad length, ProtocolViolation for a broken packet, LoginRefused for a startup packet
    that is well formed and cannot be served.
    """
    if len(buffer) < 4:
        return None
    size = int.from_bytes(buffer[:4], "big")
    if not 8 <= size <= STARTUP_BYTES_MAX:
        raise NoPacket("invalid length of startup packet")
    if len(buffer) < size:
        return None
    code = int.from_bytes(buffer[4:8], "big")
    return _read_packet(code, bytes(buffer[8:size])), size


def _read_packet(code: int, body: bytes) -> FirstPacket:
    if code in (SSL_CODE, GSSENC_CODE):
        if body:
            raise ProtocolViolation("invalid length of an encryption request")
        return Encryption.SSL if code == SSL_CODE else Encryption.GSS
    if code == CANCEL_CODE:
        if not 8 <= len(body) <= KEY_BYTES_MAX:
            raise NoPacket("invalid length of cancel request")
        return CancelAsked(body)
    if code >> 16 != PROTOCOL_MAJOR:
        raise LoginRefused(
            f"unsupported frontend protocol {code >> 16}.{code & 0xFFFF}: this server supports 3.0 to "
            f"3.{MINOR_MAX}", sqlstate.FEATURE_NOT_SUPPORTED)
    return _read_startup(code & 0xFFFF, _read_pairs(body))


def _read_pairs(body: bytes) -> dict[str, str]:
    pairs: dict[str, str] = {}
    at = 0
    while at < len(body) and body[at]:
        name, at = split_cstring(body, at)
        value, at = split_cstring(body, at)
        pairs[shown(name)] = shown(value)
    if at != len(body) - 1:
        raise ProtocolViolation("invalid startup packet layout: expected terminator as last byte")
    return pairs


def _read_startup(minor: int, pairs: dict[str, str]) -> StartupAsked:
    unknown = tuple(name for name in pairs if name.startswith(_PROTOCOL_OPTION))
    named = {name: value for name, value in pairs.items() if name not in unknown}
    user = named.pop("user", "")
    if not user:
        raise LoginRefused("no PostgreSQL user name specified in startup packet")
    replication = read_replication(named.pop("replication", ""))
    return StartupAsked(
        user=user, database=named.pop("database", "") or user, minor=min(minor, MINOR_MAX),
        options=named.pop("options", ""), parameters=named, replication=replication,
        unknown_options=unknown, must_negotiate=minor > MINOR_MAX or bool(unknown),
    )


def read_replication(value: str) -> Replication:
    """The `replication` parameter: a boolean as the server spells them (any clear beginning), or
    `database`. Raises LoginRefused."""
    lowered = value.strip().lower()
    if lowered == "database":
        return Replication.LOGICAL
    if not lowered or _begins(lowered, _FALSE_WORDS):
        return Replication.NONE
    if _begins(lowered, _TRUE_WORDS):
        return Replication.PHYSICAL
    raise LoginRefused(
        f'invalid value for parameter "replication": "{value}"', sqlstate.INVALID_PARAMETER_VALUE)


def _begins(value: str, words: tuple[str, ...]) -> bool:
    return value != "o" and any(word.startswith(value) for word in words)


def split_options(options: str) -> list[str]:
    """The words of an `options` parameter: split at white space, a backslash takes the next character as
    it is."""
    words: list[str] = []
    word: str | None = None
    characters = iter(options)
    for character in characters:
        if character in " \t\n\r\f\v":
            if word is not None:
                words.append(word)
            word = None
        else:
            word = (word or "") + (next(characters, "") if character == "\\" else character)
    if word is not None:
        words.append(word)
    return words


def read_options(options: str) -> dict[str, str]:
    """The settings in an `options` parameter: `-c name=value`, `-cname=value` and `--name=value`.

    Raises LoginRefused for other switches of the server, which a shared session cannot honour.
    """
    settings: dict[str, str] = {}
    words = iter(split_options(options))
    for word in words:
        if word.startswith("--") and len(word) > 2:
            dash, setting = "--", word[2:]
        elif word.startswith("-c"):
            dash, setting = "-c ", word[2:] or next(words, "")
        else:
            raise LoginRefused(
                f'unsupported switch "{word}" in startup parameter "options": only -c name=value and '
                "--name=value can be used", sqlstate.FEATURE_NOT_SUPPORTED)
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise LoginRefused(f"{dash}{setting} requires a value", sqlstate.SYNTAX_ERROR)
        name = name.replace("-", "_")
        settings.pop(name, None)  # of two in other letters the last one counts, too
        settings[name] = value
    return settings


def settings_of(
    options: str, parameters: Mapping[str, str], *, ignored: Collection[str], kept: Collection[str]
) -> dict[bytes, bytes]:
    """What a client's start sets; what stands in the packet by its own name counts more than `options`.

    `ignored`: the names, in lower case, of ignore_startup_parameters; they are left out, but those that are
    `kept` (in lower case, too), as PgBouncer does. `options` among them: what `options` has, apart from
    those, and what of it cannot be read. Raises LoginRefused as the server does for a name.
    """
    by_options = "options" in ignored
    try:
        first = read_options(options)
    except LoginRefused:
        if not by_options:
            raise
        first = {}
    if by_options:
        first = {name: value for name, value in first.items() if name.lower() in kept}
    settings = {name: value for name, value in (first | dict(parameters)).items()
                if name.lower() not in ignored or name.lower() in kept}
    for name in settings:
        _check_name(name)
    return {text(name): text(value) for name, value in settings.items()}


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        if "." in name:
            raise LoginRefused(
                f'invalid configuration parameter name "{name}"', sqlstate.INVALID_NAME,
                "Custom parameter names must be two or more simple identifiers separated by dots.")
        raise LoginRefused(
            f'unrecognized configuration parameter "{name}"', sqlstate.UNDEFINED_OBJECT)


def clean_ascii(value: bytes, server_version: bytes) -> bytes:
    """A name as servers keep it (application_name): what is not printable ASCII is `?`, and from 16 on
    its code."""
    major = _DIGITS.match(server_version)
    shows_code = major is not None and int(major[0]) >= 16
    return b"".join(
        bytes((each,)) if 32 <= each <= 126 else b"\\x%02x" % each if shows_code else b"?"
        for each in value)
