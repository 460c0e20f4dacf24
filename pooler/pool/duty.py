"""What a server has to be good for, and whether it is: asked of it whenever a session is opened there.

The leader looks at the servers as well, and moves a ledger to where it belongs. This is what holds until it
has, and where it cannot look: nobody writes to a server in recovery, nor reads from one too far behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pooler.errors import BackendLost, ProtocolViolation
from pooler.net.dial import Dialled
from pooler.net.facts import SessionFacts, asked_row

# Nothing to be replayed is no lag, however long ago the last transaction was; a standby without a receiver
# cannot know what it lacks. Of the receiver any role may see only that there is one.
_LAG: Final = (
    "SELECT CASE WHEN NOT EXISTS (SELECT FROM pg_catalog.pg_stat_get_wal_receiver() r "
    "WHERE r.pid IS NOT NULL) THEN NULL WHEN pg_catalog.pg_last_wal_receive_lsn() OPERATOR(pg_catalog.<=) "
    "pg_catalog.pg_last_wal_replay_lsn() THEN 0 ELSE pg_catalog.round(extract(epoch from "
    "pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) pg_catalog.pg_last_xact_replay_timestamp()) "
    "OPERATOR(pg_catalog.*) 1000)::pg_catalog.int8 END"
)


class BackendUnfit(BackendLost):
    """The server is there, and not what its ledger needs."""


@dataclass(frozen=True, slots=True)
class Duty:
    """`role` of the ledger (write, read, offline), "" where it does not matter; `lag_seconds_max`: how far a
    standby may be behind, None: any."""

    role: str = ""
    lag_seconds_max: float | None = None

    async def check(self, session: Dialled, facts: SessionFacts) -> None:
        """An idle session at a server that said `facts` of itself.

        Raises BackendUnfit, and what pooler.net.facts raises.
        """
        where = f"server {facts.backend.address}"
        if self.role == "write" and facts.backend.in_recovery:
            raise BackendUnfit(f"{where} is in recovery: it takes no writes")
        if self.role in ("", "write") or self.lag_seconds_max is None or not facts.backend.in_recovery:
            return
        lag = await _lag_seconds(session)
        if lag is None:
            raise BackendUnfit(f"{where} cannot say how far it is behind its primary")
        if lag > self.lag_seconds_max:
            raise BackendUnfit(f"{where} is {lag:.1f} s behind its primary (max_replica_lag "
                               f"{self.lag_seconds_max:g} s)")


async def _lag_seconds(session: Dialled) -> float | None:
    row = await asked_row(session, _LAG)
    try:
        [milliseconds] = row
        return None if milliseconds is None else int(milliseconds) / 1000
    except ValueError:
        raise ProtocolViolation("server answered the question how far it is behind with no number") from None
