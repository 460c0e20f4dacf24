"""What `ledger watch` says of a change."""

from __future__ import annotations

from typing import Any

from pooler.cli.watch import changes, told


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
