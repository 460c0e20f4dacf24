"""Every message the pooler says itself, as bytes, and readers for those it must understand.

Source: PostgreSQL documentation, "Message Formats" and "Error and Notice Message Fields". Builders take what
they are given: values of the right shape are the caller's duty. Readers are for bytes of a peer and raise
ProtocolViolation on anything malformed. Pure: no sockets, no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pooler.errors import ProtocolViolation

PROTOCOL_MAJOR = 3
CANCEL_CODE = 80877102
SSL_CODE = 80877103
GSSENC_CODE = 80877104

SOURCE = "pooler"  # the routine field of the pooler's own errors, so that nobody takes them for the server's

_INT16 = struct.Struct("!h")
_INT32 = struct.Struct("!i")
_COLUMN = struct.Struct("!ihihih")


def text(value: str) -> bytes:
    """A name or text as bytes. Bytes that were not UTF-8 when read by `shown` come out unchanged."""
    return value.encode("utf-8", "surrogateescape")


def is_utf8(name: str) -> bool:
    """Whether what `shown` read was UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: bytes) -> str:
    """The inverse of `text`."""
    return value.decode("utf-8", "surrogateescape")


def cstring(value: str | bytes) -> bytes:
    """A zero-terminated string. Raises ValueError if it has a zero byte in it."""
    raw = text(value) if isinstance(value, str) else value
    if 0 in raw:
        raise ValueError("a protocol string may not hold a zero byte")
    return raw + b"\0"


def message(kind: bytes, body: bytes = b"") -> bytes:
    """One typed message."""
    return kind + _INT32.pack(len(body) + 4) + body


# What a server says


def authentication(code: int, extra: bytes = b"") -> bytes:
    """An authentication request: 0 ok, 3 cleartext, 5 MD5 (extra = 4 bytes of salt), 10-12 SASL."""
    return message(b"R", _INT32.pack(code) + extra)


AUTHENTICATION_OK = authentication(0)
AUTHENTICATION_CLEARTEXT = authentication(3)
EMPTY_QUERY_RESPONSE = message(b"I")
PARSE_COMPLETE = message(b"1")
BIND_COMPLETE = message(b"2")
CLOSE_COMPLETE = message(b"3")
NO_DATA = message(b"n")


def authentication_md5(salt: bytes) -> bytes:
    """Ask for md5(md5(password + user) + salt); `salt` is 4 bytes."""
    return authentication(5, salt)


def authentication_sasl(mechanisms: Iterable[str]) -> bytes:
    """Offer SASL mechanisms, the preferred one first."""
    return authentication(10, b"".join(cstring(name) for name in mechanisms) + b"\0")


def authentication_sasl_continue(data: bytes) -> bytes:
    """A step of the SASL exchange."""
    return authentication(11, data)


def authentication_sasl_final(data: bytes) -> bytes:
    """The last step of the SASL exchange; AuthenticationOk follows."""
    return authentication(12, data)


def negotiate_protocol_version(minor: int, unknown_options: Sequence[str]) -> bytes:
    """The newest minor version served, and the `_pq_.` options that are not known here. The version is sent
    whole, major included, as PostgreSQL sends it."""
    version = PROTOCOL_MAJOR << 16 | minor
    names = b"".join(cstring(name) for name in unknown_options)
    return message(b"v", _INT32.pack(version) + _INT32.pack(len(unknown_options)) + names)


def parameter_status(name: str | bytes, value: str | bytes) -> bytes:
    """A parameter's value of now."""
    return message(b"S", cstring(name) + cstring(value))


def backend_key_data(key: bytes) -> bytes:
    """The cancel key: 4 bytes of process id, then the secret (4 bytes, or up to 256 in protocol 3.2)."""
    return message(b"K", key)


def ready_for_query(status: Literal[b"I", b"T", b"E"] = b"I") -> bytes:
    """The server waits for a query; `status` is the transaction's."""
    return message(b"Z", status)


