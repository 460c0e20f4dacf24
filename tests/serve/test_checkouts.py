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
from pooler.serve.checkouts import late_checkouts, pooled

LIMITS = {"executionClasses": {"interactive": {"transactionLimitSeconds": 5.0},
                               "batch": {"transactionLimitSeconds": 60.0}}}
IDLE, IN_TRANSACTION = 0x49, 0x54


def client(class_name: str = "", *, holds: bool = False) -> ClientConn:
    made = ClientConn.__new__(ClientConn)
    made.holds, made.who = holds, encode_who("acme", class_name, "10.0.0.9:1")
    return made


def session(slot: int, age_seconds: float, who: ClientConn | None = None, status: int = IN_TRANSACTION,
            *, closing: bool = False) -> Any:
    return SimpleNamespace(
        permit=Permit(Kind.MAIN, slot, 7), pid=40 + slot, client=who, status=status, owed=deque(),
        unsynced=False, started_at=monotonic() - age_seconds, closing=closing,
        pool=SimpleNamespace(plan=PLAN))


PLAN = SimpleNamespace(ledger="db")


def registry(*active: Any, idle: tuple[Any, ...] = (), others: tuple[Any, ...] = ()) -> Any:
    pool = SimpleNamespace(plan=PLAN, core=SimpleNamespace(active=list(active), idle=list(idle)))
    permits = SimpleNamespace(ledgers={"db": LedgerView("db", policy=LIMITS)})
    servers = dict.fromkeys(map(Identity, (*active, *idle, *others)), 0)
    return SimpleNamespace(
        pools={"p": pool}, replications={}, parts=SimpleNamespace(servers=servers, permits=permits))


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


@pytest.mark.parametrize(("status", "expected"), [(IDLE, []), (IN_TRANSACTION, [1])])
def test_one_that_keeps_its_session_is_late_in_a_transaction_only(status: int, expected: list[int]) -> None:
    assert late(session(1, 3600, client(holds=True), status)) == expected


def test_what_the_pooler_itself_does_with_a_session_is_no_checkout() -> None:
    assert late(session(1, 3600, None)) == []


def test_a_pool_has_what_is_idle_in_use_or_being_closed_and_nothing_else() -> None:
    there = registry(session(1, 0, client()), idle=(session(2, 0),),
                     others=(session(3, 0, closing=True), session(4, 0)))
    assert {permit.slot for _, permit in pooled(there)} == {1, 2, 3}
