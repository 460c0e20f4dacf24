"""The product with one safeguard removed, each of which the simulation must notice.

A mutant changes the transactions that the product sends, one of its functions, or what the stand-in for a
worker's process does. The model has mutants of its own (mutants.py), with the shortest story of each; there,
too, are those of the compares of a move, which need two moves at one instant and are too rare here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from coordinator import marking, reaping
from coordinator.ledger import basis, fence, proofs, requests, reservation, reserving, rules
from coordinator.ledger.access import Access
from coordinator.ledger.ledger import Granted, Ledger
from coordinator.ledger.proofs import Awaiting, Look, Proven
from coordinator.ledger.record import Session
from coordinator.ledger.rules import Release
from coordinator.ledger.states import Actor, Proof, SessionState
from coordinator.store.api import Compare, Lost, Put, StoreUnavailable, StoreUnknown, Txn, Won
from tests.ledger.ground import KEYS
from tests.model.worker_world import Worker

Tamper = Callable[[Txn], Txn]


@dataclass(frozen=True)
class ProductMutant:
    """What is broken. `patches`: (where, name, with what). `first`: the seed to begin with, where one is
    known that shows it soon."""

    tamper: Tamper | None = None
    patches: tuple[tuple[Any, str, Any], ...] = ()
    worker: dict[str, bool] = field(default_factory=dict)
    first: int = 0

    def make(self, *args: Any) -> Worker:
        worker = Worker(*args)
        for name, value in self.worker.items():
            setattr(worker, name, value)
        return worker

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, name, value in self.patches:
                stack.enter_context(patch.object(target, name, value))
            yield


# ---- transactions

def _is_release(txn: Txn) -> bool:
    return any("/session/" in key for key in txn.deletes) and not txn.puts


def _is_reservation(txn: Txn) -> bool:
    return any("/receipt/" in put.key for put in txn.puts) and any("/session/" in put.key for put in txn.puts)


def _is_move(txn: Txn) -> bool:
    return any("/session/" in key for key in txn.deletes) and bool(txn.puts)


def _frees_first(txn: Txn) -> Txn:
    """A move of which only the first half is sent: the high slot is free, and the low one yet to be taken."""
    return replace(txn, puts=()) if _is_move(txn) else txn


def _stays(txn: Txn) -> Txn:
    """A move that takes the low slot and leaves the high one as it is."""
    return replace(txn, deletes=()) if _is_move(txn) else txn


def _opens(txn: Txn) -> bool:
    puts = [put for put in txn.puts if "/session/" in put.key]
    return bool(puts) and Session.decode(puts[0].value).state is SessionState.OPEN


def _without(applies: Callable[[Txn], bool], drops: Callable[[Compare], bool]) -> Tamper:
    """Leaves compares out of the transactions it applies to."""
    def tamper(txn: Txn) -> Txn:
        if not applies(txn):
            return txn
        return replace(txn, compares=tuple(each for each in txn.compares if not drops(each)))

    return tamper


def _on(key: str) -> Callable[[Compare], bool]:
    return lambda compare: key in compare.key and compare.range_end is None


def _is_epoch(txn: Txn) -> bool:
    return any(put.key == KEYS.epoch() for put in txn.puts)


def _unbound(txn: Txn) -> Txn:
    """A reservation that neither compares the registration nor puts its receipt on its lease."""
    if not _is_reservation(txn):
        return txn
    free = _without(_is_reservation, _on("/worker/"))(txn)
    return replace(free, puts=tuple(Put(each.key, each.value) for each in free.puts))


def _same_generation(txn: Txn) -> Txn:
    """Every permit of a slot has the same generation."""
    if not _is_reservation(txn):
        return txn
    puts = tuple(
        replace(put, value=replace(Session.decode(put.value), generation=7).encode())
        if "/session/" in put.key else put for put in txn.puts)
    return replace(txn, puts=puts)


# ---- functions

_granted, _decide_release = reserving.Reserving._granted, rules._release
_prove, _grounds = proofs.proof_of_absence, basis.Basis._grounds


def _within(*args: Any) -> reservation.Grounds | None:
    grounds = _grounds(*args)
    return grounds and replace(grounds, beyond=False)


def _grant_again(self: reserving.Reserving, *args: Any) -> Granted:
    granted = _granted(self, *args)
    return replace(granted, permit=replace(granted.permit, generation=7))


def _release_anyway(session: Session, command: Release, move: Any) -> Any:
    """A release whose proof is not held against what the permit records."""
    if command.seen_revision not in (0, move.entry.mod_revision):
        return _decide_release(session, command, move)
    return move.out(command.proof, command.actor)


def _dead_or_not(*args: Any, owner_known_dead: bool, **options: Any) -> Proven | Awaiting:
    return _prove(*args, owner_known_dead=True, **options)


def _always_first(self: Any, case: Any, look: Look, first: Look | None, ledger_tag: str) -> bool:
    return not case.session.pid and (first is None or not first.backend.same_server(look.backend))


def _absence_of_the_unborn(session: Session, look: Look, **options: Any) -> Proven | Awaiting:
    """A look that shows no session with its birth tag is enough."""
    tag = session.permit.birth_tag(options["ledger_tag"])
    if session.pid or any(row.application_name == tag for row in look.rows):
        return _prove(session, look, **options)
    return Proven(Proof.ABSENT, "not there")


def _restart_frees_all(session: Session, look: Look, **options: Any) -> Proven | Awaiting:
    recorded = session.backend
    if recorded is not None and recorded.address == look.backend.address \
            and look.backend.postmaster_start_us > recorded.postmaster_start_us:
        return Proven(Proof.RESTARTED, "a later postmaster")
    return _prove(session, look, **options)


_prove_fence = fence.proof_of_fence


def _fence_frees_all(session: Session, fenced: fence.Fenced) -> Proven | Awaiting:
    if session.backend is not None and session.backend.address == fenced.address and not session.pid:
        return Proven(Proof.FENCED, "its node went off")
    return _prove_fence(session, fenced)


def _null_is_absence(session: Session, look: Look, **options: Any) -> Proven | Awaiting:
    if session.pid and not any((row.pid, row.backend_start_us) == (session.pid, session.backend_start_us)
                               for row in look.rows):
        return Proven(Proof.ABSENT, "no such row")
    return _prove(session, look, **options)


async def _lost_if_unknown(self: Access, txn: Txn) -> tuple[Won | Lost | None, bool]:
    """No answer is taken for a loss."""
    try:
        outcome = await self._store.txn(txn)
    except (StoreUnknown, StoreUnavailable):
        return None, True
    return outcome, True


async def _forget_at_once(self: requests.Requests, owner: str, answered: Any) -> bool:
    """Without putting the registration again; and also of what is outstanding."""
    for request in answered:
        await self._access.carry_out(Txn(deletes=(self._keys.receipt(request),)))
    return True


async def _tells_gone(self: Ledger, owner: str, command: Any) -> Any:
    """What is said of a session by the permit it had is answered gone."""
    return await self.apply(command), None


def _unmarked(session: Session, command: Any, move: Any) -> Any:
    return rules.Already(session)


def _frees_orphans(permit: Any, *told: Any) -> Release:
    return Release(permit, Proof.EOF, Actor.OWNER)


def _back_from_the_dead(session: Session) -> None:
    return None


PRODUCT_MUTANTS: dict[str, ProductMutant] = {
    "release without its compare": ProductMutant(_without(_is_release, _on("/session/"))),
    "writes without the slot's compare": ProductMutant(
        _without(lambda txn: not _is_release(txn), lambda c: _on("/session/")(c) or _on("/seat/")(c))),
    "reassert and open without their compare": ProductMutant(_without(_opens, _on("/session/"))),
    "no receipt's compare": ProductMutant(_without(lambda txn: True, _on("/receipt/"))),
    "reservation not bound to the registration": ProductMutant(_unbound, first=14),
    "reservation without the epoch's compare": ProductMutant(_without(_is_reservation, _on(KEYS.epoch()))),
    "reservation without the policy's compare": ProductMutant(_without(_is_reservation, _on(KEYS.alias()))),
    "reservation while slots beyond the policy are held": ProductMutant(
        _without(_is_reservation, lambda compare: compare.range_end is not None),
        patches=((basis.Basis, "_grounds", _within),)),
    "a move that frees the high slot first": ProductMutant(_frees_first),
    "a move that leaves the high slot": ProductMutant(_stays),
    "a moved permit told to be gone": ProductMutant(patches=((Ledger, "apply_for", _tells_gone),)),
    "an epoch overwritten": ProductMutant(_without(_is_epoch, _on(KEYS.epoch()))),
    "a generation used again": ProductMutant(
        _same_generation, ((reserving.Reserving, "_granted", _grant_again),)),
    "release on a lost lease": ProductMutant(patches=((marking, "MarkOwnerGone", _frees_orphans),)),
    "never_born without a known death": ProductMutant(patches=(
        (reaping, "proof_of_absence", _dead_or_not), (reaping.FirstLooks, "_can_be_first", _always_first),
        (rules, "_release", _release_anyway))),
    "absence of a permit without a process believed": ProductMutant(patches=(
        (reaping, "proof_of_absence", _absence_of_the_unborn), (rules, "_release", _release_anyway))),
    "a restart frees a permit without a process": ProductMutant(patches=(
        (reaping, "proof_of_absence", _restart_frees_all), (rules, "_release", _release_anyway))),
    "a fence frees a permit whose owner may only be paused": ProductMutant(patches=(
        (fence, "proof_of_fence", _fence_frees_all), (rules, "_release", _release_anyway)), first=6),
    "NULL as absence": ProductMutant(patches=((reaping, "proof_of_absence", _null_is_absence),)),
    "an unknown outcome taken for a loss": ProductMutant(patches=((Access, "carry_out", _lost_if_unknown),)),
    "receipts forgotten while reservations are on their way": ProductMutant(
        patches=((requests.Requests, "forget", _forget_at_once),), worker={"forgets_early": True}, first=94),
    "terminated without its mark": ProductMutant(patches=((rules, "_terminating", _unmarked),), first=23),
    "reassert though it is being terminated": ProductMutant(
        patches=((rules, "_returning", _back_from_the_dead),), first=15),
    "connect before the receipt": ProductMutant(worker={"connects_unanswered": True}),
    "a reset taken for an orderly end": ProductMutant(worker={"trusts_reset": True}),
}
