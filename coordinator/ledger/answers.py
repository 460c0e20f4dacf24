"""What the ledger answers to a worker's coordinator. Refusals are `rules.Refused`."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.ledger.record import Permit, Session


@dataclass(frozen=True, slots=True)
class Granted:
    """A session permit with its receipt written: the owner may connect. `tag` is the ledger's tag."""

    permit: Permit
    epoch: int
    address: str
    tag: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The command's end state stands; `changed` False: it stood already. `session` None: released."""

    session: Session | None
    mod_revision: int
    changed: bool


@dataclass(frozen=True, slots=True)
class Voided:
    """The request takes nothing any more; `given_back` is the permit it had taken, freed as `unused`."""

    given_back: Permit | None
