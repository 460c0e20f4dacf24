"""Which sessions a worker tells its pools have, and which of them a client has had for too long."""

from __future__ import annotations

from collections import deque
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.ledger.record import Kind, Permit
from coordinator.session_table import encode_who
from pooler.pool.ledger_view import LedgerView
from pooler.relay.client import ClientConn
from pooler.serve.checkouts import late_checkouts, leak_rows, pooled

LIMITS = {"executionClasses": {"interactive": {"transactionLimitSeconds": 5.0},
                               "batch": {"transactionLimitSeconds": 60.0}}}
IDLE, IN_TRANSACTION = 0x49, 0x54


def client(class_name: str = "", *, holds: bool = False) -> ClientConn:
    made = ClientConn.__new__(ClientConn)
    made.holds, made.who = holds, encode_who("acme", class_name, "10.0.0.9:1")
    made.address, made.application_name, made.last_sent = "10.0.0.9:1", "nightly", b"Q\0\0\0\x0bbegin\0"
    return made


def session(slot: int, age_seconds: float, who: ClientConn | None = None, status: int = IN_TRANSACTION,
            *, closing: bool = False) -> Any:
    return SimpleNamespace(
        permit=Permit(Kind.MAIN, slot, 7), pid=40 + slot, client=who, status=status, owed=deque(), own=0,
        unsynced=False, started_at=monotonic() - age_seconds, closing=closing, last_used=monotonic() - 3.0,
        query_at=monotonic() - 4.0, pool=SimpleNamespace(plan=PLAN))


PLAN = SimpleNamespace(ledger="db", name="orders", user="app")


def registry(*active: Any, idle: tuple[Any, ...] = (), others: tuple[Any, ...] = (),
             leaked: frozenset[tuple[str, Permit]] = frozenset()) -> Any:
    permits = SimpleNamespace(ledgers={"db": LedgerView("db", policy=LIMITS)}, leaked=lambda: leaked)
    servers = dict.fromkeys(map(Identity, (*active, *idle, *others)), 0)
    parts = SimpleNamespace(servers=servers, permits=permits)
    pool = SimpleNamespace(
        plan=PLAN, parts=parts, core=SimpleNamespace(active=list(active), idle=list(idle)))
    return SimpleNamespace(pools={"p": pool}, replications={}, parts=parts)


class Identity:
    """A session as a key: the stand-in itself has no hash."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def late(*active: Any) -> list[int]:
    return [each.permit.slot for each in late_checkouts(registry(*active))]


def test_a_client_past_the_limit_of_its_class_is_late_the_latest_first() -> None:
    assert late(session(1, 4, client()), session(2, 6, client()), session(3, 9, client()),
                session(4, 30, client("batch")), session(5, 61, client("batch"))) == [5, 3, 2]


def test_it_is_told_with_tenant_limit_process_and_age() -> None:
    (found,) = late_checkouts(registry(session(2, 6, client())))
    assert (found.db, found.tenant, found.limit_seconds, found.pid) == ("db", "acme", 5.0, 42)
    assert 6_000_000 <= found.age_us < 7_000_000
    assert found.holder.startswith(
        "app@orders from 10.0.0.9:1 (nightly): idle in transaction, waits for its client")


@pytest.mark.parametrize(("status", "expected"), [(IDLE, []), (IN_TRANSACTION, [1])])
def test_one_that_keeps_its_session_is_late_in_a_transaction_only(status: int, expected: list[int]) -> None:
    assert late(session(1, 3600, client(holds=True), status)) == expected


def test_what_the_pooler_itself_does_with_a_session_is_no_checkout() -> None:
    assert late(session(1, 3600, None)) == []


def test_a_pool_has_what_is_idle_in_use_or_being_closed_and_nothing_else() -> None:
    there = registry(session(1, 0, client()), idle=(session(2, 0),),
                     others=(session(3, 0, closing=True), session(4, 0)))
    assert {permit.slot for _, permit in pooled(there)} == {1, 2, 3}


def test_leaks_are_what_no_pool_has_then_the_late_then_the_oldest_and_nothing_short() -> None:
    lost = Permit(Kind.MAIN, 9, 7)
    rows = leak_rows(registry(
        session(1, 0.5, client()), session(2, 4, client()), session(3, 30, client("batch")),
        session(4, 6, client()), leaked=frozenset({("db", lost)})))
    assert [(row["permit"], row["why"], row["late"]) for row in rows] == [
        (str(lost), "in no pool", "yes"), ("main/4.7", "idle in transaction", "yes"),
        ("main/3.7", "idle in transaction", "no"), ("main/2.7", "idle in transaction", "no")]
    assert {name: rows[1][name] for name in ("database", "user", "client", "application_name", "tenant",
                                             "last_command", "waits_for", "limit_ms", "pid")} == {
        "database": "orders", "user": "app", "client": "10.0.0.9:1", "application_name": "nightly",
        "tenant": "acme", "last_command": "BEGIN", "waits_for": "client", "limit_ms": 5000, "pid": 44}
