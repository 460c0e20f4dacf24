"""A minimal client of PostgreSQL's protocol 3.0, written apart from `pooler.wire` so that it can judge it.

Builders of messages, the client's side of scram-sha-256, and a blocking client with time-outs. Sources:
PostgreSQL's "Message Formats" and RFC 5802 / 7677.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

PROTOCOL_3_0 = 196_608
CANCEL_CODE = 80_877_102
SSL_CODE = 80_877_103


class ServerSaid(Exception):
    """An ErrorResponse: `fields` by their one-letter code."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__(f"{fields.get('C')}: {fields.get('M')}")
        self.fields = fields

    @property
    def sqlstate(self) -> str:
        return self.fields.get("C", "")


class Disconnected(EOFError):
    """The server closed the connection."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the server: its type letter and its body."""

    type: str
    body: bytes

    def error(self) -> ServerSaid:
        """Of an ErrorResponse or NoticeResponse."""
        parts = [part for part in self.body.split(b"\0") if part]
        return ServerSaid({chr(part[0]): part[1:].decode(errors="replace") for part in parts})


def message(kind: bytes, body: bytes = b"") -> bytes:
    """Any message with a type letter."""
    return kind + struct.pack("!i", len(body) + 4) + body


def startup(parameters: dict[str, str], version: int = PROTOCOL_3_0) -> bytes:
    body = b"".join(f"{name}\0{value}\0".encode() for name, value in parameters.items()) + b"\0"
    return struct.pack("!ii", len(body) + 8, version) + body


def cancel_request(pid: int, key: bytes) -> bytes:
    return struct.pack("!iii", 12 + len(key), CANCEL_CODE, pid) + key


def query(text: str) -> bytes:
    return message(b"Q", text.encode() + b"\0")


def parse(text: str, name: str = "", types: Sequence[int] = ()) -> bytes:
    declared = struct.pack(f"!h{len(types)}i", len(types), *types)
    return message(b"P", name.encode() + b"\0" + text.encode() + b"\0" + declared)


def bind(values: Sequence[str | None] = (), name: str = "", portal: str = "") -> bytes:
    """Text parameters, text results."""
    parts = [portal.encode() + b"\0" + name.encode() + b"\0" + struct.pack("!hh", 0, len(values))]
    for value in values:
        raw = None if value is None else value.encode()
        parts.append(struct.pack("!i", -1) if raw is None else struct.pack("!i", len(raw)) + raw)
    return message(b"B", b"".join(parts) + struct.pack("!h", 0))


def describe(what: str = "P", name: str = "") -> bytes:
    return message(b"D", what.encode() + name.encode() + b"\0")


def execute(portal: str = "", rows: int = 0) -> bytes:
    return message(b"E", portal.encode() + b"\0" + struct.pack("!i", rows))


def close(what: str = "S", name: str = "") -> bytes:
    return message(b"C", what.encode() + name.encode() + b"\0")


SYNC = message(b"S")
FLUSH = message(b"H")
TERMINATE = message(b"X")


def row_values(body: bytes) -> list[str | None]:
    """The columns of a DataRow in text format."""
    values: list[str | None] = []
    at = 2
    for _ in range(int.from_bytes(body[:2])):
        size = int.from_bytes(body[at : at + 4], signed=True)
        at += 4
        values.append(None if size < 0 else body[at : at + size].decode())
        at += max(size, 0)
    return values


class ScramClient:
    """The client's three steps of scram-sha-256 without channel binding."""

    def __init__(self, password: str) -> None:
        self._password = password.encode()
        self._bare = f"n=,r={base64.b64encode(secrets.token_bytes(18)).decode()}"

    def first(self) -> bytes:
        return b"n,," + self._bare.encode()

    def final(self, server_first: bytes) -> bytes:
        """Raises ValueError when the server's nonce does not extend ours."""
        said = dict(part.split("=", 1) for part in server_first.decode().split(","))
        if not said["r"].startswith(self._bare.partition("r=")[2]):
            raise ValueError("the server answered with another nonce")
        salted = hashlib.pbkdf2_hmac("sha256", self._password, base64.b64decode(said["s"]), int(said["i"]))
        without_proof = f"c=biws,r={said['r']}"
        signed = f"{self._bare},{server_first.decode()},{without_proof}".encode()
        key = hmac.digest(salted, b"Client Key", "sha256")
        signature = hmac.digest(hashlib.sha256(key).digest(), signed, "sha256")
        proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
        self._expected = hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), signed, "sha256")
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def verify(self, server_final: bytes) -> None:
        """Raises ValueError when the server does not know the password either."""
        if base64.b64decode(server_final.partition(b"v=")[2]) != self._expected:
            raise ValueError("the server's signature is wrong")


def md5_answer(user: str, password: str, salt: bytes) -> bytes:
    inner = hashlib.md5((password + user).encode()).hexdigest()
    return b"md5" + hashlib.md5(inner.encode() + salt).hexdigest().encode() + b"\0"


