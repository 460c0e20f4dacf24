"""Sessions as exact intervals, read from a PostgreSQL server's own connection log.

The order of the lines is the clock: each process appends its line itself, and a backend writes
`disconnection` before its socket closes, so a session opened after another's orderly end stands after it.
Needs log_connections, log_disconnections and pooler.demo.postgres.LOG_PREFIX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_LINE = re.compile(
    r"^(?P<at>[\d-]+ [\d:.]+) \w+\|(?P<pid>\d+)\|(?P<code>\w{5})\|(?P<user>[^|]*)\|(?P<database>[^|]*)\|"
    r"(?P<application>.*?)\|(?P<level>[A-Z]+):  (?P<text>.*)$"
)
_AUTHORIZED = re.compile(
    r"^(?P<walsender>replication )?connection authorized: user=(?P<user>\S+)"
    r"(?: database=(?P<database>\S+))?(?: application_name=(?P<application>.*?))?(?: SSL enabled.*)?$"
)
# the postmaster's own words when no session of before is left: after a crash, or at its start
_ALL_GONE = re.compile(r"^(all server processes terminated; reinitializing|starting PostgreSQL )")
TOO_MANY_CONNECTIONS = "53300"


@dataclass(frozen=True, slots=True)
class Interval:
    """One session of the server. Lines count from 0; `end_line` None: still open at the end of the log."""

    pid: int
    user: str
    database: str
    application_name: str  # of the startup packet
    start: datetime
    end: datetime | None
    start_line: int
    end_line: int | None
    walsender: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """One FATAL 53300: somebody asked for a session the server had no slot for."""

    at: datetime
    pid: int
    user: str
    text: str


@dataclass(slots=True)
class _Opening:
    start: datetime
    start_line: int
    user: str = ""
    database: str = ""
    application_name: str = ""
    walsender: bool = False
    authorized: bool = False
    fatal: tuple[datetime, int] | None = None

    def ended(self, pid: int, at: datetime | None, line: int | None) -> Interval:
        return Interval(pid, self.user, self.database, self.application_name, self.start, at,
                        self.start_line, line, self.walsender)


def sessions_from_log(path: Path) -> list[Interval]:
    """Every session that got as far as being authorized, in the order they were received."""
    open_now: dict[int, _Opening] = {}
    done: list[Interval] = []
    for number, match in _lines(path):
        pid, text = int(match["pid"]), match["text"]
        at = datetime.fromisoformat(match["at"])
        if _ALL_GONE.match(text):
            done += [each.ended(pid, at, number) for pid, each in open_now.items() if each.authorized]
            open_now.clear()
        elif text.startswith("connection received:"):
            _forget(open_now, pid, done)
            open_now[pid] = _Opening(at, number)
        elif pid in open_now:
            opening = open_now[pid]
            if (authorized := _AUTHORIZED.match(text)) is not None:
                _authorize(opening, authorized)
            elif text.startswith("disconnection:"):
                done.append(opening.ended(pid, at, number))
                del open_now[pid]
            elif match["level"] == "FATAL":
                opening.fatal = (at, number)  # the disconnection follows, unless it was refused
    for pid in list(open_now):
        _forget(open_now, pid, done)
    return sorted(done, key=lambda interval: interval.start_line)


def refusals_from_log(path: Path) -> list[Refusal]:
    """Every connection turned away for want of a slot."""
    return [
        Refusal(datetime.fromisoformat(match["at"]), int(match["pid"]), match["user"], match["text"])
        for _, match in _lines(path)
        if match["code"] == TOO_MANY_CONNECTIONS and match["level"] == "FATAL"
    ]


def overlap_max(
    intervals: Iterable[Interval], counted: Callable[[Interval], bool] = lambda interval: True
) -> tuple[int, list[Interval]]:
    """The largest number of `counted` sessions at one moment, and which they were then."""
    chosen = [interval for interval in intervals if counted(interval)]
    steps = [(each.start_line, True, each) for each in chosen]
    steps += [(each.end_line, False, each) for each in chosen if each.end_line is not None]
    alive: dict[int, Interval] = {}
    most: list[Interval] = []
    for _, begins, each in sorted(steps, key=lambda step: step[:2]):  # of one line the end comes first
        if begins:
            alive[each.start_line] = each
            if len(alive) > len(most):
                most = list(alive.values())
        else:
            del alive[each.start_line]
    return len(most), most


def _lines(path: Path) -> Iterable[tuple[int, re.Match[str]]]:
    with path.open(errors="replace") as log:
        for number, line in enumerate(log):
            match = _LINE.match(line)
            if match is not None:  # else a continuation, or another format before the prefix was set
                yield number, match


def _authorize(opening: _Opening, match: re.Match[str]) -> None:
    opening.authorized = True
    opening.user = match["user"]
    opening.database = match["database"] or ""
    opening.application_name = match["application"] or ""
    opening.walsender = match["walsender"] is not None


def _forget(open_now: dict[int, _Opening], pid: int, done: list[Interval]) -> None:
    """The pid is used anew, or the log ends: what is known of the old session is final."""
    opening = open_now.pop(pid, None)
    if opening is None or not opening.authorized:
        return
    at, line = opening.fatal or (None, None)
    done.append(opening.ended(pid, at, line))
