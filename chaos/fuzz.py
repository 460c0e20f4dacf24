"""Hostile bytes at the client port, before and after login: whoever sends them ends alone.

Each input is made from the run's seed and its own number, so that one can be sent again by itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random

from chaos.outcome import Outcome
from chaos.world import DBNAME, PASSWORD, USER, World, world
from pooler.demo import client as c
from pooler.demo.judge import Verdict

PERMITS, WORKERS, SENDERS = 8, 2, 8
INPUTS_PER_SECOND = 400  # how many are sent for each second that was asked for
PER_LOGIN = 40
ANSWER_SECONDS, SERVED_SECONDS_MAX = 0.02, 5.0
GROWTH_BYTES_MAX = 8 << 20
WARM_PART = 5  # the first fifth of the inputs fills caches; growth is counted after it

_SQL = ("select 1", "", "begin", "commit", "rollback", "select 1/0", "select 1; select 2", "set app.x = '1'",
        "copy (select 1) to stdout", "listen ch", "prepare p as select 1", "deallocate all", "discard all",
        "select pg_advisory_lock(1)", "declare c cursor with hold for select 1", "do $$ begin end $$")
_FIRST = (
    c.startup({"user": USER, "database": DBNAME}), c.startup({"user": USER, "database": "nope"}),
    c.startup({"user": "nobody", "database": DBNAME, "options": "-c a.b=1 -c"}),
    bytes.fromhex("0000000804d2162f"), bytes.fromhex("0000000804d21630"),
    c.cancel_request(1, b"\0\0\0\7"), b"GET / HTTP/1.0\r\n\r\n",
    bytes.fromhex("160301020001fc0303") + bytes(40), b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
    bytes.fromhex("0d0a0d0a000d0a515549540a") + bytes(20),
)
_LENGTHS = (b"\xff\xff\xff\xff", b"\0\0\0\3", b"\x40\0\0\1", b"\0\1\0\0")
_SASL = b"SCRAM-SHA-256\0\x00\x00\x00\x20n,,n=,r=rOprNGfwEbeRWgbNEkqO%hvY"


def fuzz(seed: int, seconds: float, say: Callable[[str], None]) -> Outcome:
    """Send INPUTS_PER_SECOND inputs for each of `seconds`. Raises PartFailed."""
    inputs = round(seconds * INPUTS_PER_SECOND)
    with world(permits=PERMITS, workers=WORKERS) as here:
        before = set(here.fleet.worker_pids())
        stop, waits = threading.Event(), list[float]()
        bystander = threading.Thread(target=_bystander, args=(here.port, stop, waits), daemon=True)
        bystander.start()
        heard: Counter[str] = Counter()
        warm = inputs // WARM_PART
        heard += _send_all(here.port, seed, range(warm))
        start = _resident(before)
        heard += _send_all(here.port, seed, range(warm, inputs))
        growth = _resident(before) - start
        stop.set()
        bystander.join(2 * SERVED_SECONDS_MAX)
        say(f"{inputs} inputs; heard: {dict(heard.most_common(8))}")
        alive = set(here.fleet.worker_pids()) == before
        return Outcome([
            Verdict("alive", alive, f"workers {'as they were' if alive else 'have died'}"),
            Verdict("others", bool(waits) and max(waits) <= SERVED_SECONDS_MAX,
                    f"{len(waits)} transactions beside it, the slowest {max(waits, default=-1):.2f} s"),
            Verdict("memory", growth <= GROWTH_BYTES_MAX, f"workers grew by {growth / 2**20:.1f} MiB"),
            _no_bug(here), _served(here.port),
        ], {"inputs": inputs, "heard": dict(heard), "growth_bytes": growth})


def made(seed: int, number: int) -> tuple[str, list[bytes]]:
    """Input `number`: when it is sent (`first`, `login`, `session`), and its writes."""
    chance = Random(f"{seed}:{number}")
    kind = chance.choice(("first", "login", "session", "session"))
    if kind == "first":
        return kind, [_spoil(chance, chance.choice(_FIRST)) + chance.choice((b"", b"\0" * 8, _noise(chance)))]
    if kind == "login":
        return kind, [_spoil(chance, c.message(b"p", body)) for body in (_SASL, b"c=biws,r=,p=")]
    return kind, [_spoil(chance, b"".join(_message(chance) for _ in range(chance.randint(1, 6))))
                  for _ in range(chance.randint(1, 2))]


def _message(chance: Random) -> bytes:
    name, sql = chance.choice(("", "a", "b", "pooler_0")), chance.choice(_SQL)
    return chance.choice((
        c.query(sql), c.parse(sql, name), c.bind((), name), c.bind(("1", "2"), name, name),
        c.describe("S", name), c.describe("P", name), c.execute(name), c.close("S", name), c.close("P", name),
        c.SYNC, c.SYNC, c.FLUSH, c.message(b"d", _noise(chance)), c.message(b"c"), c.message(b"f", b"no\0"),
        c.message(b"F", (1610).to_bytes(4, "big") + bytes(6)), c.message(b"p", b"x\0"),
        c.message(bytes([chance.randrange(256)]), _noise(chance))))


def _noise(chance: Random) -> bytes:
    return chance.randbytes(chance.choice((1, 7, 64, 300)))


def _spoil(chance: Random, data: bytes) -> bytes:
    """Half of the time as it is; else a bit, a length, or the end is wrong."""
    how = chance.randrange(8)
    at = chance.randrange(len(data))
    if how == 0:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if how == 1:
        return data[:1] + chance.choice(_LENGTHS) + data[5:]
    if how == 2:
        return data[:at]
    return data[:at] + _noise(chance) + data[at:] if how == 3 else data


def _send_all(port: int, seed: int, numbers: range) -> Counter[str]:
    with ThreadPoolExecutor(SENDERS) as pool:
        parts = [pool.submit(_send, port, seed, numbers[at::SENDERS]) for at in range(SENDERS)]
        return sum((part.result() for part in parts), Counter[str]())


def _send(port: int, seed: int, numbers: range) -> Counter[str]:
    heard: Counter[str] = Counter()
    session: c.RawClient | None = None
    used = 0
    for number in numbers:
        kind, writes = made(seed, number)
        if kind == "session":
            if session is None or used >= PER_LOGIN:
                if session is not None:
                    session.close()
                session, used = c.RawClient("127.0.0.1", port).login(USER, PASSWORD, DBNAME), 0
            used += 1
            said = _exchange(session.socket, writes)
            if said == "closed" or (said == "nothing" and number % 3):  # else it often waits for more
                session.close()
                session = None
        else:
            with socket.create_connection(("127.0.0.1", port), 10) as sock:
                if kind == "login":
                    sock.sendall(_FIRST[0])
                    sock.recv(100)
                said = _exchange(sock, writes)
        heard[f"{kind} {said}"] += 1
    if session is not None:
        session.close()
    return heard


def _exchange(sock: socket.socket, writes: list[bytes]) -> str:
    sock.settimeout(ANSWER_SECONDS)
    said = "nothing"
    try:
        for data in writes:
            sock.sendall(data)
            with suppress(TimeoutError):
                if not sock.recv(65_536):
                    return "closed"
                said = "answered"
    except OSError:
        return "closed"
    return said


def _bystander(port: int, stop: threading.Event, waits: list[float]) -> None:
    with c.RawClient("127.0.0.1", port, 2 * SERVED_SECONDS_MAX) as other:
        other.login(USER, PASSWORD, DBNAME)
        while not stop.is_set():
            began = time.monotonic()
            other.query("SELECT 1")
            waits.append(time.monotonic() - began)
            stop.wait(0.01)


def _resident(pids: set[int]) -> int:
    total = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/status") as status:
            total += next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    return total


def _no_bug(here: World) -> Verdict:
    lines = here.fleet.log.read_text(errors="replace").splitlines()
    found = [line for line in lines if "something_failed" in line or "Traceback" in line]
    return Verdict("no bug", not found, found[0] if found else "no exception in the log")


def _served(port: int) -> Verdict:
    for _ in range(2 * PERMITS):
        with c.RawClient("127.0.0.1", port) as client:
            client.login(USER, PASSWORD, DBNAME).query("SELECT 1")
    return Verdict("served", True, f"{2 * PERMITS} clients were served after it")
