"""What `ledger watch` says of a change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.inspect import Sum
from coordinator.ledger.record import Alias
from pooler.cli.watch import Latest, changes, text_of, told

EMPTY = Sum(4, {}, 4, 0, 0, 1, None, "")


def row(permit: str, state: str, **more: Any) -> dict[str, Any]:
    return {"permit": permit, "state": state, "owner": "0123456789ab", "pid": 42, "ticket": "", "epoch": 1,
            "waits_for": "", "age_seconds": 1.0, **more}


def test_a_change_is_told_per_permit_and_an_age_is_none() -> None:
    before = [row("main/1.7", "OPEN_IDLE"), row("main/2.8", "OPEN_BUSY"), row("main/3.9", "CLOSING")]
    after = [row("main/1.7", "OPEN_IDLE", age_seconds=2.0), row("main/4.10", "CONNECTING", pid=0),
             row("main/2.8", "SESSION_UNKNOWN", ticket="77", waits_for="absent on 10.0.0.11:5432")]
    assert [told(each) for each in changes(before, after)] == [
        "main/2.8: OPEN_BUSY -> SESSION_UNKNOWN (owner 01234567, pid 42, ticket 77, "
        "waits for absent on 10.0.0.11:5432)",
        "main/3.9: CLOSING -> free",
        "main/4.10: CONNECTING (owner 01234567)"]
    assert changes(after, after) == []


def test_the_sum_comes_first_and_again_only_when_it_changes() -> None:
    latest = Latest("orders/write")
    assert [text_of("orders/write", each) for each in latest.news([], EMPTY, Alias(1))] == [
        "orders/write: 4 slots: 4 free; reserve 0/0; epoch 1"]
    assert latest.news([], EMPTY, Alias(1)) == []
    (frozen,) = latest.news([], replace(EMPTY, frozen="she"), Alias(1))
    assert text_of("orders/write", frozen).endswith("; frozen by she")
    (epoch,) = latest.news([], replace(EMPTY, frozen="she", epoch=2), Alias(1))
    assert epoch["sum"]["epoch"] == 2


def test_an_age_alone_is_no_change() -> None:
    latest = Latest("db")
    old = replace(EMPTY, oldest_unknown_seconds=5.0)
    latest.news([], old, None)
    assert latest.news([], replace(old, oldest_unknown_seconds=6.0), None) == []
    assert len(latest.news([], EMPTY, None)) == 1


def test_a_change_of_the_policies_is_told() -> None:
    latest = Latest("db")
    latest.news([], EMPTY, Alias(1))
    (change,) = latest.news([], EMPTY, Alias(2, previous=1))
    assert change["policy"]["active"] == 2
    assert "2" in text_of("db", change)