class Login:
    """The client's side of authentication: feed it each `R` message, send what it returns."""

    def __init__(self, user: str, password: str) -> None:
        self._user, self._password = user, password
        self._scram = ScramClient(password)

    def answer(self, body: bytes) -> bytes:
        """Empty when nothing is to be sent. Raises ValueError for a method this client does not know."""
        code, rest = int.from_bytes(body[:4]), body[4:]
        if code in (0, 12):
            if code == 12:
                self._scram.verify(rest)
            return b""
        if code == 3:
            return message(b"p", self._password.encode() + b"\0")
        if code == 5:
            return message(b"p", md5_answer(self._user, self._password, rest))
        if code == 10:
            first = self._scram.first()
            return message(b"p", b"SCRAM-SHA-256\0" + struct.pack("!i", len(first)) + first)
        if code == 11:
            return message(b"p", self._scram.final(rest))
        raise ValueError(f"authentication request {code}")


class Inbox:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> None:
        self._buffer += data

    def next(self) -> Message | None:
        if len(self._buffer) < 5:
            return None
        size = int.from_bytes(self._buffer[1:5])
        if len(self._buffer) < size + 1:
            return None
        found = Message(chr(self._buffer[0]), bytes(self._buffer[5 : size + 1]))
        del self._buffer[: size + 1]
        return found


@dataclass(slots=True)
class Session:
    """What the server told at login."""

    pid: int = 0
    key: bytes = b""
    parameters: dict[str, str] = field(default_factory=dict)
    status: str = ""  # of the last ReadyForQuery: I, T or E

    def take(self, said: Message) -> None:
        if said.type == "K":
            self.pid, self.key = int.from_bytes(said.body[:4]), said.body[4:]
        elif said.type == "S":
            name, value = said.body.split(b"\0")[:2]
            self.parameters[name.decode(errors="backslashreplace")] = value.decode(errors="backslashreplace")
        elif said.type == "Z":
            self.status = said.body.decode()


class RawClient:
    """A blocking client; every wait ends after `timeout_seconds` with TimeoutError."""

    def __init__(self, host: str, port: int, timeout_seconds: float = 20) -> None:
        if host.startswith("/"):
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(timeout_seconds)
            self.socket.connect(f"{host}/.s.PGSQL.{port}")
        else:
            self.socket = socket.create_connection((host, port), timeout_seconds)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session = Session()
        self._inbox = Inbox()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def login(self, user: str, password: str = "", dbname: str | None = None, **parameters: str) -> Self:
        """Startup and authentication until ReadyForQuery. Raises ServerSaid."""
        self.send(startup({"user": user, "database": dbname or user, **parameters}))
        login = Login(user, password)
        while True:
            said = self.receive()
            if said.type == "R":
                self.send(login.answer(said.body))
            elif said.type == "E":
                raise said.error()
            elif said.type == "Z":
                return self

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> Message:
        """The next message, whatever it is. Raises Disconnected at the end."""
        while (said := self._inbox.next()) is None:
            data = self.socket.recv(65_536)
            if not data:
                raise Disconnected
            self._inbox.feed(data)
        self.session.take(said)
        return said

    def until_ready(self) -> list[Message]:
        """Every message up to and with the next ReadyForQuery."""
        found = [self.receive()]
        while found[-1].type != "Z":
            found.append(self.receive())
        return found

    def query(self, text: str) -> list[list[str | None]]:
        """A simple query's rows. Raises the first ServerSaid, after ReadyForQuery."""
        self.send(query(text))
        return rows_of(self.until_ready())

    def table(self, text: str) -> tuple[list[str], list[list[str | None]]]:
        """A simple query's column names and rows. Raises ServerSaid."""
        self.send(query(text))
        said = self.until_ready()
        return column_names(next((each.body for each in said if each.type == "T"), b"\0\0")), rows_of(said)

    def is_closed(self) -> bool:
        """Waits for the server's end of the connection; False when a message comes instead."""
        try:
            self.receive()
        except (Disconnected, ConnectionError):
            return True
        return False

    def close(self) -> None:
        """An orderly end if the server still listens."""
        with suppress(OSError):  # it may be gone already
            self.socket.sendall(TERMINATE)
        self.socket.close()

    def abort(self) -> None:
        """End with a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def column_names(body: bytes) -> list[str]:
    """The names in a RowDescription."""
    names, at = [], 2
    for _ in range(int.from_bytes(body[:2])):
        end = body.index(b"\0", at)
        names.append(body[at:end].decode())
        at = end + 19
    return names


def rows_of(said: Sequence[Message]) -> list[list[str | None]]:
    """The data rows among messages. Raises ServerSaid if there is an error among them."""
    for each in said:
        if each.type == "E":
            raise each.error()
    return [row_values(each.body) for each in said if each.type == "D"]
