"""`pooler drain`: the planned failover of one database."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pooler.cli.options import ConfigOption, DbArgument, JsonOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.drain import DrainOutcome
    from coordinator.drain_target import Order
    from pooler.cli.reach import Where

AFTER_CANCEL_SECONDS = 10.0  # for the sessions to end with proof, and for the promotion


def drain(
    db: DbArgument,
    to: Annotated[str | None, typer.Option(
        "--to", metavar="HOST:PORT", help="Where to go; default: whichever host is the primary now.")] = None,
    run: Annotated[str | None, typer.Option(
        "--run", metavar="CMD", help="A shell command that promotes the target once all is drained.")] = None,
    switch_first: Annotated[bool, typer.Option(
        "--switch-first", help="Grant at the target at once; the old epoch drains behind it.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Give up the drain that is under way.")] = False,
    timeout: Annotated[str | None, typer.Option(
        "--timeout", metavar="DURATION", help="After that the old epoch is active again; default: "
        "failover.drain_timeout and 10 s. With less nothing that runs is cancelled for the drain.")] = None,
    evidence: Annotated[str, typer.Option(
        "--evidence", metavar="TEXT", help="With --abort, where a promotion was ordered and its command is "
        "gone: how you know that the target is no primary and will be none. Kept for ever.")] = "",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a database to another server (or renew all its sessions) without losing a transaction.

    The old epoch stops granting, its sessions end with proof, the promotion runs, then the next epoch grants;
    clients stay connected and wait. Only exit 0 may gate a promotion that is done elsewhere.

    Exits 0 drained, 1 target unfit or no admin permit free, and nothing changed, 3 only sessions in
    SESSION_UNKNOWN are left (the line that resolves them is printed), 4 timed out and the old epoch is active
    again (if the target was promoted by then, the next one is: `pooler ledger show DB` says which).

    Example: pooler drain orders --to 10.0.0.12:5432 --run 'ssh db2 pg_ctl promote -D /data' --timeout 60s
    """
    import trio

    from pooler.cli.reach import Where

    where = Where(config)
    if abort:
        raise typer.Exit(trio.run(_abort, where, db, evidence))
    outcome = trio.run(_drain, where, db, to, run, switch_first, timeout, _teller(as_json))
    _tell(outcome, as_json)
    raise typer.Exit(int(outcome.code))


async def _drain(
    where: Where, name: str, to: str | None, run: str | None, switch_first: bool, timeout: str | None,
    tell: Callable[[dict[str, Any]], None],
) -> DrainOutcome:
    from coordinator.drain import drain as carry_out
    from pooler.cli.options import seconds_of
    from pooler.cli.reach import now_us, reach
    from pooler.errors import UsageFault

    seconds = seconds_of("--timeout", timeout) if timeout is not None else None
    target = _target(to)
    async with reach(where) as reached:
        db = reached.db(name)
        ledger = await reached.whole_ledger(db)
        order = _order(where, db, target, run, switch_first, seconds)
        async with reached.eyes(db) as eyes:
            if eyes is None:
                raise UsageFault(f"a drain must look at the servers: set `monitor` for a database of {db}")
            return await carry_out(
                reached.store, reached.keys, ledger, eyes, order, progress=tell, now_us=now_us,
                run_dir=reached.run_dir)


def _target(to: str | None) -> str | None:
    from pooler.errors import UsageFault
    from pooler.settings import Address

    try:
        return str(Address.parse(to)) if to is not None else None
    except ValueError as fault:
        raise UsageFault(f"--to: {fault}") from None


def _order(
    where: Where, db: str, target: str | None, run: str | None, switch_first: bool, seconds: float | None
) -> Order:
    from functools import partial

    from coordinator.drain_target import Order
    from pooler.cli.options import settings_of
    from pooler.errors import UsageFault

    settings = settings_of(where.config)
    mine = [database for database in settings.databases.values() if database.ledger == db]
    if not mine:
        raise UsageFault(f"no database of the config points to ledger {db}")
    hosts = list(dict.fromkeys(str(host) for database in mine for host in database.hosts))
    promote = partial(_promote, run) if run is not None else None
    whole, grace = drain_times(seconds, settings.failover.drain_timeout_seconds)
    return Order(db, mine[0].role, hosts, target, promote, switch_first, whole, grace,
                 settings.etcd.lease_ttl_seconds)


