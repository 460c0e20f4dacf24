"""Whether the policy files of a config are what is in force. A file that differs changes nothing: it is
told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Alias
from coordinator.policy import Policy, PolicyRefused, decode_policy, load_policy
from coordinator.policy_values import difference_text
from coordinator.spec import DatabaseSpec
from coordinator.store.api import Store

WHAT_TO_DO = ("that stays in force: `pooler policy publish` takes a file, under a generation of its own, and "
              "`pooler policy promote` puts it in force")


async def active_policies(store: Store, keys: FleetKeys, databases: Iterable[str]) -> dict[str, Policy]:
    """The policy in force of each ledger; none for one that has none yet, or one this version cannot read.

    Raises StoreUnavailable, StoreUnknown.
    """
    found: dict[str, Policy] = {}
    for db in dict.fromkeys(databases):
        alias = await store.read(keys.db(db).alias())
        if not alias.entries:
            continue
        active = Alias.decode(alias.entries[0].value).granting
        stored = await store.read(keys.db(db).policy(active))
        for entry in stored.entries:
            with suppress(PolicyRefused):
                found[db] = decode_policy(entry.value)
    return found


def policy_differences(
    databases: Sequence[DatabaseSpec], active: Mapping[str, Policy | None]
) -> list[str]:
    """One line for each database whose policy file is not what is in force for its ledger."""
    lines = []
    for each in databases:
        policy = active.get(each.db)
        if policy is None or each.policy is None:
            continue
        try:
            wanted, _ = load_policy(each.policy)
        except PolicyRefused:
            continue  # told elsewhere, as a fault
        if wanted != policy:
            differs = difference_text(wanted, policy, "in force")
            lines.append(f"databases.{each.name}.policy differs from generation {policy.generation} of "
                         f"{each.db}: {', '.join(differs)}; {WHAT_TO_DO}")
    return lines
