"""What a told story proves: evidence gathered from servers, etcd and clients, and handed to the judge."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from psycopg import sql

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Kind, Session
from coordinator.ledger.states import SessionState
from pooler.demo import judge, schema
from pooler.demo.client import RawClient
from pooler.demo.etcd import reopened
from pooler.demo.judge import ServerSeen, Verdict, Writes
from pooler.demo.ledgerwatch import LedgerWatch, Seen, lives
from pooler.demo.parts import BATCH, CONSOLE, DBNAME, PASSWORDS, PERMITS, SHOP, WORKERS, Parts
from pooler.demo.postgres import Server
from pooler.demo.run import AROUND_SECONDS, TRANSACTIONS_MIN, Told
from pooler.demo.serverlog import refusals_from_log, sessions_from_log

WRITES_AROUND_DRAIN_MIN = 300
STATISTICS_SECONDS = 12.0  # an idle session reports its counts after ten seconds
FUNCTIONS = {"shop": (schema.LOOKUP, schema.WRITE), "batch": (schema.REPORT,)}
READINGS_MAX = 20
POOLED = ("sv_active", "sv_idle", "sv_used", "sv_tested")
RELEASED_EVENT = "session_permit_released"


@dataclass(slots=True)
class Outcome:
    """What happened, for people and for --json."""

    verdicts: list[Verdict] = field(default_factory=list)
    tenants: dict[str, dict[str, Any]] = field(default_factory=dict)
    timeline: list[tuple[float, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        return bool(self.verdicts) and all(each.held for each in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        return {"ok": self.held, "checks": judge.figures(self.verdicts), "tenants": self.tenants,
                "timeline": [{"at_seconds": round(at, 3), "what": what} for at, what in self.timeline],
                **self.figures}


class Evidence:
    """Of one story. First `living`, while the fleet runs; then `final`, once its sessions are at rest."""

    def __init__(self, parts: Parts, told: Told) -> None:
        self.parts, self.told = parts, told
        self.outcome = Outcome()

    def living(self) -> None:
        """The audit; and ledger, servers and pools agree on what is open now."""
        with self.parts.parked[0].away(), self.parts.parked[1].away():
            audit = self.parts.fleet.command("ledger", "audit", self.parts.ledger)
            held, pooled, sessions = self._at_one_moment()
        by_pool = Counter(f"{each.user}@{each.dbname}" for each in held)
        self._add(judge.judge_leaks(by_pool, pooled))
        said = (audit.stdout or audit.stderr).strip().splitlines()
        self._add(Verdict("audit", audit.returncode == 0,
                          f"exit {audit.returncode}; {said[-1] if said else 'nothing said'}"))
        self._add(Verdict("ledger", sessions == len(held),
                          f"{len(held)} OPEN permits in etcd, {sessions} sessions at the servers"))
        self.outcome.figures["permits_open"] = len(held)
        self.outcome.figures["server_sessions"] = sessions

    def final(self, *, fleet_stopped: bool) -> Outcome:
        """All that is known once no session changes any more."""
        told = self.told
        named = (("primary", self.parts.primary), ("standby", self.parts.standby))
        servers = [self._seen(name, server.log) for name, server in named]
        history = list(self.parts.watch.history)
        owners = {each.session.owner for each in history
                  if each.session is not None and each.session.kind is not Kind.ADMIN}
        done = sum(each["done"] for each in told.load["tenants"].values())
        self._add(judge.judge_volume(done, TRANSACTIONS_MIN, len(owners), WORKERS))
        self._add(judge.judge_budget(servers, PERMITS))
        self._add(judge.judge_permits(servers, history, self._tag(servers)))
        self._add(judge.judge_fate(judge.fate_of(
            told.killed.keys, told.killed.boot_id, history, told.killed.at, self._proofs())))
        self._add(judge.judge_drain(told.drained.exit_code, servers[0], servers[1],
                                    [told.drained.said] if told.drained.exit_code else []))
        self._add(judge.judge_writes(self._writes(), told.drained.start - AROUND_SECONDS,
                                     told.drained.end + AROUND_SECONDS, WRITES_AROUND_DRAIN_MIN))
        self._add(self._counts())
        if fleet_stopped:
            left = self._left()
            self._add(Verdict("free", not left, f"permits still held after the fleet's end: {len(left)}"
                              + "".join(f"; {each.permit} {each.state}" for each in left[:3])))
        self._describe(servers, history)
        return self.outcome

    def _left(self) -> list[Session]:
        """The permits in the data of the etcd that ended with the fleet."""
        [member] = self.parts.fleet.run_dir.rglob("member")
        with reopened(member.parent, "pooler") as endpoint:
            plan = self.parts.fleet.plan
            return list(LedgerWatch(endpoint, FleetKeys("pooler", plan.name), plan.ledger).now().values())

    def _add(self, verdict: Verdict) -> None:
        self.outcome.verdicts.append(verdict)

    def _at_one_moment(self) -> tuple[list[Session], dict[str, int], int]:
        """OPEN permits, sessions in pools, sessions at the servers: between two readings of the ledger that
        are the same, for a session may end at any time. If there are none such, as last read."""
        for _ in range(READINGS_MAX):
            before = self._main_permits()
            pooled = self._pooled()
            sessions = sum(_sessions_at(server) for server in (self.parts.primary, self.parts.standby))
            if before == self._main_permits() and all(each.state is SessionState.OPEN for each in before):
                break
        return [each for each in before if each.state is SessionState.OPEN], pooled, sessions

    def _main_permits(self) -> list[Session]:
        return [each for each in self.parts.watch.now().values() if each.kind is Kind.MAIN]

    def _pooled(self) -> dict[str, int]:
        """How many sessions the workers' pools know, fleet-wide, asked over the console."""
        with RawClient("127.0.0.1", self.parts.fleet.ports.listen) as console:
            console.login(CONSOLE, PASSWORDS[CONSOLE], "pooler")
            columns, rows = console.table("SHOW POOLS")
        found = Counter[str]()
        for row in (dict(zip(columns, row, strict=True)) for row in rows):
            found[f"{row['user']}@{row['database']}"] += sum(int(row[name] or 0) for name in POOLED)
        return found

    def _seen(self, name: str, log: Path) -> ServerSeen:
        ours = (SHOP, BATCH)
        return ServerSeen(name, [each for each in sessions_from_log(log) if each.user in ours],
                          [each for each in refusals_from_log(log) if each.user in ours])

    def _tag(self, servers: Sequence[ServerSeen]) -> str:
        """The ledger's tag, as the sessions' birth names have it."""
        names = {each.application_name.split(":")[1] for server in servers for each in server.sessions
                 if each.application_name.startswith(judge.BIRTH_TAG)}
        return names.pop() if len(names) == 1 else ""

    def _proofs(self) -> dict[str, str]:
        """permit: proof, as the fleet's log recorded it."""
        found = {}
        for line in self.parts.fleet.log.read_text(errors="replace").splitlines():
            if RELEASED_EVENT in line:
                entry = json.loads(line)
                found[str(entry["permit"])] = str(entry["proof"])
        return found

    def _writes(self) -> Writes:
        tenants = self.told.load["tenants"].values()
        return Writes(
            {token: at for each in tenants for token, at in each["acknowledged"]},
            frozenset(token for each in tenants for token in each["unknown_tokens"]),
            frozenset(token for each in tenants for token in each["refused_tokens"]),
            schema.tokens(self.parts.standby, DBNAME))

    def _counts(self) -> Verdict:
        told = {tenant: (each["done"], each["unknown"] + sum(each["errors"].values()))
                for tenant, each in self.told.load["tenants"].items()}
        deadline = time.monotonic() + STATISTICS_SECONDS
        verdict = judge.judge_counts(told, self._counted())
        assert self.parts.primary.child is not None
        if not verdict.held:  # sessions that are idle for less than ten seconds have not reported
            self.parts.primary.child.wait_until(
                lambda: judge.judge_counts(told, self._counted()).held or time.monotonic() > deadline,
                "the server lives", STATISTICS_SECONDS + 5)
            verdict = judge.judge_counts(told, self._counted())
        return verdict

    def _counted(self) -> dict[str, int]:
        both = [schema.calls(server, DBNAME) for server in (self.parts.primary, self.parts.standby)]
        return {tenant: sum(calls.get(name, 0) for calls in both for name in names)
                for tenant, names in FUNCTIONS.items()}

    def _describe(self, servers: Sequence[ServerSeen], history: list[Seen]) -> None:
        load, killed = self.told.load, self.told.killed
        lasted = load["ended"] - load["started"]
        for tenant, each in load["tenants"].items():
            self.outcome.tenants[tenant] = {
                "transactions": each["done"], "per_second": round(each["done"] / lasted, 1),
                "p50_ms": each["p50_ms"], "p99_ms": each["p99_ms"], "max_ms": each["max_ms"],
                "unknown": each["unknown"], "errors": each["errors"]}
        acknowledged = sorted(at for each in load["tenants"].values() for _, at in each["acknowledged"])
        self.outcome.figures.update({
            "transactions": sum(each["done"] for each in load["tenants"].values()),
            "seconds": round(lasted, 2), "permits": PERMITS, "haproxy": self.parts.haproxy is not None,
            "sessions_opened": sum(len(server.sessions) for server in servers),
            "writes_acknowledged": len(acknowledged),
            "longest_write_gap_seconds": round(max(
                (b - a for a, b in pairwise(acknowledged)), default=0.0), 3),
            "drain_seconds": round(self.told.drained.end - self.told.drained.start, 3)})
        self.outcome.timeline = sorted([*self.told.timeline, *permit_moves(
            history, killed.boot_id, killed.at, self.told.began)])


def _sessions_at(server: Server) -> int:
    ours = sql.SQL("SELECT count(*) FROM pg_stat_activity WHERE usename IN ({}, {})")
    [(count,)] = server.execute(ours.format(sql.Literal(SHOP), sql.Literal(BATCH)))
    return int(count)


def permit_moves(
    history: list[Seen], owner: str, since: float, began: float
) -> list[tuple[float, str]]:
    """One line for each move of a killed worker's permits, all of the same tenth of a second together."""
    moved: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for _, seen in lives(history):
        if not any(each.session is not None and each.session.owner == owner for each in seen):
            continue
        slot = next(each.session.slot for each in seen if each.session is not None)
        for each in seen:
            what = "SESSION_RELEASED" if each.session is None else str(each.session.state)
            if each.at >= since and what in ("SESSION_UNKNOWN", "SESSION_RELEASED"):
                moved.setdefault((int(10 * (each.at - since)), what), []).append((each.at - began, slot))
    return [(min(moves)[0], f"{what}: {_slots(slot for _, slot in moves)} of the killed worker")
            for (_, what), moves in moved.items()]


def _slots(numbers: Iterable[int]) -> str:
    return f"slots {', '.join(map(str, sorted(numbers)))}"
