"""What a worker tells of its sessions when their ledger is rebuilt, and how they take their new permits.

Both are one step without a wait: nothing opens or closes between what is looked at and what is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import structlog

from coordinator.ledger.record import Kind, Permit
from coordinator.ledger.states import SessionState
from coordinator.link import Args, Handler
from pooler.observe.events import Event
from pooler.pool.holder import Holder
from pooler.pool.holdings import Holdings, plain
from pooler.pool.ledger_view import LedgerView

OPENING = frozenset({SessionState.RESERVED, SessionState.CONNECTING})

log = structlog.get_logger()


def handlers(holdings: Holdings, holder: Holder, ledgers: Mapping[str, LedgerView]) -> dict[str, Handler]:
    """The two operations of the link."""
    async def recover(args: Args) -> Args:
        return tell(args["db"], holdings, holder, ledgers.get(args["db"]))

    async def moved(args: Args) -> Args:
        return take(args["db"], args["moves"], holdings, holder)

    return {"recover": recover, "moved": moved}


def tell(db: str, holdings: Holdings, holder: Holder, view: LedgerView | None) -> dict[str, Any]:
    """The answer to `recover`: every session whose socket is open, every permit that is held or was given up,
    how many sessions are being opened (it is to be asked again then), and the epoch served under.
    """
    held = holdings.of(db)
    open_ = {each.permit for each in held if each.state is SessionState.OPEN and not each.ending}
    sessions = [each for each in holder.sessions(db) if each.permit in open_]
    epoch = None
    if view is not None and view.epoch and view.backend is not None:
        epoch = {"number": view.epoch, "backend": asdict(view.backend)}
    return {
        "sessions": [{**asdict(each), "permit": plain(each.permit), "backend": asdict(each.backend)}
                     for each in sessions],
        "permits": [plain(each.permit) for each in held],
        "opening": sum(each.state in OPENING and not each.ending for each in held),
        "epoch": epoch,
    }


def take(db: str, moves: list[list[Any]], holdings: Holdings, holder: Holder) -> dict[str, Any]:
    """Carry `moved` out; saying it again changes nothing. A session that got no permit is closed; `lost` are
    the new permits of those that have ended, or begun to end, since they were told of.
    """
    lost: list[Any] = []
    for raw, new in moves:
        permit = named(raw)
        if new is None:
            log.error(Event.SESSION_PERMIT_GONE, db=db, permit=str(permit), why="no slot was free for it")
            holder.terminate(db, permit)
        elif (db, named(new)) in holdings:
            continue  # it was told before, and its answer did not arrive
        elif not holder.holds(db, permit) or not holdings.exchange(db, permit, named(new)):
            lost.append(new)
        else:
            holder.move(db, permit, named(new))
    return {"lost": lost}


def named(raw: list[Any]) -> Permit:
    """A permit as it came over the link."""
    kind, slot, generation = raw
    return Permit(Kind(kind), slot, generation)
