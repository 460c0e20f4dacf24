"""Which ticket a dead worker of this host had in a transaction on which session: put into its permits.

Only the host that the worker ran on has its session table. Its own coordinator reads it, whoever leads, and
notes ticket and tenant in the permits that are SESSION_UNKNOWN. A table that tells of no ticket costs nothing
of etcd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import structlog
import trio

from coordinator.events import Event
from coordinator.inspect import doing_of, read_table_of, tables_without_process
from coordinator.ledger.ledger import Applied, Ledger
from coordinator.ledger.record import Permit, UnknownSchema
from coordinator.ledger.rules import NoteTicket
from coordinator.ledger.states import SessionState
from coordinator.session_table import Doing
from coordinator.store.api import StoreUnavailable, StoreUnknown

_log = structlog.get_logger("coordinator.noting")


class Noting:
    """Looks once a lease cycle and when told of a death."""

    def __init__(
        self, ledgers: Mapping[str, Ledger], living: Callable[[], Collection[str]], *, run_dir: Path,
        ttl_seconds: float,
    ) -> None:
        self._ledgers = ledgers
        self._living = living
        self._run_dir = run_dir
        self._ttl = ttl_seconds
        self._told: set[str] = set()  # workers of which everything is noted
        self._death = trio.Event()

    def stir(self) -> None:
        """A worker died, or a permit became unknown."""
        self._death.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self.note()
            except (StoreUnavailable, StoreUnknown):
                pass  # the next cycle tries again
            except (UnknownSchema, ValueError) as fault:
                _log.error(Event.SOMETHING_FAILED, why=f"tickets of dead workers: {fault}")
            with trio.move_on_after(self._ttl):
                await self._death.wait()
            self._death = trio.Event()

    async def note(self) -> None:
        """One look at every dead worker's table. Raises StoreUnavailable, StoreUnknown, UnknownSchema."""
        dead = set(tables_without_process(self._run_dir)) - set(self._living())
        self._told &= dead
        for boot_id in dead - self._told:
            busy = {key: doing for key, doing in read_table_of(self._run_dir, boot_id).items()
                    if doing.ticket_id}
            if not busy or await self._note_all(boot_id, busy):
                self._told.add(boot_id)

    async def _note_all(self, boot_id: str, busy: Mapping[tuple[str, Permit], Doing]) -> bool:
        """Whether nothing is left to be noted of this worker."""
        settled = True
        for db in {db for db, _ in busy}:
            ledger = self._ledgers.get(db)
            if ledger is None:
                continue
            for held in (await ledger.snapshot()).of_owner(boot_id):
                doing = doing_of(busy, db, held.session)
                if doing is None or held.session.ticket:
                    continue
                if held.session.state is not SessionState.UNKNOWN:
                    settled = False  # the leader has not marked it yet
                    continue
                note = NoteTicket(held.permit, str(doing.ticket_id), doing.tenant)
                outcome = await ledger.apply(note)
                if isinstance(outcome, Applied) and outcome.changed:
                    _log.info(Event.TICKET_NOTED, database=db, permit=str(held.permit), owner=boot_id,
                              ticket=note.ticket, tenant=note.tenant)
                settled &= isinstance(outcome, Applied)
        return settled
