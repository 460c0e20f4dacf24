"""What a leader does for backends that go without a drain: follow the failover, fence what was left."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from coordinator.fencing import Fencer
from coordinator.following import Following
from coordinator.glancing import Asks, Glances
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Session
from coordinator.patroni import Patroni
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import Compare, Store
from coordinator.view import Views


class Failover:
    """Both parts over the ledgers of one coordinator. `on_released` hears of permits that a fence freed."""

    def __init__(
        self, spec: CoordinatorSpec, store: Store, keys: FleetKeys, ledgers: Mapping[str, Ledger],
        views: Views, asks: Asks, *, now_us: Callable[[], int],
    ) -> None:
        databases, glances = spec.ledgers(), Glances(asks)
        patroni = Patroni(spec.patroni) if spec.patroni else None
        self._pace_seconds = spec.lease_ttl_seconds
        self._following = Following(
            store, keys, ledgers, views, databases, glances, now_us=now_us,
            drain_timeout_seconds=spec.drain_timeout_seconds,
            ask_patroni=patroni.cluster if patroni is not None else None)
        self._fencer = Fencer(
            store, keys, ledgers, command=spec.fence_command, host=spec.host, now_us=now_us, look=glances.at,
            roles={db: specs[0].role for db, specs in databases.items()})
        self._fences = bool(spec.fence_command)
        if self._fences:
            self._following.on_left.append(self._fencer.left)
        self.on_released: list[Callable[[str, Session], None]] = self._fencer.on_released

    def hint(self, db: str) -> None:
        """A worker met something at the backend of `db` that it should not be."""
        self._following.hint(db)

    def became_unknown(self, db: str, session: Session) -> None:
        """A permit did: a fence that was confirmed may free it."""
        self._fencer.stir()

    def reasons(self) -> dict[str, str]:
        """By database: what is wrong with its backend, or to be known of it."""
        return self._following.reasons()

    def unfit(self) -> frozenset[str]:
        """Databases whose backend cannot serve as it should, with nobody seen that could."""
        return self._following.unfit()

    async def run(self) -> None:
        """For ever: a fence that was begun comes to its end, whoever leads by then."""
        await self._fencer.run()

    async def lead(self, fence: Compare) -> None:
        """For as long as this coordinator leads."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._following.lead, fence)
            if self._fences:
                nursery.start_soon(self._fencer.lead, fence, self._pace_seconds)