@dataclass(frozen=True, slots=True)
class Fault:
    """An error or a notice: what `error_response` sends and `read_fault` reads."""

    severity: str
    code: str
    message: str
    detail: str = ""
    hint: str = ""


def error_response(fault: Fault, *, kind: Literal[b"E", b"N"] = b"E") -> bytes:
    """An ErrorResponse of the pooler's own (NoticeResponse with kind N), with severity in S and V."""
    fields = [("S", fault.severity), ("V", fault.severity), ("C", fault.code), ("M", fault.message),
              ("D", fault.detail), ("H", fault.hint), ("R", SOURCE)]
    body = b"".join(
        name.encode() + cstring(text(value).replace(b"\0", b"?")) for name, value in fields if value
    )
    return message(kind, body + b"\0")


def notice_response(fault: Fault) -> bytes:
    """A NoticeResponse."""
    return error_response(fault, kind=b"N")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a result. `oid`, `size` are the type's (pg_type)."""

    name: str
    oid: int
    size: int


def text_column(name: str) -> Column:
    """A column of type text."""
    return Column(name, 25, -1)


def int4_column(name: str) -> Column:
    """A column of type int4."""
    return Column(name, 23, 4)


def int8_column(name: str) -> Column:
    """A column of type int8."""
    return Column(name, 20, 8)


def numeric_column(name: str) -> Column:
    """A column of type numeric."""
    return Column(name, 1700, -1)


def row_description(columns: Sequence[Column]) -> bytes:
    """The shape of the rows that follow, all in text format."""
    parts = [_INT16.pack(len(columns))]
    for column in columns:
        parts.append(cstring(column.name) + _COLUMN.pack(0, 0, column.oid, column.size, -1, 0))
    return message(b"T", b"".join(parts))


def data_row(values: Sequence[str | int | bytes | None]) -> bytes:
    """One row in text format; None is NULL."""
    parts = [_INT16.pack(len(values))]
    for value in values:
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            raw = value if isinstance(value, bytes) else text(str(value))
            parts.append(_INT32.pack(len(raw)) + raw)
    return message(b"D", b"".join(parts))


def command_complete(tag: str) -> bytes:
    """The end of one statement."""
    return message(b"C", cstring(tag))


# What a client says


def startup(parameters: Mapping[str, str], *, minor: int = 0) -> bytes:
    """A startup packet of protocol 3.`minor`."""
    pairs = b"".join(cstring(name) + cstring(value) for name, value in parameters.items())
    body = _INT32.pack(PROTOCOL_MAJOR << 16 | minor) + pairs + b"\0"
    return _INT32.pack(len(body) + 4) + body


def cancel_request(key: bytes) -> bytes:
    """Ask for a cancel; `key` as in BackendKeyData."""
    return _INT32.pack(8 + len(key)) + _INT32.pack(CANCEL_CODE) + key


SSL_REQUEST = struct.pack("!ii", 8, SSL_CODE)
GSSENC_REQUEST = struct.pack("!ii", 8, GSSENC_CODE)
SYNC = message(b"S")
FLUSH = message(b"H")
TERMINATE = message(b"X")


def password(value: bytes) -> bytes:
    """A cleartext password or an MD5 answer."""
    return message(b"p", cstring(value))


def sasl_initial_response(mechanism: str, data: bytes) -> bytes:
    """The client's first SASL message."""
    return message(b"p", cstring(mechanism) + _INT32.pack(len(data)) + data)


def sasl_response(data: bytes) -> bytes:
    """A later SASL message."""
    return message(b"p", data)


def query(sql: str | bytes) -> bytes:
    """A simple query."""
    return message(b"Q", cstring(sql))


def parse(name: str, sql: str | bytes, types: Sequence[int] = ()) -> bytes:
    """Prepare a statement; `types` are parameter type oids."""
    oids = b"".join(struct.pack("!I", oid) for oid in types)
    return message(b"P", cstring(name) + cstring(sql) + _INT16.pack(len(types)) + oids)


