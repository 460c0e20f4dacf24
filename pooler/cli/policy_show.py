"""`pooler policy show`: which generations grant, and every value of each in effect."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

from pooler.cli.options import (
    ConfigOption,
    DbArgument,
    EtcdOption,
    FleetOption,
    JsonOption,
    PrefixOption,
)

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.ledger.record import Alias
    from coordinator.policy_values import Value
    from pooler.cli.reach import Where


def show(
    db: DbArgument,
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
    as_json: JsonOption = False,
) -> None:
    """Show which generations are published and which grant, and every value in effect: given or defaulted.

    Of a shadow, also its own values and how its decisions compared with the active one's. Exits 0, or 1 if
    the database has no policy yet.

    Example: pooler policy show orders
    """
    import trio

    from pooler.cli.out import print_json
    from pooler.cli.reach import Where

    found = trio.run(_read, Where(config, etcd, fleet, prefix), db)
    found["refused"] = "" if found["active"] else _refused(config, found["database"])
    if as_json:
        print_json(found)
    else:
        _tell(found)
    raise typer.Exit(0 if found["active"] else 1)


async def _read(where: Where, name: str) -> dict[str, Any]:
    from dataclasses import asdict

    from coordinator.ledger.notes import GrowthStop
    from coordinator.publishing import read_shadow_counts, read_standing
    from pooler.cli.reach import reach, say_lost

    async with reach(where) as reached:
        db = reached.db(name)
        keys = reached.keys.db(db)
        standing = await read_standing(reached.store, keys)
        alias = standing.alias
        ledger = reached.ledger(db)
        snapshot = await ledger.snapshot()
        if ledger.lost:
            say_lost(db)
        stops = (await reached.store.read(keys.growth())).entries
        held = Counter(each.session.policy_generation for each in snapshot.sessions)
        shown = dict.fromkeys(each for each in (alias.active, alias.shadow, alias.granting) if each)
        found: dict[str, Any] = {
            "database": db, "lost": ledger.lost, **alias_map(alias),
            "generations": sorted(standing.generations),
            "held": {str(generation): count for generation, count in sorted(held.items())},
            "no_growth": GrowthStop.decode(stops[0].value).why if stops else "",
            "values": {str(each): _values(standing.generations.get(each)) for each in shown},
        }
        if alias.shadow:
            counts = asdict(await read_shadow_counts(reached.store, keys, alias.shadow))
            found["shadow_decisions"] = {key: counts[key] for key in ("only_active", "only_shadow", "both")}
        return found


def _refused(config: Path | None, db: str) -> str:
    """Why there is none: no store has it, but a coordinator of the fleet that runs on this host may say."""
    from pooler.cli.fleet import status_of
    from pooler.errors import FleetUnreachable, UsageFault

    try:
        processes = status_of(config)["processes"]
    except (FleetUnreachable, UsageFault):
        return ""
    ledgers = [each["figures"].get("ledgers") or {} for each in processes]
    return next((why for each in ledgers if (why := each.get(db, {}).get("no_policy"))), "")


def alias_map(alias: Alias) -> dict[str, Any]:
    """Where the policies stand, with stable keys; 0: none."""
    return {"active": alias.active, "granting": alias.granting, "shadow": alias.shadow,
            "takeover_fraction": alias.takeover_fraction, "previous": alias.previous,
            "withdrawn": alias.withdrawn}


def alias_text(alias: Alias) -> str:
    """The same, for people."""
    if not alias.active:
        return "no policy is active"
    text = f"generation {alias.granting} is active"
    if alias.withdrawn:
        return f"{text}; generation {alias.withdrawn} is being rolled back"
    if alias.taking_over:
        text += f"; generation {alias.taking_over} grants {alias.takeover_fraction:g} of the requests"
    elif alias.shadow:
        text += f"; generation {alias.shadow} decides beside it (shadow)"
    return text + (f"; before: {alias.previous}" if alias.previous else "")


def _values(stored: bytes | None) -> list[dict[str, Any]]:
    from coordinator.fleet_policies import policy_of
    from coordinator.policy import decode_document
    from coordinator.policy_values import values_of

    policy = policy_of(stored)
    if policy is None or stored is None:
        return []
    values: list[Value] = values_of(policy, decode_document(stored))
    return [{"name": each.path, "value": each.value, "source": "given" if each.given else "default"}
            for each in values]


def _tell(found: dict[str, Any]) -> None:
    from coordinator.ledger.record import Alias
    from pooler.cli.out import print_table

    names = ("active", "shadow", "takeover_fraction", "previous", "withdrawn")
    print(f"{found['database']}: {alias_text(Alias(**{name: found[name] for name in names}))}")
    if found["refused"]:
        print(f"refused: {found['refused']}")
    elif not found["active"]:
        print("why: /readyz of a coordinator says it, and policy_refused in its log")
    print(f"published: {', '.join(map(str, found['generations'])) or 'none'}")
    if found["held"]:
        print("sessions: " + ", ".join(
            f"{count} of generation {each}" for each, count in found["held"].items()))
    if found["no_growth"]:
        print(f"nothing more is granted: {found['no_growth']}")
    decisions = found.get("shadow_decisions")
    if decisions is not None:
        print(f"decisions of generation {found['shadow']} beside {found['active']}: both would grant "
              f"{decisions['both']}, only_active {decisions['only_active']}, "
              f"only_shadow {decisions['only_shadow']}")
    for generation, values in found["values"].items():
        print(f"\ngeneration {generation}:")
        print_table(("NAME", "VALUE", "SOURCE"), [
            (each["name"], "none" if each["value"] is None else each["value"], each["source"])
            for each in values])
