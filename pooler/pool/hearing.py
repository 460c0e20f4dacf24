"""What the coordinator says of this worker's permits and ledgers, and what the worker does at its word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from coordinator.ledger.record import Permit
from coordinator.link import Args, Handler, LinkRefused
from pooler.observe.events import Event
from pooler.pool import recovering
from pooler.pool.errands import Errands
from pooler.pool.holder import Holder
from pooler.pool.holdings import Holdings, Verdict, plain
from pooler.pool.ledger_view import LedgerView
from pooler.pool.link_up import Uplink
from pooler.pool.recovering import named as _permit
from pooler.pool.shares import Shares
from pooler.pool.telling import Key, lost_permits, tell_cycle

log = structlog.get_logger()


class Hearing:
    """The listening end of a worker's link. `ledgers` is kept as it is heard; `counts` are the permits' own.

    Nothing may be heard before `answer_over` has said what is answered on.
    """

    def __init__(
        self, ledgers: dict[str, LedgerView], holdings: Holdings, holder: Holder, counts: Counter[str]
    ) -> None:
        self._ledgers = ledgers
        self._holdings = holdings
        self._holder = holder
        self._counts = counts
        self.ticket_moved: Callable[[Args], None] = lambda args: None
        self._lost: set[Key] = set()  # of the last cycle: see lost_permits
        self.leaked: frozenset[Key] = frozenset()  # lost in two cycles in a row

    def answer_over(self, uplink: Uplink, errands: Errands) -> None:
        """What has to be answered goes this way."""
        self._uplink, self._errands = uplink, errands
        self.shares = Shares(uplink, errands)

    def handlers(self) -> Mapping[str, Handler]:
        """What the coordinator may call."""
        return {"ledger": self._on_ledger, "permit_unknown": self._on_unknown, "permit_gone": self._on_gone,
                "shed": self._on_shed, "spare": self._on_spare, "retire": self._on_retire,
                "cancel": self._on_cancel, "show": self._on_show, "command": self._on_command,
                "ticket_moved": self._on_ticket_moved, "share": self._on_share,
                **recovering.handlers(self._holdings, self._holder, self._ledgers)}

    def heard(self, answer: Args) -> None:
        """The answer to hello: every ledger, and every permit that is not as we said."""
        for db, ledger in answer["ledgers"].items():
            self._see(LedgerView.parse(db, ledger))
        self.shares.greeted(answer.get("shares"))
        for db, old, new in answer.get("moved") or ():
            recovering.take(db, [[old, new]], self._holdings, self._holder)
        for db, permit in answer["gone"]:
            self.gone(db, _permit(permit))
        for db, permit in answer["unknown"]:
            self._errands.start(partial(self._reassert, db, _permit(permit)))

    def epochs(self) -> dict[str, int]:
        """See Listener."""
        return {db: view.epoch for db, view in self._ledgers.items() if view.epoch}

    def believed(self) -> dict[str, dict[str, int]]:
        """See Listener."""
        return self.shares.report()

    def cut_off(self) -> None:
        """The link was lost."""
        for view in list(self._ledgers.values()):
            self._see(view.cut_off())

    def _see(self, view: LedgerView) -> None:
        view = view.after(self._ledgers.get(view.db))
        self._ledgers[view.db] = view
        self._holder.ledger_changed(view)
        self.shares.learned(view.db)

    def cycle(self) -> Args:
        """See Listener."""
        lost = lost_permits(self._holdings, self._holder)
        self.leaked, self._lost = frozenset(lost & self._lost), lost
        return tell_cycle(self._holdings, self._holder, lost)

    def is_whole(self, db: str) -> bool:
        """What is missing in this ledger is really gone."""
        view = self._ledgers.get(db)
        return view is not None and view.whole

    async def _reassert(self, db: str, permit: Permit) -> None:
        verdict = self._holdings.on_unknown(db, permit, self._holder.holds(db, permit))
        if verdict is Verdict.NOTHING:
            return
        closing = verdict is Verdict.REASSERT_CLOSING
        try:
            await self._uplink.insist("reassert", db=db, permit=plain(permit), closing=closing)
        except LinkRefused as refused:
            if refused.code == "gone":
                self.gone(db, permit)
            elif not closing:
                self._holder.terminate(db, permit)
        else:
            self._counts["reasserted"] += 1
            log.info(Event.SESSION_REASSERTED, db=db, permit=str(permit))

    def gone(self, db: str, permit: Permit) -> None:
        """The ledger does not have this permit."""
        in_hand = self._holder.holds(db, permit)
        if self._holdings.on_gone(db, permit, in_hand, self.is_whole(db)) is Verdict.VIOLATED:
            self.violated(db, permit)

    def violated(self, db: str, permit: Permit) -> None:
        """Somebody freed the permit of a live session: it serves nobody any more."""
        self._counts["gone"] += 1
        log.error(Event.SESSION_PERMIT_GONE, db=db, permit=str(permit))
        if self._holder.holds(db, permit):
            self._holder.close_now(db, permit)

    async def _on_ledger(self, args: Args) -> None:
        self._see(LedgerView.parse(args["db"], args["ledger"]))

    async def _on_unknown(self, args: Args) -> None:
        self._errands.start(partial(self._reassert, args["db"], _permit(args["permit"])))

    async def _on_gone(self, args: Args) -> None:
        self.gone(args["db"], _permit(args["permit"]))

    async def _on_retire(self, args: Args) -> None:
        view = self._ledgers.get(args["db"])
        if view is None or not view.grows:
            return  # nothing is closed by choice while no other could be had
        for permit in args["permits"]:
            self._holder.give_up(args["db"], _permit(permit))

    async def _on_shed(self, args: Args) -> None:
        self._holder.shed(args["db"], args["pool"], args["user"], args["count"])

    async def _on_spare(self, args: Args) -> None:
        self._holder.spare(args["db"], args["pool"], args["user"], args["count"])

    async def _on_share(self, args: Args) -> None:
        self.shares.hear(args["db"], args["class"], args["share"])

    async def _on_ticket_moved(self, args: Args) -> None:
        self.ticket_moved(args)

    async def _on_cancel(self, args: Args) -> Args:
        await self._holder.cancel(args["key"])
        return {}

    async def _on_show(self, args: Args) -> Args:
        return {"rows": await self._holder.show(args["what"])}

    async def _on_command(self, args: Args) -> Args:
        return {"notices": await self._holder.command(args["name"], args["args"])}
