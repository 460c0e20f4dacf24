"""How what a client left on a session is undone: `session_state`, server_reset_query(_always). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pooler.pool.plan import PoolPlan
from pooler.wire.session_state import STATE_MASK, cleanup, forgets_statements

_DEFAULT = "DISCARD ALL"
_RESETS = re.compile(r"(DISCARD|RESET)\s+ALL", re.IGNORECASE)
_FORGETS = re.compile(r"(DISCARD|DEALLOCATE)\s+ALL", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reset:
    """`is_run`: anything at all. `query`: run instead of what is found necessary; empty: nothing is run.
    `restores_parameters`: afterwards they are as at the session's start."""

    is_run: bool
    query: str | None
    restores_parameters: bool
    then: bytes = b""  # run after what takes the session's own settings away

    @classmethod
    def of(cls, plan: PoolPlan) -> Reset:
        """As PgBouncer: the query is for session pooling, and for all pooling if it is to run always."""
        settings = plan.settings
        resets = plan.mode == "session" or settings.server_reset_query_always
        query = settings.server_reset_query if resets and settings.server_reset_query != _DEFAULT else None
        return cls(resets or settings.session_state not in ("allow", "warn"), query,
                   query is None or _RESETS.search(query) is not None, plan.connect_query.encode())

    def sql(self, residue: int) -> tuple[tuple[bytes, ...], bool]:
        """What undoes this residue on a session, and whether that forgets its prepared statements."""
        residue &= STATE_MASK
        if not self.is_run or not residue or self.query == "":
            return (), False
        if self.query is not None:
            return self._with_then((self.query.encode(),)), _FORGETS.search(self.query) is not None
        return self._with_then(cleanup(residue)), forgets_statements(residue)

    def _with_then(self, queries: tuple[bytes, ...]) -> tuple[bytes, ...]:
        resets = self.then and any(_RESETS.search(query.decode(errors="replace")) for query in queries)
        return (*queries, self.then) if resets else queries
