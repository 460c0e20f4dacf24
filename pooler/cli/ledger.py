"""`pooler ledger`: what the ledger holds, whether it agrees with the server, and what an operator attests."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pooler.cli.audit import audit, explain
from pooler.cli.death import attest
from pooler.cli.options import (
    ConfigOption,
    DbArgument,
    EtcdOption,
    FleetOption,
    JsonOption,
    PrefixOption,
)
from pooler.cli.rebuild import rebuild
from pooler.cli.watch import watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.inspect import Resolved, Sum
    from coordinator.ledger.record import Permit
    from coordinator.ledger.snapshot import LedgerSnapshot
    from pooler.cli.reach import Reached, Where

app = typer.Typer(
    help="The ledger of session permits.", epilog="Example: pooler ledger show orders",
    no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


app.command("audit")(audit)
app.command("explain")(explain)
app.command("rebuild")(rebuild)
app.command("watch")(watch)


@app.command()
def show(
    db: DbArgument,
    state: Annotated[str | None, typer.Option(
        "--state", metavar="STATE",
        help="Only permits in this state: SESSION_UNKNOWN, OPEN_BUSY, … (or unknown, busy).")] = None,
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
    as_json: JsonOption = False,
) -> None:
    """Show a sum line, then every session permit, unknown ones first. A --state that there is not exits 2.

    Reads etcd itself, so it works with every process of the fleet dead, unless that etcd is `embedded`.

    Example: pooler ledger show orders --state SESSION_UNKNOWN
    """
    from dataclasses import asdict

    import trio

    from pooler.cli.out import print_json, print_table
    from pooler.cli.reach import Where

    states = None if state is None else states_meant(state)
    name, rows, found = trio.run(read_rows, Where(config, etcd, fleet, prefix), db)
    wanted = [row for row in rows if states is None or row["state"] in states]
    if as_json:
        print_json({"database": name, "sum": {**asdict(found), "line": found.line()}, "permits": wanted})
        return
    print(f"{name}: {found.line()}")
    if wanted:
        print_table(HEAD, cells(wanted), WHOLE)


HEAD = ("PERMIT", "STATE", "AGE", "OWNER", "HOST", "POOL", "PID", "EPOCH", "TICKET", "AWAITS")
WHOLE = 2  # the first columns, which other commands are given, are never cut


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """The lines of a table of permits."""
    from pooler.cli.out import duration

    return [(row["permit"], row["state"], duration(row["age_seconds"]), row["owner"][:8], row["host"],
             f"{row['user']}@{row['dbname']}", row["pid"] or "", row["epoch"], row["ticket"],
             row["awaited_proof"]) for row in rows]


def states_meant(wanted: str) -> frozenset[str]:
    """The states as rows show them that a word means: SESSION_UNKNOWN, unknown, OPEN (any), busy. Raises
    UsageFault naming all of them."""
    from difflib import get_close_matches

    from coordinator.inspect import SHOWN_STATES
    from pooler.errors import UsageFault

    word = wanted.upper()
    found = frozenset(
        state for state in SHOWN_STATES
        if word in (state, state.removeprefix("SESSION_"), state.removeprefix("OPEN_"))
        or (word == "OPEN" and state.startswith("OPEN_")))
    if not found:
        near = get_close_matches(word, SHOWN_STATES, 1)
        raise UsageFault(f'--state: "{wanted}" is no state: one of {", ".join(SHOWN_STATES)}'
                         + (f"; did you mean {near[0]}?" if near else ""))
    return found


def permit_named(text: str) -> Permit:
    """The permit that an argument names. Raises UsageFault."""
    from coordinator.ledger.record import Kind, Permit
    from pooler.errors import UsageFault

    try:
        return Permit.parse(text)
    except ValueError:
        raise UsageFault(
            f'PERMIT: "{text}" is no permit: write it as ledger show does, KIND/SLOT.GENERATION '
            f"(main/17.4711), where KIND is one of {', '.join(Kind)}") from None


async def read_rows(where: Where, name: str) -> tuple[str, list[dict[str, Any]], Any]:
    """(the ledger's name, a row per permit, the sum of them)."""
    from pooler.cli.reach import reach, say_lost

    async with reach(where) as reached:
        db = reached.db(name)
        ledger = reached.ledger(db)
        snapshot = await ledger.snapshot()
        if ledger.lost:
            say_lost(db)
        for each in snapshot.strange:
            print(f"{db}: unreadable: {each}", file=sys.stderr)
        return db, *await rows_of(reached, db, snapshot)


async def rows_of(reached: Reached, db: str, snapshot: LedgerSnapshot) -> tuple[list[dict[str, Any]], Sum]:
    """(a row per permit, the sum of them), with what the leader says of those that are unknown."""
    from coordinator import inspect
    from coordinator.awaiting import read_awaited
    from coordinator.reach import hosts_present
    from pooler.cli.reach import now_us

    activities = inspect.read_activities(reached.run_dir) if reached.run_dir else {}
    leader, waits = await read_awaited(reached.store, reached.keys, db)
    hosts = await hosts_present(reached.store, reached.keys)
    rows = inspect.session_rows(db, snapshot, activities, now_us(), waits, hosts)
    for row in rows:
        row["told_by"] = leader if row["permit"] in waits else ""
    return rows, inspect.sum_up(snapshot, rows)


@app.command()
def resolve(
    db: DbArgument,
    permit: Annotated[str | None, typer.Argument(metavar="[PERMIT]", help="kind/slot.generation")] = None,
    epoch: Annotated[int | None, typer.Option(
        "--epoch", metavar="N", help="Every unknown permit of epochs up to this.")] = None,
    backend: Annotated[str | None, typer.Option("--backend", metavar="HOST:PORT")] = None,
    owner: Annotated[str | None, typer.Option("--owner", metavar="BOOT", help="A worker's boot id.")] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="H", help="The host of the workers.")] = None,
    dead: Annotated[bool, typer.Option(
        "--dead", help="With --owner: only say that its process has ended; looks prove the rest.")] = False,
    evidence: Annotated[str, typer.Option(
        "--evidence", metavar="TEXT", help="Why they are known to be gone; kept for ever.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
    as_json: JsonOption = False,
) -> None:
    """Free permits in SESSION_UNKNOWN on your word, where no proof can be had.

    Shows what will be freed and asks. Refused for a session that a look at its server can see; the look takes
    an admin permit. Exits 0 when all of them are free, 1 if one is not, or when no admin permit is free.

    With --owner and --dead nothing is freed: the owner's death is put on record, as its supervisor would, and
    its permits without a server process can then be proven by looks. Refused while its process or its worker
    key can be seen.

    Example: pooler ledger resolve orders main/17.4711 --evidence 'node db1 powered off, ticket OPS-12'
    """
    import trio

    from pooler.cli.out import print_json
    from pooler.cli.reach import Where
    from pooler.errors import UsageFault

    if sum(given is not None for given in (permit, epoch, backend, owner, host)) != 1:
        raise UsageFault("name what to resolve: one of PERMIT, --epoch, --backend, --owner, --host")
    if not evidence.strip():
        raise UsageFault("--evidence: is required: how do you know that these sessions are gone?")
    if permit is not None:
        permit_named(permit)
    if dead:
        if owner is None:
            raise UsageFault("--dead: goes with --owner: whose process has ended?")
        raise typer.Exit(attest(Where(config, etcd, fleet, prefix), db, owner, evidence))
    choice = {"permit": permit, "epoch": epoch, "backend": backend, "owner": owner, "host": host}
    resolved = trio.run(_resolve, Where(config, etcd, fleet, prefix), db, choice, evidence, yes)
    if as_json:
        print_json([{"permit": str(each.permit), "freed": each.freed, "why": each.why} for each in resolved])
    else:
        for each in resolved:
            print(f"{each.permit}: {'freed' if each.freed else 'not freed'} ({each.why})")
    raise typer.Exit(0 if all(each.freed for each in resolved) else 1)


async def _resolve(
    where: Where, name: str, choice: dict[str, Any], evidence: str, yes: bool
) -> Sequence[Resolved]:
    from coordinator import inspect
    from pooler.cli.reach import now_us, operator_name, reach

    async with reach(where) as reached:
        db = reached.db(name)
        ledger = await reached.whole_ledger(db)
        snapshot = await ledger.snapshot()
        permits = chosen(snapshot, choice)
        if not permits:
            print("nothing to resolve: no such permit is in SESSION_UNKNOWN", file=sys.stderr)
            return []
        if not yes:
            _ask(db, permits, snapshot)
        async with reached.eyes(db) as eyes:
            return await inspect.resolve(
                reached.store, reached.keys, ledger, permits, who=operator_name(), evidence=evidence,
                eyes=eyes, now_us=now_us)


def chosen(snapshot: LedgerSnapshot, choice: dict[str, Any]) -> list[Permit]:
    """The permits that the one given option of `choice` means. A single PERMIT is taken in any state."""
    from coordinator.ledger.states import SessionState

    if choice["permit"] is not None:
        return [permit_named(choice["permit"])]
    found = []
    for held in snapshot.sessions:
        session = held.session
        address = session.backend.address if session.backend else ""
        if session.state is SessionState.UNKNOWN and (
            (choice["epoch"] is not None and session.epoch <= choice["epoch"])
            or (choice["backend"] is not None and address == choice["backend"])
            or (choice["owner"] is not None and session.owner == choice["owner"])
            or (choice["host"] is not None and session.host == choice["host"])
        ):
            found.append(session.permit)
    return found


def _ask(db: str, permits: Sequence[Permit], snapshot: LedgerSnapshot) -> None:
    from pooler.errors import UsageFault

    print(f"{db}: these permits would be freed on your word:", file=sys.stderr)
    for permit in permits:
        held = snapshot.find(permit)
        if held is not None:
            where = held.session.backend.address if held.session.backend else "no server"
            print(f"  {permit}  {held.session.state}  pid {held.session.pid} at {where}, "
                  f"owner {held.session.owner} on {held.session.host}", file=sys.stderr)
    if not sys.stdin.isatty():
        raise UsageFault("nobody is here to be asked: repeat it with --yes")
    typer.confirm("Are you sure that none of these sessions exists any more?", abort=True, err=True)
