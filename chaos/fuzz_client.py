"""Hostile bytes at the client port: before the login, in it, and behind it in each pool mode and the console.

Each input is made from the run's seed and its own number, so that one can be sent again by itself.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from chaos.fuzz_words import Hearing, Nonsense, noise, read, read_to_end, spoil
from pooler.demo import client as c

PER_LOGIN = 40
ANSWER_SECONDS, SILENCE_SECONDS = 0.5, 0.005  # how long is waited where an answer is due, and where none is
END_SECONDS_MAX, LOGIN_SECONDS_MAX = 20.0, 30.0
UNHEARD_MAX = 3  # inputs in a row without an answer: the client most likely waits for more, and is replaced

_SQL = (
    "select 1", "", "begin", "commit", "rollback", "select 1/0", "select 1; select 2", "set app.x = '1'",
    "copy (select 1) to stdout", "copy (select generate_series(1,2000)) to stdout",
    "create temp table t(a int)", "copy t from stdin", "listen ch", "notify ch", "unlisten *",
    "prepare p as select 1", "execute p", "deallocate p", "deallocate all", "discard all", "reset all",
    "select pg_try_advisory_lock(1)", "declare c cursor with hold for select 1", "do $$ begin end $$",
    "set role none",
    "set timezone to default", "set local work_mem = '1MB'", "set search_path to nowhere", ";", "--", "/* ",
    "set application_name to 'é'", "select set_config('app.y', 'z', false)", "savepoint s", "rollback to s",
    "select $1::int", "select 'pooler_0'", "select repeat('x', 100000)", "set client_encoding to latin1",
    "set standard_conforming_strings to off",
    "begin; select 1/0", "explain select 1", "fetch c", "close all", "lock", "show all")
_CONSOLE = (  # to who may only look
    "show pools", "show clients", "show stats", "show config", "show databases", "show lists", "show help",
    "show version", "show ledger", "show nothing", "select 1", "", ";", "set a = 1", "show", "reload", "kill",
    "pause", "shutdown", "drain", "disable shop", "kill_client 1", "reconnect", "suspend", "wait_close",
    "show ticket 'x'", "show pools;show pools", "begin", "select version()", "show  mem --x")
_NAMES = ("", "a", "b", "pooler_0", "p", "é" * 20, "x" * 70)
_SASL = b"SCRAM-SHA-256\0\x00\x00\x00\x20n,,n=,r=rOprNGfwEbeRWgbNEkqO%hvY"
_SSL, _GSS = bytes.fromhex("0000000804d2162f"), bytes.fromhex("0000000804d21630")
_PROXY_2 = bytes.fromhex("0d0a0d0a000d0a515549540a")
_SETTINGS = (("options", "-c a.b=1 -c"), ("options", "-c work_mem=1MB --search-path=x"), ("options", "\\"),
             ("replication", "true"), ("replication", "database"), ("replication", "x"), ("_pq_.x", "1"),
             ("client_encoding", "nothing"), ("application_name", "x" * 300), ("DateStyle", "ISO"),
             ("a.b", "c"), ("", "x"), ("search_path", "a" * 3000), ("nothing", "1"), ("user", "twice"),
             ("timezone", "utc"))


@dataclass(frozen=True, slots=True)
class Place:
    """Where to send, and who may log in there."""

    port: int
    password: str
    dbname: str
    users: Sequence[str]
    console: tuple[str, str]  # a user of it, and its password


@dataclass(frozen=True, slots=True)
class Input:
    """`kind`: first, login, session or console; `who` of the users."""

    kind: str
    who: int
    writes: tuple[bytes, ...]


def made(seed: int, number: int, only: str = "") -> Input:
    """Input `number`, of the kind `only` if that is given."""
    chance = Random(f"{seed}:{number}")
    kind = chance.choice(("first", "first", "login", *("session",) * 7, "console"))
    kind = only or kind
    who = number // PER_LOGIN
    if kind == "first":
        behind = chance.choice((b"", b"", b"\0" * 8, noise(chance), _first(chance)))
        return Input(kind, who, (spoil(chance, _first(chance)) + behind,))
    if kind == "login":
        return Input(kind, who, tuple(spoil(chance, c.message(b"p", body)) for body in _passwords(chance)))
    texts = _CONSOLE if kind == "console" else _SQL
    return Input(kind, who, tuple(
        spoil(chance, b"".join(_message(chance, texts) for _ in range(chance.randint(1, 6))), 16)
        for _ in range(chance.choice((1, 1, 2)))))


def _first(chance: Random) -> bytes:
    match chance.randrange(12):
        case 0:
            return _SSL
        case 1:
            return _GSS
        case 2:
            key = chance.choice((b"\0\0\0\7", bytes(32), b"", bytes(300)))
            return c.cancel_request(chance.choice((1, 0, -1)), key)
        case 3:
            return chance.choice((b"GET / HTTP/1.0\r\n\r\n", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
                                  b"PROXY UNKNOWN\r\n", b"PROXY TCP6 ::1 ::2 70000 2\r\n",
                                  b"PROXY " + b"x" * 120))
        case 4:
            head = bytes([chance.choice((0x20, 0x21, 0x11)), chance.choice((0, 0x11, 0x21, 0x31))])
            return _PROXY_2 + head + chance.choice((b"\0\x0c", b"\0\0", b"\xff\xff", b"\0\x24")) + bytes(36)
        case 5:
            return bytes.fromhex("160301020001fc0303") + bytes(chance.choice((4, 40, 600)))
    pairs = {"user": chance.choice(("shop_web", "nobody", "", "é", "admin")), "database": chance.choice(
        ("shop", "nope", "pooler", "", "x" * 100))}
    extra = b"".join(f"{name}\0{value}\0".encode() for name, value in chance.choices(
        _SETTINGS, k=chance.randrange(3)))
    version = chance.choice((c.PROTOCOL_3_0, c.PROTOCOL_3_0, 196_610, 206_607, 131_072, 262_144, 0))
    packet = c.startup(pairs, version)
    return (len(packet) + len(extra)).to_bytes(4) + packet[4:-1] + extra + b"\0"


def _passwords(chance: Random) -> tuple[bytes, ...]:
    nonce = chance.choice((b"rOprNGfw", b"", b"x" * 1500, b"a,b", b"\xff"))
    flag = chance.choice((b"n,,", b"y,,", b"p=tls-server-end-point,,", b"p=x,,", b"n,a=x,", b"z,,", b""))
    first = flag + b"n=,r=" + nonce
    size = chance.choice((len(first), -1, 0, len(first) + 1, 1 << 30))
    name = chance.choice((b"SCRAM-SHA-256\0", b"SCRAM-SHA-256-PLUS\0", b"\0", b"PLAIN\0", b"SCRAM-SHA-256"))
    initial = chance.choice((_SASL, name + size.to_bytes(4, signed=True) + first, b"password\0", b""))
    proof = b"c=biws,r=x,p=" + b"A" * 43 + b"="
    return initial, chance.choice((b"c=biws,r=,p=", proof, b"", b"=", noise(chance)))


def _message(chance: Random, texts: Sequence[str]) -> bytes:
    name, sql = chance.choice(_NAMES), chance.choice(texts)
    size = chance.choice((300, 70_000, 300_000))
    match chance.randrange(20):
        case 0 | 1 | 2:
            return c.query(sql)
        case 3 | 4:
            return c.parse(sql, name, (23,) * chance.randrange(3))
        case 5 | 6:
            return c.bind(chance.choice(((), ("1",), ("1", "2"), (None,))), name, chance.choice(_NAMES))
        case 7:
            return c.describe(chance.choice("SPX"), name)
        case 8 | 9:
            return c.execute(name, chance.choice((0, 1, -1)))
        case 10:
            return c.close(chance.choice("SPX"), name)
        case 11 | 12 | 13:
            return c.SYNC
        case 14:
            return c.FLUSH
        case 15:
            return chance.choice((c.message(b"d", noise(chance)), c.message(b"c"), c.message(b"f", b"no\0"),
                                  c.message(b"d", b"1\n"), c.message(b"d", b"\\.\n")))
        case 16:
            return c.message(b"F", chance.choice(((1610).to_bytes(4) + bytes(6), b"", bytes(9), bytes(40))))
        case 17:
            bound = c.bind((), name, name) + c.describe("P", name) + c.execute(name)
            return c.parse(sql, name) + bound + c.SYNC
        case 18:
            return chance.choice((
                c.message(b"p", b"x\0"), c.message(b"X") if chance.random() < 0.2 else c.SYNC,
                c.message(b"Q", sql.encode()), c.query("select '" + "x" * size + "'"),
                c.parse("select '" + "x" * 90_000 + "'", name) + c.bind(("y" * 90_000,), name) + c.SYNC,
                b"P\x00\xff\xff\xff" + b"y" * 5000))
    return c.message(bytes([chance.randrange(256)]), noise(chance))


def is_answered(data: bytes) -> bool:
    """Whether a Sync in it, or what breaks the protocol, has an answer at once."""
    at = 0
    while len(data) - at >= 5:
        size = int.from_bytes(data[at + 1 : at + 5])
        if data[at] not in b"QSFHPBDECdcf" or not 4 <= size <= 1 << 30 or data[at] == b"S"[0]:
            return True
        at += size + 1
    return False


def ends_whole(data: bytes) -> bool:
    """Whether its last message is all there."""
    at = 0
    while len(data) - at >= 5:
        at += int.from_bytes(data[at + 1 : at + 5]) + 1
    return at == len(data)


class Sender:
    """Sends inputs one after the other, and judges what it hears. `wrong` should stay empty."""

    def __init__(self, place: Place, seed: int) -> None:
        self._place, self._seed = place, seed
        self.heard: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._open: dict[str, tuple[socket.socket, Hearing, list[int]]] = {}  # by kind
        self._unheard = 0
        self._torn = False  # the newest session was sent the beginning of a message

    def send(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            wanted = made(self._seed, number)
            if wanted.kind in ("session", "console"):
                self._in_session(number, wanted)
            else:
                self._alone(number, wanted)
        for kind in list(self._open):
            self._leave(kind)

    def _alone(self, number: int, wanted: Input) -> None:
        with socket.create_connection(("127.0.0.1", self._place.port), LOGIN_SECONDS_MAX) as sock:
            hearing = Hearing(bare=3 if wanted.kind == "first" else 0)
            if wanted.kind == "login":
                sock.sendall(c.startup({"user": self._place.users[0], "database": self._place.dbname}))
                read(sock, hearing, LOGIN_SECONDS_MAX)
            with suppress(OSError):
                for data in wanted.writes:
                    sock.sendall(data)
            self._end(sock, hearing, [number])
            self.heard[f"{wanted.kind} {hearing.last.decode() or 'nothing'}"] += 1

    def _in_session(self, number: int, wanted: Input) -> None:
        if wanted.kind not in self._open:
            self._open[wanted.kind] = *self._log_in(wanted), []
            self._torn = False
        sock, hearing, sent = self._open[wanted.kind]
        sent.append(number)
        said = self._exchange(number, sock, hearing, wanted.writes)
        self.heard[f"{wanted.kind} {said}"] += 1
        self._unheard = self._unheard + 1 if said == "nothing" else 0
        if said == "closed":
            left = any(b"X" in each for n in sent for each in made(self._seed, n).writes)
            if not hearing.is_fatal and not left:
                self.wrong.append(f"{sent}: closed without a word behind {hearing.last!r}")
            sock.close()
            del self._open[wanted.kind]
        elif len(sent) >= PER_LOGIN or self._unheard >= UNHEARD_MAX:
            self._leave(wanted.kind)
            self._unheard = 0

    def _log_in(self, wanted: Input) -> tuple[socket.socket, Hearing]:
        place = self._place
        client = c.RawClient("127.0.0.1", place.port, LOGIN_SECONDS_MAX)
        if wanted.kind == "console":
            client.login(*place.console, "pooler")
        else:
            client.login(place.users[wanted.who % len(place.users)], place.password, place.dbname)
        return client.socket, Hearing()

    def _leave(self, kind: str) -> None:
        sock, hearing, sent = self._open.pop(kind)
        self._end(sock, hearing, sent)
        sock.close()

    def _end(self, sock: socket.socket, hearing: Hearing, sent: list[int]) -> None:
        try:
            if not read_to_end(sock, hearing, END_SECONDS_MAX):
                self.wrong.append(f"{sent}: not ended within {END_SECONDS_MAX:g} s")
        except Nonsense as heard:
            self.wrong.append(f"{sent}: {heard}")

    def _patience(self, hearing: Hearing, data: bytes) -> float:
        """How long an answer to this may take."""
        due = not self._torn and hearing.last != b"G" and is_answered(data)
        self._torn = self._torn or not ends_whole(data)
        return ANSWER_SECONDS if due else SILENCE_SECONDS

    def _exchange(self, number: int, sock: socket.socket, hearing: Hearing, writes: Sequence[bytes]) -> str:
        said = "nothing"
        try:
            for data in writes:
                sock.settimeout(END_SECONDS_MAX)
                with suppress(TimeoutError):
                    sock.sendall(data)
                now = read(sock, hearing, self._patience(hearing, data))
                if now == "closed":
                    return now
                said = now if now == "answered" else said
        except OSError:
            while read(sock, hearing, SILENCE_SECONDS) == "answered":
                pass
            return "closed"
        except Nonsense as heard:
            self.wrong.append(f"{number}: {heard}")
        return said
