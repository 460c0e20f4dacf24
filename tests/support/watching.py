"""What became of the permits of a running fleet, read from etcd and from its own log."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Session
from coordinator.ledger.states import SessionState
from pooler.demo.etcd import Etcd
from pooler.demo.ledgerwatch import LedgerWatch
from tests.support.fleet import RunningFleet
from tests.support.wait import wait_until


def watch_of(fleet: RunningFleet, etcd: Etcd, prefix: str) -> LedgerWatch:
    """Not started: `now()` and its like work all the same."""
    return LedgerWatch(etcd.endpoints, FleetKeys(prefix, fleet.fleet.plan.name), fleet.fleet.plan.ledger)


def server_pids(fleet: RunningFleet) -> set[int]:
    """The fleet's sessions as the server shows them; who looks, now and a moment ago, is none of them."""
    database = fleet.database
    with psycopg.connect(database.dsn(application_name="looks on"), autocommit=True) as connection:
        rows = connection.execute(
            "select pid from pg_stat_activity where usename = %s and application_name <> 'looks on'",
            (database.user,)).fetchall()
    return {row[0] for row in rows}


def audit_is_clean(fleet: RunningFleet) -> bool:
    """Whether the command says so."""
    return fleet.fleet.command("ledger", "audit", fleet.database.dbname).returncode == 0


def unknown(watch: LedgerWatch) -> dict[str, Session]:
    """The permits that are SESSION_UNKNOWN, by name."""
    return {str(each.permit): each for each in watch.now().values() if each.state is SessionState.UNKNOWN}


def stay_unknown(watch: LedgerWatch, permits: set[str], seconds: float) -> None:
    """Fails if one of them is anything else before the time is over."""
    stays(lambda: permits <= unknown(watch).keys(), f"{permits} stay unknown", seconds)


def stays(fact: Callable[[], object], what: str, seconds: float) -> None:
    """Fails if it does not hold all that time."""
    until = time.monotonic() + seconds

    def is_over() -> bool:
        assert fact(), what
        return time.monotonic() > until

    wait_until(is_over, what, seconds + 30)


def logged(fleet: RunningFleet, event: str) -> list[dict[str, Any]]:
    """The fleet's log events of that name."""
    lines = fleet.fleet.log.read_text(errors="replace").splitlines()
    return [found for line in lines if f'"{event}"' in line and (found := json.loads(line))["event"] == event]


def proofs(fleet: RunningFleet, permits: set[str]) -> Counter[str]:
    """How these permits were released after they had been unknown, once the log has it of all of them."""
    def told() -> dict[str, str]:
        return {str(each["permit"]): str(each["proof"]) for each in logged(fleet, "session_permit_released")
                if str(each["permit"]) in permits}

    wait_until(lambda: len(told()) == len(permits), "the log tells of each", 20)
    return Counter(told().values())
