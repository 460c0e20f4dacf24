"""Drains: of a primary that is stopped, whose sessions stay unknown until they are proven gone; and the
planned one, to its streaming standby, under fifty writers that must not notice.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.clients import Clients, Told
from chaos.ledger import birth_tag
from chaos.outcome import Outcome
from chaos.world import DBNAME, FLEET, LEASE_SECONDS, PASSWORD, USER, start_etcd, start_fleet, start_server
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.states import SessionState
from pooler.demo import judge, schema
from pooler.demo.fleet import Fleet, import_path
from pooler.demo.judge import ServerSeen, Verdict
from pooler.demo.ledgerwatch import LedgerWatch
from pooler.demo.load import Group
from pooler.demo.postgres import Server, temporary_directory
from pooler.demo.process import has_ended, process_ids
from pooler.demo.serverlog import refusals_from_log, sessions_from_log

PERMITS, WORKERS = 10, 2
WRITERS, WRITERS_BESIDE_A_STOPPED_SERVER = 50, 6
WRITES_AROUND_MIN, AROUND_SECONDS = 300, 2.0
GAP_SECONDS_MAX = 2.0
MORE = {"failover": {"drain_timeout": "3s"}}
UNKNOWN_LEFT = 3
LEASES_HELD = 4  # an unknown permit is watched for so long: time alone must not free it
TOO_LONG_SECONDS = 90.0


@dataclass(slots=True)
class Pair:
    """A primary, its standby, and a fleet that knows both."""

    directory: Path
    primary: Server
    standby: Server
    fleet: Fleet
    watch: LedgerWatch

    def wait(self, fact: Callable[[], bool], what: str, seconds: float = TOO_LONG_SECONDS) -> None:
        """Raises PartFailed when the fleet ends, or the time is over."""
        assert self.fleet.child is not None
        self.fleet.child.wait_until(fact, what, seconds)

    def drain(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.fleet.command("drain", DBNAME, "--to", f"127.0.0.1:{self.standby.port}", *words)

    def unknown(self) -> set[str]:
        """The permits that are SESSION_UNKNOWN now."""
        return {str(each.permit) for each in self.watch.now().values()
                if each.state is SessionState.UNKNOWN}


def drain(seed: int, seconds: float, say: Callable[[str], None]) -> Outcome:
    """All of it once; it takes as long as it takes. Raises PartFailed."""
    with pair() as here:
        verdicts: list[Verdict] = []
        told: list[Told] = []
        figures: dict[str, Any] = {}
        for name, end, proofs in (("continued", go_on, {"absent"}), ("restarted", restart, {"restarted"})):
            said, verdict, figures[name] = _stopped(here, name, end, proofs, say)
            told.append(said)
            verdicts.append(verdict)
        said, planned, figures["planned"] = _planned(here, say)
        told.append(said)
        verdicts += [*planned, *_end(here, told)]
        return Outcome(verdicts, figures)


@contextmanager
def pair() -> Iterator[Pair]:
    """Start it, stop it. Raises PartFailed."""
    directory = temporary_directory("chaos")
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        primary = start_server(directory, ends, permits=PERMITS)
        primary.execute("ALTER TABLE tokens DROP CONSTRAINT tokens_pkey", DBNAME)
        standby = primary.standby(directory / "standby")
        ends.callback(standby.stop, immediate=True)
        standby.start()
        etcd = start_etcd(directory, ends)
        fleet = start_fleet(directory / "fleet", ends, [primary, standby], etcd.endpoints, workers=WORKERS,
                            permits=PERMITS, more=MORE)
        watch = LedgerWatch(etcd.endpoints, FleetKeys("pooler", FLEET), fleet.plan.ledger)
        watch.start()
        yield Pair(directory, primary, standby, fleet, watch)


# ---- a primary that is stopped


@dataclass(frozen=True, slots=True)
class StoppedSeen:
    """What a drain of a stopped server said, what the ledger had then, and what freed it."""

    exit_code: int
    listed: frozenset[str]
    unknown: frozenset[str]
    has_resolve_line: bool
    held: bool  # each of `unknown` stayed so while the server was stopped
    proofs: Mapping[str, int]
    released_after_seconds: float


def _stopped(
    here: Pair, name: str, end: Callable[[Server], None], wanted: set[str], say: Callable[[str], None]
) -> tuple[Told, Verdict, Mapping[str, Any]]:
    """Stop the primary, drain it, see what is left and what frees it."""
    clients = Clients(here.directory, here.fleet.ports.listen, (
        Group("writers", USER, PASSWORD, schema.WRITE, WRITERS_BESIDE_A_STOPPED_SERVER, writes=True),), name)
    stopped: list[int] = []
    try:
        here.wait(lambda: clients.writes() > 100, "the writers write")
        stopped = _signal(here.primary, signal.SIGSTOP)
        say(f"primary stopped ({len(stopped)} processes); drain to the standby")
        done = here.drain("--timeout", "14s", "--json")
        listed = _listed(done.stdout)
        unknown = here.unknown()
        say(f"drain: exit {done.returncode}, {len(listed)} permits listed, {len(unknown)} unknown in etcd")
        held = _held_for(here, unknown, LEASES_HELD * LEASE_SECONDS)
        end(here.primary)
        stopped = []
        began = time.monotonic()
        here.wait(lambda: not unknown & here.unknown(), f"{name}: what was unknown is proven gone")
        after = time.monotonic() - began
        before = clients.writes()
        here.wait(lambda: clients.writes() > before + 100, f"{name}: the writers write again")
    finally:
        if stopped:
            _signal(here.primary, signal.SIGCONT)
        clients.stop()
    has_line = "ledger resolve" in done.stdout
    seen = StoppedSeen(done.returncode, frozenset(listed), frozenset(unknown), has_line, held,
                       _proofs(here.fleet.log, unknown), round(after, 1))
    verdict = judge_stopped(name, seen, wanted)
    say(verdict.text)
    return clients.told(), verdict, {
        "exit": seen.exit_code, "unknown": len(unknown), "proofs": dict(seen.proofs),
        "released_after_seconds": seen.released_after_seconds}


def judge_stopped(name: str, seen: StoppedSeen, wanted: set[str]) -> Verdict:
    """The drain told of each permit that it left unknown, none of them came free while the server stood
    still, and then each did with a proof, `wanted` among them."""
    text = (f"exit {seen.exit_code}, {len(seen.listed)} unknown permits listed of {len(seen.unknown)}, with "
            f"the line to resolve them: {seen.has_resolve_line}; all held for "
            f"{LEASES_HELD * LEASE_SECONDS:g} s: {seen.held}; then released after "
            f"{seen.released_after_seconds:g} s by {dict(seen.proofs)}")
    told = bool(seen.listed) and seen.listed <= seen.unknown and seen.has_resolve_line
    proven = sum(seen.proofs.values()) == len(seen.unknown) and bool(wanted & seen.proofs.keys())
    return Verdict(name, seen.exit_code == UNKNOWN_LEFT and told and seen.held and proven, text)


def _held_for(here: Pair, permits: set[str], seconds: float) -> bool:
    """Whether each of them is unknown all that time."""
    until = time.monotonic() + seconds
    here.wait(lambda: not permits <= here.unknown() or time.monotonic() > until, "unknown permits stay",
              seconds + 30)
    return bool(permits) and permits <= here.unknown()


def go_on(server: Server) -> None:
    """The stopped server continues."""
    _signal(server, signal.SIGCONT)


def restart(server: Server) -> None:
    """The stopped server is killed, all of it, and started again."""
    assert server.child is not None
    with ExitStack() as ends:
        children = [_watched(pid, ends) for pid in process_ids(server.child.pid)]
        _signal(server, signal.SIGKILL)
        server.kill()
        for each in children:  # they have its memory, without which none may start
            has_ended(each, TOO_LONG_SECONDS)
    server.start()


def _watched(pid: int, ends: ExitStack) -> int:
    watched = os.pidfd_open(pid)
    ends.callback(os.close, watched)
    return watched


def _signal(server: Server, how: signal.Signals) -> list[int]:
    """To the postmaster, so that none comes any more, and then to its children."""
    assert server.child is not None
    pids = [server.child.pid, *process_ids(server.child.pid)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, how)
    if how is signal.SIGSTOP:  # those that were made meanwhile
        for pid in process_ids(server.child.pid) - set(pids):
            os.kill(pid, how)
            pids.append(pid)
    return pids


def _listed(said: str) -> list[str]:
    """The unknown permits of a drain's last line of JSON."""
    lines = [line for line in said.splitlines() if line.startswith("{")]
    return list(json.loads(lines[-1]).get("unknown", [])) if lines else []


