"""`pooler ledger watch`: the ledger live, and what changes in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    Elsewhere, and with --json (one object a line), the sum line at first and then a line for each change.

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

    before: Rows = ()
    async for rows, found in _each(reached, db):
        if as_json:
            at = time.time()
            lines = [json.dumps({"at": at, "database": db, **each}) for each in changes(before, rows)]
        else:
            at_text = time.strftime("%H:%M:%S")
            lines = [f"{at_text} {told(each)}" for each in changes(before, rows)]
            lines += [f"{at_text} {db}: {found.line()}"] if lines or not before else []
        before = rows
        for line in lines:
            print(line, flush=True)


async def _redraw(reached: Reached, db: str) -> None:
    import time

    from rich.live import Live
    from rich.text import Text

    from pooler.cli.ledger import HEAD, cells
    from pooler.cli.out import table_lines

    before: Rows | None = None
    latest: list[str] = []
    with Live(auto_refresh=False, screen=False) as live:
        async for rows, found in _each(reached, db):
            if before is not None:
                latest += [f"{time.strftime('%H:%M:%S')} {told(each)}" for each in changes(before, rows)]
            before, latest = rows, latest[-10:]
            table = table_lines(HEAD, cells([dict(row) for row in rows[:ROWS_MAX]])) if rows else []
            live.update(Text("\n".join([f"{db}: {found.line()}", *table, "", *latest])), refresh=True)


async def _each(reached: Reached, db: str) -> Any:
    """(rows, sum) now, and whenever something of it may have changed; etcd may be away meanwhile."""
    import sys

    import trio

    from coordinator.store.api import StoreUnavailable, StoreUnknown
    from pooler.cli.ledger import rows_of

    away = False
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
            yield found
        await trio.sleep(LOOK_SECONDS)  # noqa: TID251 - the tables of the workers tell nobody
