"""What `pooler demo` does with its options, and how it tells people."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from psycopg import sql

from pooler.demo.evidence import Evidence, Outcome
from pooler.demo.faults import FAULTS
from pooler.demo.parts import BATCH, CONSOLE, DBNAME, PASSWORDS, SHOP, Parts, is_kept, running, stop_kept
from pooler.demo.process import PartFailed
from pooler.demo.run import Story, Told
from pooler.typed import pooler_command, psql_command

WEB_PATHS = ("/readyz", "/api/ledger", "/metrics")

Say = Callable[[str], None]
Emit = Callable[[dict[str, Any]], None]


class Usage(Exception):
    """Options that do not go together, or a name that is none."""


def run_demo(say: Say, *, seconds: float, keep: bool, fault: str | None, emit: Emit | None) -> int:
    """The whole demonstration. Returns the exit code. Raises Usage."""
    if fault is not None and fault not in FAULTS:
        raise Usage(f"--break {fault}: is not one of {', '.join(FAULTS)}")
    if is_kept():
        raise Usage(f"an earlier --keep still runs; this ends it: {pooler_command()} demo --stop")
    try:
        with running(say, keep=keep, fault=fault) as parts:
            outcome = _tell(parts, say, seconds, keep, fault)
            _report(outcome, say, fault)
            if keep:
                for line in how_to_look(parts):
                    say(line)
    except PartFailed as failed:
        return _give_up(str(failed), say, emit)
    if emit is not None:
        emit({**outcome.to_json(), "fault": fault})
    return 0 if outcome.held else 1


def stop_demo(say: Say) -> int:
    """`--stop`."""
    for line in stop_kept() or ["no demonstration is running"]:
        say(line)
    return 0


def _tell(parts: Parts, say: Say, seconds: float, keep: bool, fault: str | None) -> Outcome:
    told = Story(parts, say, seconds).tell()
    evidence = Evidence(parts, told)
    evidence.living()
    if fault == "lost-ack":
        _delete_acknowledged(parts, told)
    if not keep:
        left = parts.fleet.stop()
        say(f"fleet stopped; processes left behind: {len(left)}")
    return evidence.final(fleet_stopped=not keep)


def _delete_acknowledged(parts: Parts, told: Told) -> None:
    """Forge a lost write: the one acknowledged last."""
    last = max((at, token) for each in told.load["tenants"].values() for token, at in each["acknowledged"])
    with parts.standby.connect(dbname=DBNAME) as connection:
        connection.execute(sql.SQL("DELETE FROM tokens WHERE token = {}").format(sql.Literal(last[1])))


def _report(outcome: Outcome, say: Say, fault: str | None) -> None:
    say("")
    say(f"{'tenant':10} {'transactions':>12} {'per second':>11} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}"
        "  errors")
    for name, each in outcome.tenants.items():
        errors = ", ".join(f"{code} {count}" for code, count in each["errors"].items()) or "none"
        say(f"{name:10} {each['transactions']:>12} {each['per_second']:>11} {each['p50_ms']:>8} "
            f"{each['p99_ms']:>8} {each['max_ms']:>8}  {errors}")
    say("")
    for at, what in outcome.timeline:
        say(f"{at:8.2f} s  {what}")
    say("")
    for verdict in outcome.verdicts:
        say(f"{'ok  ' if verdict.held else 'FAIL'} {verdict.name:8} {verdict.text}")
    failed = [verdict.name for verdict in outcome.verdicts if not verdict.held]
    say("")
    if failed:
        say(f"FAILED: {', '.join(failed)}" + (f" (planted fault: {fault})" if fault else ""))
    elif fault:
        say(f"the planted fault {fault} was not seen")
    else:
        say("nothing acknowledged was lost, the budget held, the audit is clean")


def how_to_look(parts: Parts) -> list[str]:
    """Ready to paste, while it is kept, from the directory it was started in."""
    pooler, config = pooler_command(), shlex.quote(str(parts.fleet.config))
    psql = psql_command(parts.primary.installation.program("psql"))
    base = f"host=127.0.0.1 port={parts.port}"
    shared = f"host=127.0.0.1 port={parts.fleet.ports.listen}"
    web = f"http://127.0.0.1:{parts.fleet.ports.http}"
    return [
        "", "still running; ready to paste:",
        f"  PGPASSWORD={PASSWORDS[SHOP]} {psql} '{base} user={SHOP} dbname={DBNAME}'",
        f"  PGPASSWORD={PASSWORDS[BATCH]} {psql} '{base} user={BATCH} dbname={DBNAME}'",
        f"  PGPASSWORD={PASSWORDS[CONSOLE]} {psql} '{shared} user={CONSOLE} dbname=pooler' -c 'SHOW POOLS'",
        f"  {pooler} ledger show {DBNAME} -c {config}",
        f"  {pooler} fleet status -c {config}",
        *(f"  {web}{path}" for path in WEB_PATHS),
        f"  {pooler} demo --stop",
    ]


def _give_up(text: str, say: Say, emit: Emit | None) -> int:
    say(f"FAILED: {text}")
    if emit is not None:
        emit({"ok": False, "error": text})
    return 1
