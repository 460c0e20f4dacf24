"""`pooler ticket`: what became of a transaction that its client named."""

from __future__ import annotations

import sys
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
    from pooler.cli.reach import Where

app = typer.Typer(
    help="Transactions that clients named.", epilog="Example: pooler ticket show orders pay-4711",
    no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


@app.command()
def show(
    db: DbArgument,
    ticket: Annotated[str, typer.Argument(metavar="ID", help="The name that the client gave.")],
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
    as_json: JsonOption = False,
) -> None:
    """Show state and outcome of a named transaction. Exits 1 where nobody gave that name within 24 hours.

    Reads etcd itself, so it works with every process of the fleet dead, unless that etcd is `embedded`.

    Example: pooler ticket show orders pay-4711
    """
    import trio

    from coordinator.ledger.tickets import id_fault
    from pooler.cli.out import duration, print_json, print_table
    from pooler.cli.reach import Where, now_us
    from pooler.errors import UsageFault

    fault = id_fault(ticket)
    if fault:
        raise UsageFault(f"ID: {fault}")
    name, row = trio.run(_read, Where(config, etcd, fleet, prefix), db, ticket)
    if row is None:
        print(f'{name}: no ticket "{ticket}"', file=sys.stderr)
        raise typer.Exit(1)
    if as_json:
        print_json(row)
        return
    age = duration(max(0, now_us() - row["changed_at_us"]) / 1e6)
    print_table(
        ("TICKET", "STATE", "OUTCOME", "AGE", "ATTEMPT", "WORKER", "HOST", "CLIENT", "TENANT", "PERMIT",
         "PID"),
        [(row["ticket"], row["state"], row["outcome"], age, row["attempt"], row["worker"][:8], row["host"],
          row["client"], row["tenant"], row["permit"], row["pid"] or "")], 3)


async def _read(where: Where, name: str, ticket: str) -> tuple[str, dict[str, Any] | None]:
    """(the ledger's name, what stands there under that name)."""
    from coordinator.tickets import Tickets
    from coordinator.worker_tickets import row_of
    from pooler.cli.reach import now_us, reach, say_lost

    async with reach(where) as reached:
        db = reached.db(name)
        ledger = reached.ledger(db)
        await ledger.snapshot()
        if ledger.lost:
            say_lost(db)
        found = await Tickets(reached.store, reached.keys, now_us).find(db, ticket)
        return db, row_of(db, found) if found is not None else None
