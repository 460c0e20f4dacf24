"""Moves of several permits in one transaction, where each stands on its own slot and nothing else.

Whatever is not plain goes alone, as it would without company: a permit that is not remembered, a move that
there is nothing to do for, one that compares more, and every one of a transaction that was not won. A
transaction of deletes only stays one: a full etcd carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.ledger.access import Access, first
from coordinator.ledger.answers import Applied
from coordinator.ledger.batch import fit_together, join
from coordinator.ledger.keys import only
from coordinator.ledger.record import Permit, UnknownSchema
from coordinator.ledger.rules import Command, Decision, Release, Write
from coordinator.ledger.states import Actor
from coordinator.store.api import Entry, Lost, Txn, Won

MOVES_MAX = 40


@dataclass(eq=False, slots=True)
class Move:
    """A command until it is carried out. `alone`: it is for its sender to carry out; then `sure` False means
    that this one's transaction may yet take effect."""

    command: Command
    answer: Applied | None = None
    alone: bool = False
    sure: bool = True
    left: bool = False

    @property
    def answered(self) -> bool:
        return self.alone or self.answer is not None


@dataclass(frozen=True, slots=True)
class _Planned:
    move: Move
    entry: Entry
    write: Write


class Moving:
    """Rounds of moves. The callables are the Ledger's: what it remembers of a permit, what a command would do
    to it, and what follows from a write that was won."""

    def __init__(
        self, access: Access, entry_of: Callable[[Permit], Entry | None],
        decide: Callable[[Entry, Command], Decision],
        applied: Callable[[Permit, Entry, Write, int], Applied],
        remember: Callable[[Permit, Entry | None], None],
    ) -> None:
        self._access = access
        self._entry_of = entry_of
        self._decide = decide
        self._applied = applied
        self._remember = remember

    async def round(self, waiting: Sequence[Move]) -> None:
        """One transaction for all that can share it; of one permit, one move, and of one key (two permits of
        one seat would be a fault of ours, but none for all the others to end by)."""
        planned: dict[Permit, _Planned] = {}
        touched: set[str] = set()
        for move in waiting:
            permit = move.command.permit
            if permit in planned or move.answered:
                continue
            plan = self._plan(move)
            if plan is None:
                move.alone = True
            elif touched.isdisjoint(written := _written(plan.write.txn)):
                planned[permit] = plan
                touched |= written
        txns = [each.write.txn for each in planned.values()]
        together = tuple(planned.values())[:fit_together(txns, MOVES_MAX)]
        if together:
            await self._carry_out(together)

    def _plan(self, move: Move) -> _Planned | None:
        entry = self._entry_of(move.command.permit)
        if entry is None or self._access.lost:
            return None
        try:
            decision = self._decide(entry, move.command)
        except (UnknownSchema, ValueError):
            return None
        plain = isinstance(decision, Write) and len(decision.txn.compares) == 1
        return _Planned(move, entry, decision) if isinstance(decision, Write) and plain else None

    async def _carry_out(self, together: Sequence[_Planned]) -> None:
        txn = join(each.write.txn for each in together)
        outcome, sure = await self._access.carry_out(txn)
        won = isinstance(outcome, Won) and not self._access.lost
        for each in together:
            permit = each.move.command.permit
            if won and outcome is not None:
                each.move.answer = self._applied(permit, each.entry, each.write, outcome.revision)
                continue
            each.move.alone, each.move.sure = True, sure
            if isinstance(outcome, Lost):
                self._remember(permit, first(_read(txn, outcome, each.entry.key)))


def may_share(command: Command) -> bool:
    """Whether it is a worker's own word on its own permit, and not a reaper's on what it saw."""
    return not isinstance(command, Release) or (command.actor is Actor.OWNER and not command.seen_revision)


def _written(txn: Txn) -> set[str]:
    return {put.key for put in txn.puts} | set(txn.deletes)


def _read(txn: Txn, outcome: Lost, key: str) -> Sequence[Entry]:
    return outcome.reads[txn.reads.index(only(key))]
