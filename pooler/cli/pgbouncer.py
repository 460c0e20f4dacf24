"""`pooler pgbouncer`: PgBouncer's own command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXIT_FATAL = 1  # PgBouncer's for everything, wrong usage included


def _print_version(wanted: bool) -> None:
    if wanted:
        import ssl
        from importlib.metadata import version

        from pooler.console.as_pgbouncer import VERSION

        print(VERSION)
        print(f"trio {version('trio')}\nadns: system\ntls: {ssl.OPENSSL_VERSION}\nsystemd: yes")
        raise typer.Exit()


def pgbouncer(
    file: Annotated[str, typer.Argument(metavar="FILE.ini", show_default=False)] = "",
    daemon: Annotated[bool, typer.Option("--daemon", "-d", help="Run in the background.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log to the logfile alone.")] = False,
    reboot: Annotated[bool, typer.Option("--reboot", "-R", help="Take over from one that runs.")] = False,
    user: Annotated[str, typer.Option("--user", "-u", metavar="USERNAME", help="Run as this user.")] = "",
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log more.")] = 0,
    version: Annotated[bool, typer.Option(
        "--version", "-V", is_eager=True, callback=_print_version, help="Print the version.")] = False,
) -> None:
    """Run an existing PgBouncer ini and its userlist as they are, on the same ports and sockets.

    Signals: HUP reloads, TERM waits for clients and ends, INT waits for servers and ends, QUIT ends at once,
    USR1 pauses, USR2 resumes. The ledger is an etcd of its own, or the one at POOLER_ETCD (host:port, ...);
    POOLER_WORKERS sets the number of processes that serve (1).

    Example: pooler pgbouncer -d /etc/pgbouncer/pgbouncer.ini
    """
    from pooler.cli.ends import end_of

    if not file:
        print('pooler pgbouncer: no configuration file specified\n'
              'Try "pooler pgbouncer --help" for more information.', file=sys.stderr)
        raise typer.Exit(EXIT_FATAL)

    def run() -> None:
        from pooler.dropin.launch import run_as_pgbouncer
        from pooler.dropin.setup import Launch

        run_as_pgbouncer(Launch(file, Path.cwd(), quiet, daemon, reboot, verbose, user))

    raise typer.Exit(EXIT_FATAL if end_of(run) else 0)
