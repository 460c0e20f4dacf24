"""How a policy generation comes into force: published, shadow, takeover of a part, promoted; and back. Pure.

Each move is a plan of steps; every step is one transaction that compares the alias as it was read, or waits
until the sessions of a generation are gone. Each reservation compares the alias, too, so nothing is granted
by one that has moved on. Between two steps the ledger stands as one of them left it, and whoever comes later
carries the plan on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coordinator.ledger.keys import DbKeys
from coordinator.ledger.record import Alias, Kind
from coordinator.ledger.snapshot import Held, LedgerSnapshot
from coordinator.policy import Policy, PolicyRefused, decode_policy, encode_policy
from coordinator.policy_values import difference_text
from coordinator.resolved import Resolved
from coordinator.store.api import Compare, Entry, Put, Txn, absent, unchanged

CLIENTS = (Kind.MAIN, Kind.RESERVE)  # a rollback ends these; those of commands and replication stay counted


class MoveRefused(Exception):
    """The move cannot be made from where the policies of this ledger stand: says why, and what can be."""


@dataclass(frozen=True, slots=True)
class Swap:
    """The alias becomes this."""

    alias: Alias


@dataclass(frozen=True, slots=True)
class Drained:
    """Wait until no session of clients is left that this generation granted; its workers give them up."""

    generation: int


Step = Swap | Drained
Plan = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the policies of one ledger stand: the alias as it was read (None: there is none yet), and what is
    published, by generation."""

    alias_entry: Entry | None
    generations: Mapping[int, bytes]

    @property
    def alias(self) -> Alias:
        """0 active: none."""
        return Alias.decode(self.alias_entry.value) if self.alias_entry else Alias(0)

    @property
    def last(self) -> int:
        """The highest generation published; 0: none."""
        return max(self.generations, default=0)


def is_published(standing: Standing, policy: Policy) -> bool:
    """Whether this very generation is there already.

    Raises MoveRefused for a number that says something else, or is not above the last.
    """
    stored = standing.generations.get(policy.generation)
    if stored is None:
        if policy.generation <= standing.last:
            raise MoveRefused(f"generation {policy.generation} is not above the last one, {standing.last}: "
                              f"publish it as {standing.last + 1} or more")
        return False
    try:
        other = decode_policy(stored)
    except PolicyRefused as refused:
        raise MoveRefused(f"generation {policy.generation} is there, and this version cannot read it: "
                          f"{refused}") from None
    if other != policy:
        raise MoveRefused(
            f"generation {policy.generation} is published with other content: "
            f"{', '.join(difference_text(policy, other, 'published'))}; a generation never changes: publish "
            f"it as {standing.last + 1} or more")
    return True


def publication(
    standing: Standing, policy: Policy, document: Mapping[str, Any], resolved: Resolved, keys: DbKeys
) -> Txn:
    """The transaction that publishes. It writes the alias each time, so that of two publications one loses
    and looks at the numbers again. The first one of a ledger is active at once: nothing grants that it could
    disturb."""
    key, alias = keys.policy(policy.generation), standing.alias
    puts = (Put(key, encode_policy(document, resolved)),
            Put(keys.alias(), replace(alias, active=alias.active or policy.generation).encode()))
    return Txn((absent(key), _same(standing, keys)), puts)


def swap(standing: Standing, alias: Alias, keys: DbKeys) -> Txn:
    """The transaction of a Swap on the alias as it was read."""
    return Txn((_same(standing, keys),), (Put(keys.alias(), alias.encode()),))


def plan_shadow(standing: Standing, generation: int) -> Plan:
    """It decides beside the active one, and grants nothing. Raises MoveRefused."""
    alias = _settled(standing, generation)
    if alias.taking_over:
        raise MoveRefused(f"generation {alias.taking_over} takes over {alias.takeover_fraction:g} of the "
                          "requests: promote it or roll it back first")
    wanted = replace(alias, shadow=generation, takeover_fraction=0.0)
    return () if wanted == alias else (Swap(wanted),)


