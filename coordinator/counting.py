"""The leader's count of strangers: once a lease cycle at the server of every epoch.

A count that calls for an alert is made again, between two readings of the ledgers, before anything is told:
sessions of ours that were opened since the last reading are no strangers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import structlog
import trio

from coordinator.events import Event
from coordinator.ledger.claims import NO_CLAIMS
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.proofs import Look
from coordinator.ledger.record import UnknownSchema
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.looks import Eyes, LookFailed
from coordinator.store.api import StoreUnavailable, StoreUnknown
from coordinator.strangers import Census, Ours, Promise, count_strangers, is_eaten, is_over
from coordinator.view import View

_log = structlog.get_logger("coordinator.strangers")


class Counting:
    """Counts while this coordinator leads. `census` is what was seen last, by node."""

    def __init__(
        self, eyes: Eyes, ledgers: Mapping[str, Ledger], views: Callable[[], Mapping[str, View]], *,
        ttl_seconds: float,
    ) -> None:
        self._eyes = eyes
        self._ledgers = ledgers
        self._views = views
        self._ttl = ttl_seconds
        self._last: list[LedgerSnapshot] = []
        self._claims = NO_CLAIMS
        self._said: dict[Event, set[str]] = defaultdict(set)
        self.census: dict[str, Census] = {}

    @property
    def eaten(self) -> frozenset[str]:
        """The nodes at which the admin reserve is not whole."""
        return frozenset(self._said[Event.ADMIN_RESERVE_EATEN])

    async def watch(self) -> None:
        """For ever; at the end of the term nothing is said of it any more."""
        try:
            while True:
                try:
                    await self.count()
                except (StoreUnavailable, StoreUnknown):
                    pass  # the views say so
                except (UnknownSchema, ValueError) as fault:
                    _log.error(Event.SOMETHING_FAILED, why=f"counting strangers: {fault}")
                await trio.sleep(self._ttl)  # noqa: TID251 - who connects to a server tells nobody here
        finally:
            self._last, self._claims, self.census = [], NO_CLAIMS, {}
            self._said.clear()

    async def count(self) -> None:
        """Once at every server. Raises StoreUnavailable, UnknownSchema."""
        promises = _promises(self._views().values())
        for gone in self.census.keys() - promises.keys():
            del self.census[gone]
        for said in self._said.values():
            said.intersection_update(promises)
        for node, promise in promises.items():
            census = await self._count_at(node, promise)
            if census is not None:
                self.census[node] = census
                self._judge(census, promise)

    async def _count_at(self, node: str, promise: Promise) -> Census | None:
        look = await self._look(node)
        if look is None:
            return None
        census = count_strangers(look, Ours.of(self._last, self._claims))
        if not (is_over(census, promise) or is_eaten(census, promise)):
            return census
        before, claimed = await self._read(), self._claims
        look = await self._look(node)
        after = await self._read()
        ours = Ours.of([*before, *after], claimed | self._claims)
        return count_strangers(look, ours) if look is not None else None

    async def _look(self, node: str) -> Look | None:
        try:
            look = await self._eyes.look(node)
        except LookFailed:
            return None
        return look if look.void is None else None  # the backend reaper names what is missing

    async def _read(self) -> list[LedgerSnapshot]:
        self._last = [await ledger.snapshot() for ledger in self._ledgers.values()]
        for ledger in tuple(self._ledgers.values())[:1]:  # any one tells of the whole fleet
            self._claims = (await ledger.fleet_claims()).besides()
        return self._last

    def _judge(self, census: Census, promise: Promise) -> None:
        if self._is_news(Event.STRANGERS_OVER, census.node, is_over(census, promise)):
            _log.warning(
                Event.STRANGERS_OVER, node=census.node, strangers=census.strangers,
                other_clients=promise.other_clients,
                who=[f"{count} of {user} from {address}" for user, address, count in census.shown()[:5]])
        if self._is_news(Event.ADMIN_RESERVE_EATEN, census.node, is_eaten(census, promise)):
            biggest = census.biggest
            assert biggest is not None  # there are strangers
            _log.critical(
                Event.ADMIN_RESERVE_EATEN, node=census.node, free=census.free,
                admin_reserve=promise.admin_reserve, strangers=census.strangers, user=biggest.user,
                application_name=biggest.application_name, address=biggest.address, sessions=biggest.count)

    def _is_news(self, event: Event, node: str, holds: bool) -> bool:
        """Whether it is so and was not at the last count."""
        said = self._said[event]
        was = node in said
        if holds:
            said.add(node)
        else:
            said.discard(node)
        return holds and not was


def _promises(views: Iterable[View]) -> dict[str, Promise]:
    """By the server of each epoch, what the ledgers there promise together."""
    found: dict[str, Promise] = {}
    for view in views:
        if view.epoch is None or view.policy is None or view.state != "ACTIVE":
            continue
        node = view.epoch.backend.address
        known = found.get(node, Promise(0, 0))
        found[node] = Promise(known.other_clients + view.policy.other_clients,
                              known.admin_reserve + view.policy.admin_reserve)
    return found