def _proofs(log: Path, permits: set[str]) -> Counter[str]:
    """How the fleet says each of them was released."""
    found = Counter[str]()
    for line in log.read_text(errors="replace").splitlines():
        if "session_permit_released" in line:
            said = json.loads(line)
            if str(said["permit"]) in permits:
                found[str(said["proof"])] += 1
    return found


# ---- the planned drain


def _planned(here: Pair, say: Callable[[str], None]) -> tuple[Told, list[Verdict], Mapping[str, Any]]:
    """To the standby, which is promoted, under the writers."""
    clients = Clients(here.directory, here.fleet.ports.listen, (
        Group("writers", USER, PASSWORD, schema.WRITE, WRITERS, writes=True),), "planned")
    try:
        here.wait(lambda: clients.writes() > WRITES_AROUND_MIN, "the writers write")
        begin = time.time()
        promote = shlex.join([
            sys.executable, "-m", "pooler.demo.promote", str(here.primary.installation.bin),
            str(here.standby.data), str(here.primary.directory), str(here.primary.port)])
        done = here.drain("--timeout", "20s", "--run",
                          f"PYTHONPATH={shlex.quote(import_path())} {promote}")
        end = time.time()
        say(f"planned drain: exit {done.returncode} after {end - begin:.2f} s")
        before = clients.writes()
        here.wait(lambda: time.time() > end + AROUND_SECONDS and clients.writes() > before,
                  "the writers write at the new primary")
    finally:
        clients.stop()
    told = clients.told()
    old, new = _seen("old", here.primary), _seen("new", here.standby)
    return told, [
        judge.judge_drain(done.returncode, old, new, [done.stderr.strip()[-300:]] if done.returncode else []),
        judge_gap(told, begin, end), judge_errors(told),
    ], {"exit": done.returncode, "drain_seconds": round(end - begin, 2),
        "longest_gap_seconds": told.longest_gap_seconds(), "writes_around": around(told, begin, end)}


