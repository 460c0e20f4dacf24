"""What a worker of this host says of execution permits: the operations of its link, one method each."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.host_shares import HostShares
from coordinator.ledger.execution import Seat
from coordinator.ledger.ledger import Ledger
from coordinator.link import Args, Handler, LinkRefused
from coordinator.registry import Local


class WorkerShares:
    """The operations of one link. `worker` raises LinkRefused before hello."""

    def __init__(
        self, shares: HostShares, ledgers: dict[str, Ledger], worker: Callable[[], Local]
    ) -> None:
        self._shares = shares
        self._ledgers = ledgers
        self._worker = worker

    def operations(self) -> tuple[Handler, ...]:
        """By the names of their methods."""
        return (self.demand, self.share_lower)

    async def demand(self, args: Args) -> Args:
        """What it wants to execute, all of it: {class: {tenants: {tenant: [weight, queued, in flight]}}}."""
        wanted = {
            str(name): {str(tenant): int(queued) + int(executing)
                        for tenant, (_, queued, executing) in each["tenants"].items()}
            for name, each in args["classes"].items()}
        if args["db"] in self._ledgers:
            self._shares.wants(self._worker(), args["db"], wanted)
        return {}

    async def share_lower(self, args: Args) -> Args:
        """It has stopped using what it has above `to`. Answered when the ledger says so, too."""
        if args["db"] not in self._ledgers:
            raise LinkRefused("bad_request", f"no ledger {args['db']}")
        seat = Seat(args["class"], self._worker().boot_id)
        return {"share": await self._shares.lower(args["db"], seat, int(args["to"]))}
