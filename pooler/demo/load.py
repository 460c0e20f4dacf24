"""The clients of the demonstration: two tenants and token writers, in a process of their own.

`python -m pooler.demo.load SPEC.json` runs until SIGTERM and then writes what each client was told. A write
is *acknowledged* once its CommandComplete and ReadyForQuery came, *unknown* when the connection broke or the
pooler said 08007 before that, *refused* for any other error. Nothing is retried: the judge looks each token
up.
"""

from __future__ import annotations

import json
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pooler.demo import client as wire

RECONNECT_SECONDS = 0.05
LAST_ANSWER_SECONDS = 15.0
PROGRESS_SECONDS = 0.2
OUTCOME_UNKNOWN = "08007"
STATEMENT = "work"


@dataclass(frozen=True, slots=True)
class Group:
    """Clients that do the same thing. `function` is called once for each transaction."""

    tenant: str
    user: str
    password: str
    function: str
    clients: int
    writes: bool = False


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to run and where its results go."""

    host: str
    port: int
    dbname: str
    groups: tuple[Group, ...]
    result: str
    progress: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))
        path.chmod(0o600)

    @classmethod
    def read(cls, path: Path) -> LoadSpec:
        values = json.loads(path.read_text())
        values["groups"] = tuple(Group(**group) for group in values["groups"])
        return cls(**values)


@dataclass(slots=True)
class Tally:
    """What one tenant's clients were told. Times are seconds since 1970."""

    done: int = 0
    unknown: int = 0
    connects: int = 0
    disconnects: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    acknowledged: list[tuple[str, float]] = field(default_factory=list)
    unknown_tokens: list[str] = field(default_factory=list)
    refused_tokens: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        return {
            "done": self.done, "unknown": self.unknown, "connects": self.connects,
            "disconnects": self.disconnects, "errors": dict(self.errors),
            "p50_ms": _quantile_ms(ordered, 0.5), "p99_ms": _quantile_ms(ordered, 0.99),
            "max_ms": _quantile_ms(ordered, 1.0), "acknowledged": self.acknowledged,
            "unknown_tokens": self.unknown_tokens, "refused_tokens": self.refused_tokens,
        }