def drain_times(timeout_seconds: float | None, drain_timeout_seconds: float) -> tuple[float, float]:
    """(when the command gives up, when what still runs is cancelled), both in seconds from its start.

    Never both at about the same moment: either what was cancelled has the time to close, be proven gone and
    be followed by the promotion, or nobody is cancelled for a drain that is given up.
    """
    if timeout_seconds is None:
        return drain_timeout_seconds + AFTER_CANCEL_SECONDS, drain_timeout_seconds
    if timeout_seconds >= drain_timeout_seconds + AFTER_CANCEL_SECONDS:
        return timeout_seconds, drain_timeout_seconds
    return timeout_seconds, max(drain_timeout_seconds, timeout_seconds + AFTER_CANCEL_SECONDS)


async def _promote(command: str) -> int:
    """Run the operator's own command line; its output goes to stderr, so that stdout stays ours."""
    import trio

    argv = ["/bin/sh", "-c", command]
    done = await trio.run_process(argv, check=False, stdout=sys.stderr.fileno(), stdin=b"")
    return done.returncode


async def _abort(where: Where, name: str, evidence: str) -> int:
    from coordinator.drain_abort import abort
    from coordinator.epoch import MayBePromoted
    from pooler.cli.reach import now_us, operator_name, reach

    async with reach(where) as reached:
        db = reached.db(name)
        await reached.whole_ledger(db)
        why = "no drain is under way"
        try:
            if await abort(reached.store, reached.keys, db, now_us=now_us, who=operator_name(),
                           evidence=evidence):
                print(f"{db}: the drain is given up; the old epoch is active again")
                return 0
        except MayBePromoted as too_late:
            why = str(too_late)
        print(f"{db}: {why}", file=sys.stderr)
        return 1


def _teller(as_json: bool) -> Callable[[dict[str, Any]], None]:
    def as_line(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)

    def as_text(found: dict[str, Any]) -> None:
        print(progress_text(found), flush=True)

    return as_line if as_json else as_text


def progress_text(found: dict[str, Any]) -> str:
    """One line of progress for people."""
    old = found.get("old")
    if old is None:
        return str(found["step"])
    line = (f"{found['elapsed_seconds']:6.1f} s  {found['step']}: epoch {found['epoch']} {old['idle']} idle, "
            f"{old['busy']} busy, {old['other']} opening or closing, {old['unknown']} unknown; "
            f"next epoch {found['new_open']} open")
    longest = found.get("longest")
    if longest:
        line += f"; longest: pid {longest['pid']} ({longest['user']}, {longest['age_seconds']:.1f} s)"
    for each in found.get("waits_for", ()):
        who = f"worker {each['index']} on {each['host']} (pid {each['pid']})"
        line += f"\n          waits for {who}: {each['why']}"
    return line


def _tell(outcome: DrainOutcome, as_json: bool) -> None:
    if as_json:
        print(json.dumps({
            "code": int(outcome.code), "text": outcome.text, "epoch": outcome.epoch,
            "backend": outcome.backend.address if outcome.backend else None, "unknown": list(outcome.unknown),
            "not_acknowledged": list(outcome.not_acknowledged),
            "waits_for": [each.as_dict() for each in outcome.waits_for], "resolve": outcome.resolve}))
        return
    print(outcome.text, file=sys.stdout if outcome.code == 0 else sys.stderr)
    if outcome.unknown:
        print(f"unknown: {', '.join(outcome.unknown)}", file=sys.stderr)
    for each in outcome.waits_for:
        print(f"not acknowledged by {each}", file=sys.stderr)
    if outcome.resolve:
        print(outcome.resolve, file=sys.stderr)
