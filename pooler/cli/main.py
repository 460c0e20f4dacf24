"""`pooler`: the commands, and the one place where an error becomes a message and an exit code.

Nothing heavy is imported here: each command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pooler.cli import config, demo, drain, fleet, haproxy, init, ledger, pgbouncer, plan, policy, ticket
from pooler.cli.ends import EXIT_FAILED, EXIT_USAGE, end_of

app = typer.Typer(
    name="pooler",
    help="A PostgreSQL connection-pooler fleet with one budget of server sessions.",
    epilog="Example: pooler demo    (everything on one machine, nothing configured)",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"pooler {version('pooler')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option(
        "--version", "-V", is_eager=True, callback=_print_version,
        help="Print the version and exit.")] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("init")(init.init)
app.command("plan")(plan.plan)
app.command("drain")(drain.drain)
app.command("pgbouncer")(pgbouncer.pgbouncer)
app.add_typer(fleet.app, name="fleet")
app.add_typer(ledger.app, name="ledger")
app.add_typer(policy.app, name="policy")
app.add_typer(ticket.app, name="ticket")
app.add_typer(config.app, name="config")
app.add_typer(haproxy.app, name="haproxy")


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    return end_of(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    from typer._click import exceptions as click

    try:
        code = app(list(arguments), standalone_mode=False)
    except click.NoArgsIsHelpError as help_:
        help_.show()
        return EXIT_USAGE
    except click.UsageError as fault:
        _show_usage(fault)
        return pgbouncer.EXIT_FATAL if arguments[0] == "pgbouncer" else EXIT_USAGE
    except click.ClickException as fault:
        print(f"pooler: {fault.format_message()}", file=sys.stderr)
        return EXIT_FAILED
    except typer.Abort:
        print("pooler: stopped: nothing was changed", file=sys.stderr)
        return EXIT_FAILED
    except typer.Exit as end:
        return end.exit_code
    return code if isinstance(code, int) else 0


def _show_usage(fault: object) -> None:
    message = fault.format_message()  # type: ignore[attr-defined]  # click's type is private to typer
    context = getattr(fault, "ctx", None)
    path = context.command_path if context is not None else "pooler"
    print(f"{path}: {message}\nTry `{path} --help`.", file=sys.stderr)


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
