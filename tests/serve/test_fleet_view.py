"""What the console shows of the fleet, out of what each worker tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pooler.console.merge import merge_rows
from pooler.serve.fleet_view import FleetView

POOLS = {  # by worker
    "0": [{"database": "a", "user": "u", "pool_mode": "transaction"},
          {"database": "a", "user": "v", "pool_mode": "transaction"}],
    "1": [{"database": "a", "user": "u", "pool_mode": "transaction"},
          {"database": "b", "user": "w", "pool_mode": "transaction"}],
}


async def test_pools_and_users_that_only_some_workers_have_are_counted_once_each() -> None:
    async def ask(op: str, args: dict[str, Any]) -> list[dict[str, Any]]:
        lists = [{"list": name, "items": 2} for name in ("pools", "users", "databases")]
        return [{"worker": worker, "value": {"rows": POOLS[worker] if args["what"] == "pools" else lists}}
                for worker in POOLS]

    nothing: Any = None
    permits: Any = SimpleNamespace(fleet=ask)
    rows = await FleetView(nothing, permits, nothing, nothing).show("lists", None)
    counts = {row["list"]: row["items"] for row in merge_rows("lists", rows)}
    assert counts == {"pools": 3, "users": 3, "databases": 2}