def bind(portal: str, statement: str, values: Sequence[bytes | None] = ()) -> bytes:
    """Bind text-format values to a statement; results in text format."""
    parts = [cstring(portal), cstring(statement), b"\0\0", _INT16.pack(len(values))]
    for value in values:
        parts.append(b"\xff\xff\xff\xff" if value is None else _INT32.pack(len(value)) + value)
    return message(b"B", b"".join(parts) + b"\0\0")


def describe(kind: Literal[b"S", b"P"], name: str) -> bytes:
    """Describe a statement or a portal."""
    return message(b"D", kind + cstring(name))


def close(kind: Literal[b"S", b"P"], name: str) -> bytes:
    """Close a statement or a portal."""
    return message(b"C", kind + cstring(name))


def execute(portal: str = "", rows_max: int = 0) -> bytes:
    """Run a portal; 0 means all rows."""
    return message(b"E", cstring(portal) + _INT32.pack(rows_max))


# Readers


def split_cstring(data: bytes, start: int = 0) -> tuple[bytes, int]:
    """The zero-terminated string at `start`, and where the next field begins."""
    end = data.find(b"\0", start)
    if end < 0:
        raise ProtocolViolation("a string in a message has no end")
    return data[start:end], end + 1


def read_fields(body: bytes) -> dict[bytes, bytes]:
    """The fields of an ErrorResponse or NoticeResponse by their one-byte names."""
    fields: dict[bytes, bytes] = {}
    at = 0
    while at < len(body) and body[at]:
        value, end = split_cstring(body, at + 1)
        fields[body[at : at + 1]] = value
        at = end
    if at != len(body) - 1:
        raise ProtocolViolation("the fields of an error or notice do not end where the message does")
    return fields


def read_fault(body: bytes) -> Fault:
    """An ErrorResponse or NoticeResponse, the untranslated severity preferred."""
    fields = {name: shown(value) for name, value in read_fields(body).items()}
    return Fault(
        severity=fields.get(b"V") or fields.get(b"S", ""), code=fields.get(b"C", ""),
        message=fields.get(b"M", ""), detail=fields.get(b"D", ""), hint=fields.get(b"H", ""),
    )


def read_parameter_status(body: bytes) -> tuple[bytes, bytes]:
    """Name and value."""
    name, at = split_cstring(body)
    value, end = split_cstring(body, at)
    if end != len(body):
        raise ProtocolViolation("a parameter status has bytes after its value")
    return name, value


def read_backend_key_data(body: bytes) -> tuple[int, bytes]:
    """Process id and secret."""
    if not 8 <= len(body) <= 260:
        raise ProtocolViolation(f"a cancel key of {len(body)} bytes")
    return _INT32.unpack_from(body)[0], body[4:]


def read_row_description(body: bytes) -> list[Column]:
    """The columns of a result."""
    columns = []
    try:
        (count,) = _INT16.unpack_from(body)
        at = 2
        for _ in range(count):
            name, at = split_cstring(body, at)
            _, _, oid, size, _, _ = _COLUMN.unpack_from(body, at)
            at += _COLUMN.size
            columns.append(Column(shown(name), oid & 0xFFFFFFFF, size))
    except struct.error:
        raise ProtocolViolation("a row description is cut short") from None
    if count < 0 or at != len(body):
        raise ProtocolViolation("a row description of the wrong length")
    return columns


def read_data_row(body: bytes) -> list[bytes | None]:
    """The values of a row as sent; None is NULL."""
    values: list[bytes | None] = []
    try:
        (count,) = _INT16.unpack_from(body)
        at = 2
        for _ in range(count):
            (size,) = _INT32.unpack_from(body, at)
            at += 4
            values.append(None if size == -1 else body[at : at + size])
            if size < -1 or at + max(size, 0) > len(body):
                raise ProtocolViolation("a value of a row is cut short")
            at += max(size, 0)
    except struct.error:
        raise ProtocolViolation("a row is cut short") from None
    if count < 0 or at != len(body):
        raise ProtocolViolation("a row of the wrong length")
    return values
