"""`pooler ledger watch`: the ledger live, and what changes in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pooler.cli.options import (
    ConfigOption,
    DbArgument,
    EtcdOption,
    FleetOption,
    JsonOption,
    PrefixOption,
)

if TYPE_CHECKING:
    from coordinator.inspect import Sum
    from coordinator.ledger.record import Alias
    from pooler.cli.reach import Reached, Where

LOOK_SECONDS = 1.0  # what the workers' tables show (idle, busy) is in no watch
ROWS_MAX = 200  # of the live table
SHOWN = ("state", "owner", "pid", "ticket", "epoch", "waits_for")

Rows = Sequence[Mapping[str, Any]]


def watch(
    db: DbArgument,
    for_: Annotated[str | None, typer.Option(
        "--for", metavar="DURATION", help="End after so long; else with Ctrl-C.")] = None,
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
    as_json: JsonOption = False,
) -> None:
    """Show the ledger live: on a terminal the table of `ledger show`, redrawn, with the latest changes.

    Elsewhere, and with --json (one object a line), the sum at first and when it changes, and a line for each
    change of a permit or of the policies.

    Example: pooler ledger watch orders --for 1m
    """
    import math

    import trio

    from pooler.cli.options import seconds_of
    from pooler.cli.reach import Where

    seconds = math.inf if for_ is None else seconds_of("--for", for_)
    trio.run(_watch, Where(config, etcd, fleet, prefix), db, seconds, as_json)


def changes(before: Rows, after: Rows) -> list[dict[str, Any]]:
    """What is otherwise, one entry per permit: {permit, was, is} of what is shown of it; None: not there."""
    old = {row["permit"]: row for row in before}
    new = {row["permit"]: row for row in after}
    found = []
    for permit in sorted({*old, *new}):
        was, now = (_shown(each.get(permit)) for each in (old, new))
        if was != now:
            found.append({"permit": permit, "was": was, "is": now})
    return found


def _shown(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {name: row[name] for name in SHOWN}


def told(change: Mapping[str, Any]) -> str:
    """One change for people."""
    was, now = change["was"], change["is"]
    if now is None:
        return f"{change['permit']}: {was['state']} -> free"
    lines = f"{change['permit']}: " + ("" if was is None else f"{was['state']} -> ") + str(now["state"])
    facts = [f"owner {now['owner'][:8]}", f"pid {now['pid']}" if now["pid"] else "",
             f"ticket {now['ticket']}" if now["ticket"] else "",
             f"waits for {now['waits_for']}" if now["waits_for"] else ""]
    return f"{lines} ({', '.join(fact for fact in facts if fact)})"


class Latest:
    """What was shown last of a ledger: `news` tells what is otherwise."""

    def __init__(self, db: str) -> None:
        self._db = db
        self._rows: Rows = ()
        self._sum: Sum | None = None
        self._alias: Alias | None = None

    def news(self, rows: Rows, found: Sum, alias: Alias | None) -> list[dict[str, Any]]:
        """The sum first and when it changes (an age alone is no change), then the policies when they change,
        then each permit."""
        from pooler.cli.policy_show import alias_map, alias_text

        said: list[dict[str, Any]] = []
        ageless = replace(found, oldest_unknown_seconds=found.oldest_unknown_seconds and 1.0)
        if ageless != self._sum:
            said.append({"sum": {**asdict(found), "line": found.line()}})
        if alias is not None and alias != self._alias and self._sum is not None:
            said.append({"policy": {**alias_map(alias), "line": alias_text(alias)}})
        said += changes(self._rows, rows)
        self._rows, self._sum, self._alias = rows, ageless, alias
        return said


def text_of(db: str, news: Mapping[str, Any]) -> str:
    """One of them for people."""
    for what in ("sum", "policy"):
        if what in news:
            return f"{db}: {news[what]['line']}"
    return told(news)


async def _watch(where: Where, name: str, seconds: float, as_json: bool) -> None:
    import sys

    import trio

    from pooler.cli.reach import reach

    async with reach(where) as reached:
        db = reached.db(name)
        with trio.move_on_after(seconds):
            if sys.stdout.isatty() and not as_json:
                await _redraw(reached, db)
            else:
                await _print_changes(reached, db, as_json)


async def _print_changes(reached: Reached, db: str, as_json: bool) -> None:
    import json
    import time

    latest = Latest(db)
    async for rows, found, alias in _each(reached, db):
        at, at_text = time.time(), time.strftime("%H:%M:%S")
        for each in latest.news(rows, found, alias):
            if as_json:
                print(json.dumps({"at": at, "database": db, **each}), flush=True)
            else:
                print(f"{at_text} {text_of(db, each)}", flush=True)


async def _redraw(reached: Reached, db: str) -> None:
    import time

    from rich.live import Live
    from rich.text import Text

    from pooler.cli.ledger import HEAD, WHOLE, cells
    from pooler.cli.out import table_lines, terminal_width

    latest, lines, is_first = Latest(db), list[str](), True
    with Live(auto_refresh=False, screen=False) as live:
        async for rows, found, alias in _each(reached, db):
            news = [each for each in latest.news(rows, found, alias) if "sum" not in each and not is_first]
            lines = (lines + [f"{time.strftime('%H:%M:%S')} {text_of(db, each)}" for each in news])[-10:]
            is_first = False
            shown = cells([dict(row) for row in rows[:ROWS_MAX]])
            table = table_lines(HEAD, shown, WHOLE, terminal_width()) if rows else []
            line = found.line() + ("; this ledger is lost" if reached.ledger(db).lost else "")
            live.update(Text("\n".join([f"{db}: {line}", *table, "", *lines])), refresh=True)


async def _each(reached: Reached, db: str) -> Any:
    """(rows, sum, alias of the policies) now, and whenever some of it may have changed; etcd may be away."""
    import sys

    import trio

    from coordinator.store.api import StoreUnavailable, StoreUnknown
    from pooler.cli.ledger import rows_of
    from pooler.cli.reach import say_lost

    away = lost = False
    while True:
        try:
            snapshot = await reached.ledger(db).snapshot()
            found: tuple[list[dict[str, Any]], Sum] = await rows_of(reached, db, snapshot)
        except (StoreUnavailable, StoreUnknown) as why:
            if not away:
                print(f"pooler: {db}: etcd does not answer: {why}", file=sys.stderr, flush=True)
            away = True
        else:
            away = False
            if reached.ledger(db).lost and not lost:
                say_lost(db)
            lost = reached.ledger(db).lost
            yield *found, snapshot.alias
        await trio.sleep(LOOK_SECONDS)  # noqa: TID251 - the tables of the workers tell nobody