def plan_takeover(standing: Standing, generation: int, fraction: float, role: str) -> Plan:
    """The shadow grants this fraction of the requests. Raises MoveRefused."""
    alias = _settled(standing, generation)
    if not 0 < fraction <= 1:
        raise MoveRefused(f"{fraction:g} is no fraction of the traffic: above 0, at most 1")
    if role != "read":
        what = f"it is of role {role}" if role else "its role is not known here: give the fleet's config"
        raise MoveRefused("only traffic that reads is taken over in part, so that no transaction that writes "
                          f"depends on which generation it met; {what}. Promote the generation instead")
    if alias.shadow != generation:
        raise MoveRefused(f"generation {generation} is not the shadow of this ledger: `pooler policy shadow` "
                          "comes first")
    wanted = replace(alias, takeover_fraction=fraction)
    return () if wanted == alias else (Swap(wanted),)


def plan_promote(standing: Standing, generation: int) -> Plan:
    """It grants everything from now on; a rollback would come back to the one of now. Raises MoveRefused."""
    if standing.alias.active == generation and not standing.alias.withdrawn:
        return ()
    alias = _settled(standing, generation)
    if alias.taking_over not in (0, generation):
        raise MoveRefused(f"generation {alias.taking_over} takes over {alias.takeover_fraction:g} of the "
                          "requests: roll it back first")
    return (Swap(replace(alias, active=generation, previous=alias.active, shadow=0, takeover_fraction=0.0)),)


def plan_rollback(standing: Standing) -> Plan:
    """The last move is undone: nothing more is granted by the generation that it brought, its sessions are
    given up and reconciled, and then the alias goes back. Raises MoveRefused."""
    alias = standing.alias
    if alias.withdrawn:
        return Drained(alias.withdrawn), Swap(_without(alias, alias.withdrawn))
    if alias.shadow:
        back = _without(alias, alias.shadow)
        if not alias.taking_over:
            return (Swap(back),)  # it granted nothing
        stopped = replace(alias, takeover_fraction=0.0, withdrawn=alias.shadow)
        return Swap(stopped), Drained(alias.shadow), Swap(back)
    if alias.previous:
        stopped = replace(alias, withdrawn=alias.active)
        return Swap(stopped), Drained(alias.active), Swap(_without(alias, alias.active))
    raise MoveRefused("there is nothing to roll back: no shadow, and no generation that was active before")


def left_of(snapshot: LedgerSnapshot, generation: int) -> list[Held]:
    """The sessions of clients that this generation granted, or may have, and that no proof has ended."""
    return [held for held in snapshot.sessions
            if (held.session.policy_generation == generation or held.unreadable)
            and held.session.kind in CLIENTS]


def _without(alias: Alias, generation: int) -> Alias:
    """As it stands once nothing of this generation is left."""
    if generation == alias.active:
        return replace(alias, active=alias.previous, previous=0, withdrawn=0)
    return replace(alias, shadow=0, takeover_fraction=0.0, withdrawn=0)


def _settled(standing: Standing, generation: int) -> Alias:
    """The alias, where a move to this generation can be made."""
    alias = standing.alias
    if generation not in standing.generations:
        known = ", ".join(map(str, sorted(standing.generations))) or "none"
        raise MoveRefused(f"generation {generation} is not published (published: {known})")
    if alias.withdrawn:
        raise MoveRefused(f"generation {alias.withdrawn} is being rolled back: `pooler policy rollback` "
                          "carries that on")
    if generation <= alias.active:
        raise MoveRefused(f"generation {generation} is not newer than the active one, {alias.active}: "
                          "publish its content under a new number, or roll back")
    return alias


def _same(standing: Standing, keys: DbKeys) -> Compare:
    entry = standing.alias_entry
    return absent(keys.alias()) if entry is None else unchanged(keys.alias(), entry.mod_revision)
