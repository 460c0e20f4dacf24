"""SHOW CLASSES, TENANTS, TICKETS and WAITERS say who executes, who waits, for how long and for what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pooler.demo.client import query
from pooler.relay.asking import Asked
from pooler.serve.admission_rows import class_rows, tenant_rows, ticket_rows, waiter_rows
from tests.relay.world import Client, World, world

POLICY = {"generation": 1, "executionClasses": {"quick": {"permits": 2, "maxQueue": 9},
                                                "slow": {"permits": 1, "maxQueue": 9}},
          "tenants": {"nightly": {"weight": 3, "inflight": 1}}}


def registry(w: World) -> Any:
    w.parts.classes.of("db/write").learn(POLICY)
    return SimpleNamespace(parts=w.parts, pools={"p": w.pool})


def of(w: World, tenant: str, klass: str) -> Client:
    client = w.client()
    client.conn.asked = Asked(tenant, klass)
    client.conn.reset_asked()
    return client


def test_who_executes_is_told_with_his_session_and_who_waits_with_what_he_lacks() -> None:
    with world(sessions=2) as w:
        there = registry(w)
        busy, waits = of(w, "nightly", "slow"), of(w, "nightly", "slow")
        w.say(busy, query("begin"))
        w.say(waits, query("select 1"))
        (session,) = w.pool.core.active
        assert {row["state"]: (row["tenant"], row["class"], row["pid"]) for row in ticket_rows(there)} == {
            "IN_TRANSACTION": ("nightly", "slow", session.pid), "QUEUED": ("nightly", "slow", None)}
        (waiter,) = waiter_rows(there)
        assert (waiter["position"], waiter["bound_by"]) == (1, "tenant inflight")
        classes = {row["class"]: row for row in class_rows(there)}
        assert [classes["slow"][name] for name in ("executing", "waiting", "permits")] == [1, 1, 1]
        assert (classes["quick"]["executing"], classes["quick"]["waiting"]) == (0, 0)
        (tenant,) = (row for row in tenant_rows(there) if row["tenant"] == "nightly")
        assert (tenant["weight"], tenant["inflight"], tenant["executing"], tenant["waiting"]) == (3, 1, 1, 1)
        w.say(busy, query("commit"))
        assert list(ticket_rows(there)) == list(waiter_rows(there)) == []


@pytest.mark.parametrize(("tenants", "bound_by"), [
    (("a", "b", "c"), "class permits"), (("a", "b"), "session permits")])
def test_what_binds_a_waiter_is_the_first_limit_that_he_meets(
    tenants: tuple[str, ...], bound_by: str
) -> None:
    with world(sessions=len(tenants) if bound_by == "class permits" else 1) as w:
        there = registry(w)
        for tenant in tenants:
            w.say(of(w, tenant, "quick"), query("begin"))
        assert [row["bound_by"] for row in waiter_rows(there)] == [bound_by]
