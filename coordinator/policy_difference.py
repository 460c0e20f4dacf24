"""Whether the policy files of a config are what is in force. A file that differs changes nothing: it is told.

What counts is what a policy means, every default filled in: a comment or a default spelled out is no
difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields

from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import Alias
from coordinator.policy import Policy, PolicyRefused, decode_policy, load_policy
from coordinator.spec import DatabaseSpec
from coordinator.store.api import Store

_NAMES = {"classes": "executionClasses"}  # of a field in the document, where it is not the same in camel case
_PLAIN = (int, str, type(None))
WHAT_TO_DO = ("it stays in force, since no command of this version publishes another generation: a policy is "
              "taken from its file only when the ledger is created")


async def active_policies(store: Store, keys: FleetKeys, databases: Iterable[str]) -> dict[str, Policy]:
    """The policy in force of each ledger; none for one that has none yet, or one this version cannot read.

    Raises StoreUnavailable, StoreUnknown.
    """
    found: dict[str, Policy] = {}
    for db in dict.fromkeys(databases):
        alias = await store.read(keys.db(db).alias())
        if not alias.entries:
            continue
        active = Alias.decode(alias.entries[0].value).active
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
        differs = _differs(wanted, policy)
        if differs:
            lines.append(f"databases.{each.name}.policy differs from generation {policy.generation} of "
                         f"{each.db}: {', '.join(differs)}; {WHAT_TO_DO}")
    return lines


def _differs(wanted: Policy, active: Policy) -> list[str]:
    found = []
    for field in fields(Policy):
        new, old = getattr(wanted, field.name), getattr(active, field.name)
        if new != old:
            name = _NAMES.get(field.name) or re.sub(r"_(\w)", lambda at: at[1].upper(), field.name)
            plain = isinstance(new, _PLAIN) and isinstance(old, _PLAIN)
            found.append(f"{name} {_word(new)} (in force: {_word(old)})" if plain else name)
    return found


def _word(value: object) -> str:
    return "none" if value is None else str(value)