class LoadClient:
    """One client: connects, logs in, asks, waits, asks again; after a broken connection it starts anew."""

    def __init__(self, number: int, group: Group, load: Load) -> None:
        self.group = group
        self.tally = load.tallies[group.tenant]
        self._number, self._load = number, load
        self._extended = number % 2 == 1 and not group.writes
        self._sequence = 0
        self._socket: socket.socket | None = None
        self.idle()

    def idle(self) -> None:
        """No connection, nothing asked."""
        self._asked = 0.0  # when the open question was sent; 0: none
        self._token = ""
        self._failed = ""
        self._login: wire.Login | None = None

    @property
    def is_waiting(self) -> bool:
        return self._asked > 0

    def connect(self) -> None:
        self._inbox = wire.Inbox()
        self._prepared = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(5)
            self._socket.connect((self._load.spec.host, self._load.spec.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._login = wire.Login(self.group.user, self.group.password)
            self._socket.sendall(wire.startup({
                "user": self.group.user, "database": self._load.spec.dbname,
                "application_name": f"demo-{self.group.tenant}"}))
        except OSError:
            self._socket.close()
            self._lost()
            return
        self.tally.connects += 1
        self._load.selector.register(self._socket, selectors.EVENT_READ, self)

    def readable(self) -> None:
        """Take what came, answer it."""
        assert self._socket is not None
        try:
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionResetError
            self._inbox.feed(data)
            while (said := self._inbox.next()) is not None:
                self._take(said)
                if self._socket is None:
                    return
        except OSError:
            self.drop()
            self._lost()

    def drop(self, *, orderly: bool = False) -> None:
        """Close; an open question's outcome is then unknown."""
        if self._socket is not None:
            self._load.selector.unregister(self._socket)
            if orderly:
                with suppress(OSError):  # the other side may be faster
                    self._socket.sendall(wire.TERMINATE)
            self._socket.close()
            self._socket = None
        if self._asked:
            self._count_unknown()
        self.idle()

    def _take(self, said: wire.Message) -> None:
        if said.type == "R" and self._login is not None and self._socket is not None:
            self._socket.sendall(self._login.answer(said.body))
        elif said.type == "E":
            self._failed = said.error().sqlstate
            if not self._asked:  # refused at login: the connection ends
                self.tally.errors[self._failed] += 1
        elif said.type == "Z":
            if self._asked:
                self._settle()
            self._ask()

    def _ask(self) -> None:
        assert self._socket is not None
        if self._load.stopping:
            self.drop(orderly=True)
            return
        self._failed = ""
        self._sequence += 1
        argument = f"{self._load.run}-{self._number}-{self._sequence}" if self.group.writes else str(
            1 + self._sequence % 1000)
        self._token = argument if self.group.writes else ""
        self._asked = time.time()
        self._socket.sendall(self._question(argument))

    def _question(self, argument: str) -> bytes:
        call = f"SELECT {self.group.function}"
        if not self._extended:
            return wire.query(f"{call}('{argument}')")
        head = b"" if self._prepared else wire.parse(f"{call}($1)", STATEMENT)
        self._prepared = True
        return head + wire.bind([argument], STATEMENT) + wire.execute() + wire.SYNC

    def _settle(self) -> None:
        now = time.time()
        if not self._failed:
            self.tally.done += 1
            self.tally.seconds.append(now - self._asked)
            if self._token:
                self.tally.acknowledged.append((self._token, now))
        elif self._failed == OUTCOME_UNKNOWN:
            self.tally.errors[self._failed] += 1
            self._count_unknown()
        else:
            self.tally.errors[self._failed] += 1
            self._prepared = False
            if self._token:
                self.tally.refused_tokens.append(self._token)
        self._asked = 0.0

    def _count_unknown(self) -> None:
        self.tally.unknown += 1
        if self._token:
            self.tally.unknown_tokens.append(self._token)

    def _lost(self) -> None:
        self.tally.disconnects += 1
        self._socket = None
        self._load.later.append((time.monotonic() + RECONNECT_SECONDS, self))


class Load:
    """All clients over one selector."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.run = f"{time.time_ns():x}"
        self.selector = selectors.DefaultSelector()
        self.stopping = False
        self.later: list[tuple[float, LoadClient]] = []
        self.tallies = {group.tenant: Tally() for group in spec.groups}
        members = [group for group in spec.groups for _ in range(group.clients)]
        self._clients = [LoadClient(number, group, self) for number, group in enumerate(members)]
        self._started = time.time()
        self._told = 0.0

    def drive(self) -> None:
        """Until told to stop and every question is answered, or the last answer does not come."""
        for each in self._clients:
            each.connect()
        last = 0.0
        while not last or (time.monotonic() < last and any(each.is_waiting for each in self._clients)):
            self._turn()
            if self.stopping and not last:
                last = time.monotonic() + LAST_ANSWER_SECONDS
        for each in self._clients:
            each.drop()

    def stop(self) -> None:
        """No new question from now on."""
        self.stopping = True

    def report(self) -> dict[str, Any]:
        """What was told, and over which time."""
        return {"started": self._started, "ended": time.time(),
                "tenants": {name: tally.summary() for name, tally in self.tallies.items()}}

    def _turn(self) -> None:
        for key, _ in self.selector.select(0.02):
            key.data.readable()
        now = time.monotonic()
        due = [each for at, each in self.later if at <= now]
        if due:
            self.later = [entry for entry in self.later if entry[0] > now]
            for each in due:
                if not self.stopping:
                    each.connect()
        if now - self._told > PROGRESS_SECONDS:
            self._told = now
            self._tell()

    def _tell(self) -> None:
        path = Path(self.spec.progress)
        fresh = path.with_suffix(".new")
        counts = {name: tally.done for name, tally in self.tallies.items()}
        writes = sum(len(tally.acknowledged) for tally in self.tallies.values())
        fresh.write_text(json.dumps({"done": sum(counts.values()), "tenants": counts, "writes": writes}))
        fresh.replace(path)


def _quantile_ms(ordered: list[float], share: float) -> float:
    if not ordered:
        return 0.0
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def main() -> int:
    spec = LoadSpec.read(Path(sys.argv[1]))
    load = Load(spec)
    signal.signal(signal.SIGTERM, lambda *_: load.stop())
    load.drive()
    fresh = Path(spec.result).with_suffix(".new")
    fresh.write_text(json.dumps(load.report()))
    fresh.replace(spec.result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
