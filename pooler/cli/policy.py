"""`pooler policy`: a policy is checked, published, tried beside the active one, promoted, and taken back."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pooler.cli.options import (
    ConfigOption,
    DbArgument,
    EtcdOption,
    FleetOption,
    JsonOption,
    PrefixOption,
)
from pooler.cli.policy_show import show

if TYPE_CHECKING:
    from coordinator.ledger.snapshot import Held
    from pooler.cli.policy_run import Moved, Order
    from pooler.cli.reach import Where

EXIT_REFUSED = 1
EXIT_TIMED_OUT = 4

app = typer.Typer(
    help="The policies: how many sessions there may be, and whose.",
    epilog="Example: pooler policy publish policies/orders.yaml", no_args_is_help=True, rich_markup_mode=None)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A dbAdmissionPolicy.v1 document.")]
GenerationArgument = Annotated[int, typer.Argument(metavar="GEN", min=1, help="A published generation.")]


@app.callback()
def _group() -> None:
    pass


app.command("show")(show)


@app.command()
def validate(file: FileArgument, as_json: JsonOption = False) -> None:
    """Check a policy file by itself; tell every fault at once, each with its path and both numbers.

    Reads nothing but the file. Exits 0 if it is valid, 1 if not.

    Example: pooler policy validate policies/orders.yaml
    """
    from coordinator.policy import PolicyRefused, load_policy
    from pooler.cli.out import print_json
    from pooler.cli.policy_run import text_of

    try:
        policy, _ = load_policy(text_of(file))
    except PolicyRefused as refused:
        if as_json:
            print_json({"file": str(file), "ok": False, "faults": refused.faults})
        else:
            print("\n".join(f"pooler: {file}: {fault}" for fault in refused.faults), file=sys.stderr)
        raise typer.Exit(EXIT_REFUSED) from None
    if as_json:
        print_json({"file": str(file), "ok": True, "faults": [], "database": policy.database,
                    "generation": policy.generation})
    else:
        print(f"{file}: {policy.database}, generation {policy.generation}: ok")


@app.command()
def publish(
    file: FileArgument,
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
    as_json: JsonOption = False,
) -> None:
    """Publish a policy as an immutable generation, once the servers have room for it.

    The first one of a database is active at once; a later one changes nothing before `promote`. It is held
    beside the live servers together with every ledger that may meet it there; that look takes an admin
    permit, and is left out with --etcd, where no monitor is known. Prints the CONNECTION LIMIT statements
    that go with it. Publishing the same generation with the same content again does nothing.

    Exits 0 when it is published, 1 if it was refused: each violation is named with both numbers.

    Example: pooler policy publish policies/orders.yaml
    """
    import trio

    from pooler.cli.out import print_json
    from pooler.cli.policy_run import publish_file
    from pooler.cli.reach import Where

    done = trio.run(publish_file, Where(config, etcd, fleet, prefix), file)
    if as_json:
        print_json(done)
        return
    _warn(done["not_checked"])
    now = "published" if done["published"] else "is published already, with the same content"
    active, generation, name = done["active"], done["generation"], done["database"]
    ahead = "it is active" if active == generation else (
        f"generation {active} is active; next: pooler policy shadow (or promote) {name} {generation}")
    print(f"{name}: generation {generation} {now}; {ahead}")
    if done["statements"]:
        print("-- for a superuser on the primary, so that the server itself holds the fleet to it:")
        print("\n".join(done["statements"]))


@app.command()
def shadow(
    db: DbArgument, generation: GenerationArgument, config: ConfigOption = None, etcd: EtcdOption = None,
    fleet: FleetOption = None, prefix: PrefixOption = "pooler", as_json: JsonOption = False,
) -> None:
    """Let a published generation decide beside the active one: its decisions are counted, and grant nothing.

    `pooler policy show` tells how often only one of the two would have granted. Exits 0 when it is the
    shadow, 1 if that was refused.

    Example: pooler policy shadow orders 28
    """
    from coordinator.policy_moves import plan_shadow
    from pooler.cli.policy_run import Order
    from pooler.cli.reach import Where

    order = Order(lambda role: partial(plan_shadow, generation=generation))
    _move(Where(config, etcd, fleet, prefix), db, order, as_json)


@app.command()
def takeover(
    db: DbArgument, generation: GenerationArgument,
    fraction: Annotated[float, typer.Option(
        "--fraction", metavar="F", help="Of the requests, by a hash of each: above 0, at most 1.")] = 0.05,
    config: ConfigOption = None, etcd: EtcdOption = None, fleet: FleetOption = None,
    prefix: PrefixOption = "pooler", as_json: JsonOption = False,
) -> None:
    """Let the shadow grant a fraction of the traffic of a database of role read.

    Both generations share the same slots: together they hold no more than the larger of them allows. Traffic
    that writes is never taken over in part. Exits 0 when it grants, 1 if that was refused.

    Example: pooler policy takeover orders_ro 28 --fraction 0.05
    """
    from coordinator.policy_moves import plan_takeover
    from pooler.cli.policy_run import Order
    from pooler.cli.reach import Where
    from pooler.errors import UsageFault

    if not 0 < fraction <= 1:  # nor what is no number
        raise UsageFault(f"--fraction {fraction:g}: must be above 0 and at most 1")
    order = Order(lambda role: partial(plan_takeover, generation=generation, fraction=fraction, role=role),
                  generation, new_counts=False)
    _move(Where(config, etcd, fleet, prefix), db, order, as_json)


@app.command()
def promote(
    db: DbArgument, generation: GenerationArgument, config: ConfigOption = None, etcd: EtcdOption = None,
    fleet: FleetOption = None, prefix: PrefixOption = "pooler", as_json: JsonOption = False,
) -> None:
    """Put a published generation in force: everything is granted by it from now on.

    Workers follow without a restart. With fewer permits than before, sessions in slots that it does not have
    move to lower ones, or end as they fall idle; nothing is granted before they are gone. Exits 0 when it is
    active, 1 if that was refused.

    Example: pooler policy promote orders 28
    """
    from coordinator.policy_moves import plan_promote
    from pooler.cli.policy_run import Order
    from pooler.cli.reach import Where

    order = Order(lambda role: partial(plan_promote, generation=generation), generation)
    _move(Where(config, etcd, fleet, prefix), db, order, as_json)


@app.command()
def rollback(
    db: DbArgument,
    timeout: Annotated[str, typer.Option(
        "--timeout", metavar="DURATION", help="How long to wait for its sessions to end.")] = "60s",
    config: ConfigOption = None, etcd: EtcdOption = None, fleet: FleetOption = None,
    prefix: PrefixOption = "pooler", as_json: JsonOption = False,
) -> None:
    """Undo the last move: the shadow goes, or the generation that was active before comes back.

    Nothing more is granted under the newer generation at once; the sessions that it granted are given up as
    they fall idle, and each must be proven gone; then the alias moves. Clients are served on meanwhile.

    Exits 0 when all of that is done, 1 if there is nothing to roll back, 4 when the time is over: nothing is
    granted under that generation, and the same command goes on from there.

    Example: pooler policy rollback orders
    """
    from coordinator.policy_moves import plan_rollback
    from pooler.cli.options import seconds_of
    from pooler.cli.out import print_json
    from pooler.cli.policy_run import Order
    from pooler.cli.reach import Where

    order = Order(lambda role: plan_rollback, seconds=seconds_of("--timeout", timeout))
    moved = _move(Where(config, etcd, fleet, prefix), db, order, as_json)
    if moved.alias is None and as_json:
        print_json({"database": moved.db, "timed_out": True})
    if moved.alias is None:
        print(f"pooler: {moved.db}: not all of those sessions have ended in {timeout}; nothing is granted "
              f"under that generation any more, and `pooler policy rollback {db}` goes on", file=sys.stderr)
        raise typer.Exit(EXIT_TIMED_OUT)


def _move(where: Where, db: str, order: Order, as_json: bool) -> Moved:
    """Carry it out, and tell where the policies stand then."""
    import trio

    from pooler.cli.out import print_json
    from pooler.cli.policy_run import left_text, move
    from pooler.cli.policy_show import alias_map, alias_text

    said: list[str] = []

    def tell(name: str, generation: int, left: list[Held]) -> None:
        line = f"{name}: generation {generation} grants nothing any more: {left_text(left)}"
        if not as_json and said[-1:] != [line]:
            print(line, flush=True)
            said.append(line)

    moved = trio.run(move, where, db, order, tell)
    _warn(moved.not_checked)
    if moved.alias is not None and as_json:
        print_json({"database": moved.db, **alias_map(moved.alias)})
    elif moved.alias is not None:
        print(f"{moved.db}: {alias_text(moved.alias)}")
    return moved


def _warn(lines: list[str] | tuple[str, ...]) -> None:
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)
