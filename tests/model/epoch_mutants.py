"""Each safeguard of an advance of the epoch, removed: what the model must find then (see mutants.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.store.api import Compare, Txn
from tests.ledger.ground import KEYS
from tests.model.epoch_state import Config

ONE_SESSION = Config(owners=(0,))
PLANNED = replace(ONE_SESSION, cut_off=False)
UNPLANNED = replace(ONE_SESSION, planned=False)
STOPPING = replace(UNPLANNED, stop=True)


@dataclass(frozen=True)
class EpochMutant:
    """A configuration without one safeguard, and a word of what must be found (`heal`: a leak)."""

    config: Config
    finds: str


def _without(name_of: str, drops: Callable[[Compare], bool]) -> Callable[[str, Txn], Txn]:
    """Leaves compares out of the writes of this name."""
    def tamper(name: str, txn: Txn) -> Txn:
        if name != name_of:
            return txn
        return replace(txn, compares=tuple(each for each in txn.compares if not drops(each)))

    return tamper


def _on_epoch(compare: Compare) -> bool:
    return compare.key == KEYS.epoch()


EPOCH_MUTANTS: dict[str, EpochMutant] = {
    "an epoch overwritten: a command that gives up, without its compare": EpochMutant(
        replace(PLANNED, again=True, aborts=False, tamper=_without("grant again", _on_epoch)), "drain"),
    "an epoch overwritten: the leader, without its compare": EpochMutant(
        replace(PLANNED, again=True, tamper=_without("revive", _on_epoch)), "drain"),
    "an epoch overwritten: an abort without its compares": EpochMutant(
        replace(PLANNED, tamper=_without("abort", lambda each: True)), "drain"),
    "a leader that reopens where it cannot see the target": EpochMutant(
        replace(PLANNED, stays_unseen=False), "drain"),
    "an abort after the promotion was ordered": EpochMutant(
        replace(PLANNED, abort_sees_promotion=False), "drain"),
    "a reservation without the epoch's compare": EpochMutant(
        replace(PLANNED, aborts=False, tamper=_without("reserve", _on_epoch)), "drain"),
    "a drain that does not wait for unknown permits": EpochMutant(
        replace(PLANNED, waits_for_unknown=False), "drain"),
    "a promotion that is ordered without a look at the epoch": EpochMutant(
        replace(PLANNED, confirms=False), "drain"),
    "a drain given up without a look at its target": EpochMutant(
        replace(PLANNED, looks_at_target=False), "drain"),
    "a hello that acknowledges what the worker has not heard of": EpochMutant(
        replace(UNPLANNED, acknowledges_what_it_serves=False), "I10"),
    "a hello answered from an old view": EpochMutant(replace(STOPPING, reads_at_hello=False), "I10"),
    "acknowledged before the pools know": EpochMutant(
        replace(UNPLANNED, hears_before_it_acknowledges=False), "I10"),
    "acknowledged between a check and its grant": EpochMutant(
        replace(UNPLANNED, grants_as_it_checks=False), "I10"),
    "an expired lease counted before the worker's own clock": EpochMutant(
        replace(STOPPING, own_clock_first=False), "I10"),
    "an acknowledgement forgotten by a hello that was on its way": EpochMutant(
        replace(UNPLANNED, remembers_acknowledgements=False), "heal"),
}