def around(told: Told, begin: float, end: float) -> int:
    """How many writes were acknowledged around the drain."""
    return sum(begin - AROUND_SECONDS <= at <= end + AROUND_SECONDS for at in told.acknowledged.values())


def judge_gap(told: Told, begin: float, end: float) -> Verdict:
    """Enough was written around the drain, and it stood still for less than two seconds."""
    gap, count = told.longest_gap_seconds(), around(told, begin, end)
    return Verdict("gap", gap < GAP_SECONDS_MAX and count >= WRITES_AROUND_MIN,
                   f"longest between acknowledged writes {gap} s; {count} of them around the drain")


def judge_errors(told: Told) -> Verdict:
    """No client was told an error, or lost its connection: none of them has a transaction open."""
    unknown, lost = told.total("unknown"), told.total("disconnects")
    return Verdict("errors", (told.errors, unknown, lost) == ({}, 0, 0),
                   f"of {WRITERS} clients outside open transactions: {told.errors or 'none'}, unknown "
                   f"{unknown}, connections lost {lost}")


# ---- the end


def _end(here: Pair, told: list[Told]) -> list[Verdict]:
    """The audit, and what can be said once the fleet has ended."""
    audit = here.fleet.command("ledger", "audit", here.fleet.plan.ledger)
    said = (audit.stdout or audit.stderr).strip().splitlines()
    left = here.fleet.stop()
    servers = [_seen("old", here.primary), _seen("new", here.standby)]
    history, held = list(here.watch.history), here.watch.now()
    tokens = schema.tokens(here.standby, DBNAME)
    every = Told(told[0].started, told[-1].ended, [tenant for each in told for tenant in each.tenants])
    tag = birth_tag([session for each in servers for session in each.sessions])
    return [
        judge.judge_writes(every.writes(tokens), every.started, every.ended, WRITES_AROUND_MIN),
        judge.judge_budget(servers, PERMITS), judge.judge_permits(servers, history, tag),
        Verdict("audit", audit.returncode == 0, f"exit {audit.returncode}; {said[-1] if said else ''}"),
        Verdict("free", not held, f"permits held at the end: {len(held)}"),
        Verdict("orphans", not left, f"processes left behind: {len(left)}"),
    ]


def _seen(name: str, server: Server) -> ServerSeen:
    return ServerSeen(name, [each for each in sessions_from_log(server.log) if each.user == USER],
                      [each for each in refusals_from_log(server.log) if each.user == USER])
