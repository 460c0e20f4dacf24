"""The permits of one worker as it knows them, and what the ledger's word about one of them calls for.

Pure. This is what `hello` sends, so nothing leaves it before the ledger has answered for it: a slot of ours
that is not listed is freed as unused. A permit given up as unknown therefore stays listed until its slot was
seen gone, and a request that was given up until its `void` was answered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from coordinator.ledger.record import Permit
from coordinator.ledger.states import SessionState


class Verdict(Enum):
    """What to do about a permit that the ledger has marked unknown, or no longer has."""

    NOTHING = "nothing"
    REASSERT = "reassert: the session is held"
    REASSERT_CLOSING = "reassert: the session is being closed"
    VIOLATED = "the permit of a live session is gone: serve nobody with it"


@dataclass(slots=True)
class Held:
    """One permit. `ending`: the session's end was reported and the ledger has not answered yet.

    `abandoned`: it was given up before it was recorded as open.
    """

    db: str
    permit: Permit
    state: SessionState
    ending: bool = False
    abandoned: bool = False


class Holdings:
    """Every permit held and every request open."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, Permit], Held] = {}
        self._requests: set[str] = set()

    def __contains__(self, key: tuple[str, Permit]) -> bool:
        return key in self._held

    def asked(self, request_id: str) -> None:
        """A reservation is about to be asked for."""
        self._requests.add(request_id)

    def answered(self, request_id: str) -> None:
        """It was granted, refused for good, or voided."""
        self._requests.discard(request_id)

    def granted(self, db: str, permit: Permit) -> None:
        """The receipt is in hand."""
        self._held[db, permit] = Held(db, permit, SessionState.RESERVED)

    def moved(self, db: str, permit: Permit, state: SessionState) -> bool:
        """The owner's own moves between grant and end. False: the permit is not (any more) ours."""
        held = self._held.get((db, permit))
        if held is None or held.ending:
            return False
        held.state = state
        return True

    def ended(self, db: str, permit: Permit, state: SessionState, abandoned: bool = False) -> bool:
        """Its end is about to be reported, RELEASED with proof or UNKNOWN. False: there is none to report."""
        held = self._held.get((db, permit))
        if held is None or held.ending:
            return False
        held.state, held.abandoned, held.ending = state, abandoned, True
        return True

    def given_up(self, db: str, permit: Permit) -> None:
        """The ledger has it as UNKNOWN now: listed until its slot is seen gone."""
        held = self._held.get((db, permit))
        if held is not None:
            held.ending = False

    def given_up_now(self) -> list[Held]:
        """Those the ledger has as UNKNOWN by our word, whose slot was not seen gone yet."""
        return [held for held in self._held.values()
                if held.state is SessionState.UNKNOWN and not held.ending]

    def all(self) -> list[Held]:
        """Every permit."""
        return list(self._held.values())

    def of(self, db: str) -> list[Held]:
        """Every permit of this ledger."""
        return [held for held in self._held.values() if held.db == db]

    def exchange(self, db: str, permit: Permit, new: Permit) -> bool:
        """The ledger has this open session under another permit. False: it is not open any more."""
        held = self._held.get((db, permit))
        if held is None or held.ending or held.state is not SessionState.OPEN:
            return False
        del self._held[db, permit]
        self._held[db, new] = replace(held, permit=new)
        return True

    def forget(self, db: str, permit: Permit) -> None:
        """The ledger no longer has it."""
        self._held.pop((db, permit), None)

    def on_unknown(self, db: str, permit: Permit, in_hand: bool) -> Verdict:
        """The ledger has it as SESSION_UNKNOWN. `in_hand`: the session's socket is open.

        A permit that is still connecting is left alone: recording it as OPEN brings it back.
        """
        held = self._held.get((db, permit))
        if held is None or held.ending:
            return Verdict.NOTHING
        if held.state is SessionState.OPEN and in_hand:
            return Verdict.REASSERT
        return Verdict.REASSERT_CLOSING if held.state is SessionState.CLOSING else Verdict.NOTHING

    def on_gone(self, db: str, permit: Permit, in_hand: bool, whole: bool) -> Verdict:
        """The ledger no longer has it. `whole`: the ledger itself is not lost or being rebuilt.

        Expected where its end was reported, or its session was closing or already lost; otherwise somebody
        freed the permit of a live session.
        """
        held = self._held.get((db, permit))
        if held is None or (not whole and not held.ending):
            return Verdict.NOTHING
        self.forget(db, permit)
        if held.ending or held.state in {SessionState.CLOSING, SessionState.UNKNOWN}:
            return Verdict.NOTHING
        return Verdict.NOTHING if held.state is SessionState.OPEN and not in_hand else Verdict.VIOLATED

    def requests(self) -> list[str]:
        """Request ids that the ledger may still act on."""
        return sorted(self._requests)

    def report(self) -> list[dict[str, Any]]:
        """The permits for `hello`."""
        return [{"db": held.db, "permit": plain(held.permit), "state": str(held.state)}
                for held in self._held.values()]

    def count(self) -> dict[str, int]:
        """How many permits are in each state."""
        return dict(Counter(str(held.state) for held in self._held.values()))


def plain(permit: Permit) -> list[Any]:
    """A permit as it travels on the link."""
    return [str(permit.kind), permit.slot, permit.generation]
