"""`pooler demo`: everything on one machine, with nothing configured."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

HELP = """Run the whole fleet on this machine and show what it promises.

Starts PostgreSQL (a primary and its streaming standby), etcd, two workers and, where it is installed,
HAProxy; moves two tenants' transactions; kills a worker with -9; drains to the standby and promotes it under
load; then audits, and exits 0 only if nothing acknowledged was lost, the budget held and the audit is clean.

Example: pooler demo --seconds 20 --json
"""


def demo(
    seconds: Annotated[float, typer.Option(min=2, max=600, help="How long the load runs at least.")] = 10,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running afterwards.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop what an earlier --keep left running.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    break_: Annotated[str | None, typer.Option(
        "--break", metavar="skip-compare|leak|lost-ack", help="Plant this fault; must exit 1.")] = None,
) -> None:
    from pooler.demo.command import Usage, run_demo, stop_demo

    say = _quiet if as_json else _say
    try:
        code = stop_demo(say) if stop else run_demo(
            say, seconds=seconds, keep=keep, fault=break_, emit=_emit if as_json else None)
    except Usage as fault:
        print(f"pooler demo: {fault}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


demo.__doc__ = HELP


def _say(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    print(json.dumps({"progress": line}), file=sys.stderr, flush=True)


def _emit(document: dict[str, object]) -> None:
    print(json.dumps(document, indent=2))
