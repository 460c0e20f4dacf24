"""Each safeguard of the session permit's protocol, removed: what the model must find then.

A mutant changes the transactions that the production code made (a compare left out), what it takes a session
for before it decides, or what an actor does. `unsafe` ones must reach a violation, `leaky` ones a state from
which a permit never becomes free. Known not to be needed, and so no mutant: waiting for CONNECTING, and a
look at the lease before connect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.ledger.record import Session
from coordinator.store.api import Compare, Field, Put, Txn
from tests.model.image import Op, Tamper
from tests.model.state import Config

ONE_FAILS = Config(failing=(True, False))
NOBODY_FAILS = Config(failing=(False, False))
MOVES = replace(NOBODY_FAILS, slots=2, moves=True)


@dataclass(frozen=True)
class Mutant:
    """A configuration without one safeguard, and a word of what must be found (`heal`: a leak)."""

    config: Config
    finds: str


def _without(names: str, drops: Callable[[Compare], bool]) -> Tamper:
    """Leaves compares out of the writes of these names."""
    def tamper(op: Op, txn: Txn) -> Txn:
        if op.name not in names.split():
            return txn
        return replace(txn, compares=tuple(each for each in txn.compares if not drops(each)))

    return tamper


def _on(key: str) -> Callable[[Compare], bool]:
    return lambda compare: f"/{key}/" in compare.key


def _is_slot_or_seat(compare: Compare) -> bool:
    return compare.range_end is None and ("/session/" in compare.key or "/seat/" in compare.key)


def _unbound(op: Op, txn: Txn) -> Txn:
    """A reservation that neither compares the registration nor puts its receipt on its lease."""
    if op.name != "reserve":
        return txn
    free = _without("reserve", _on("worker"))(op, txn)
    return replace(free, puts=tuple(Put(each.key, each.value) for each in free.puts))


def _half(**parts: tuple[()]) -> Tamper:
    """A move of which only a part is sent."""
    return lambda op, txn: replace(txn, **parts) if op.name == "relocate" else txn


def _is_of_mod(compare: Compare) -> bool:
    return "/session/" in compare.key and compare.field is Field.MOD


def _is_of_create(compare: Compare) -> bool:
    return "/session/" in compare.key and compare.field is Field.CREATE


def _alone(op: Op, session: Session) -> Session:
    return replace(session, siblings=()) if op.name == "relocate" else session


def _never_terminating(op: Op, session: Session) -> Session:
    return replace(session, terminating=False) if op.name in ("reassert", "open", "closing") else session


def _always_abandoned(op: Op, session: Session) -> Session:
    return replace(session, abandoned=True) if op.name == "reap" else session


def _always_born(op: Op, session: Session) -> Session:
    return replace(session, pid=session.pid or 1) if op.name == "reap" else session


MUTANTS: dict[str, Mutant] = {
    "release without the compare": Mutant(
        replace(ONE_FAILS, tamper=_without("release", _on("session"))), "I2"),
    "reaper's release without the compare": Mutant(
        replace(ONE_FAILS, tamper=_without("reap", _on("session"))), "I2"),
    "open without the compare": Mutant(replace(ONE_FAILS, tamper=_without("open", _on("session"))), "I4"),
    "reservation without the compares of slot and seat": Mutant(
        replace(ONE_FAILS, tamper=_without("reserve", _is_slot_or_seat)), "I4"),
    "reservation without the receipt's compare": Mutant(
        replace(ONE_FAILS, tamper=_without("reserve", _on("receipt"))), "I4"),
    "reservation not bound to the registration": Mutant(replace(ONE_FAILS, tamper=_unbound), "I4"),
    "connect before the receipt": Mutant(replace(ONE_FAILS, waits_for_receipt=False), "I3"),
    "release on a lost lease": Mutant(replace(ONE_FAILS, frees_on_lease_loss=True), "I2"),
    "never_born without a known death": Mutant(
        replace(ONE_FAILS, knows_death=False, blind=_always_abandoned), "I2"),
    "a restart frees a permit without a pid": Mutant(
        replace(ONE_FAILS, restart=True, restart_frees_unborn=True, blind=_always_born), "I2"),
    "NULL as absence": Mutant(replace(ONE_FAILS, sees_everything=False), "I2"),
    "starters without a name not looked for": Mutant(replace(ONE_FAILS, sees_starters=False), "I2"),
    "serving before OPEN is recorded": Mutant(replace(ONE_FAILS, serves_after_open=False), "I2"),
    "a reset taken for an orderly end": Mutant(replace(ONE_FAILS, waits_for_eof=False), "I2"),
    "reassert though it is being terminated": Mutant(
        replace(ONE_FAILS, terminate=True, blind=_never_terminating), "terminated"),
    "no void": Mutant(replace(ONE_FAILS, voids=False), "heal"),
    "unused not given back": Mutant(replace(ONE_FAILS, gives_back_unused=False), "heal"),
    "a silent attempt not called abandoned": Mutant(replace(ONE_FAILS, abandons=False), "heal"),
    "an unknown release taken for won": Mutant(replace(ONE_FAILS, settles_release=False), "heal"),
    "a move without its compares": Mutant(
        replace(MOVES, tamper=_without("relocate", _on("session"))), "I4"),
    "a move into a slot that is not seen to be free": Mutant(
        replace(MOVES, tamper=_without("relocate", _is_of_create)), "I4"),
    "a move of a session that is not seen to be where it was": Mutant(
        replace(MOVES, tamper=_without("relocate", _is_of_mod)), "I4"),
    "a move that frees the high slot first": Mutant(replace(MOVES, tamper=_half(puts=())), "I2"),
    "a move that leaves the high slot": Mutant(replace(MOVES, tamper=_half(deletes=())), "I4"),
    "a moved permit told to be gone": Mutant(replace(MOVES, follows=False), "heal"),
    "a move into a sibling's slot": Mutant(replace(MOVES, siblings=True, blind=_alone), "I2"),
    "no hello after a lost lease": Mutant(replace(ONE_FAILS, says_hello=False), "I4"),
}
