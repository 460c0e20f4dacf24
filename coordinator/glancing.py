"""What a server is, asked in one small statement: who it is, whether it takes writes, how far it is behind.

The looks that prove a session gone are looks.py's; this asks for nothing that grows with the sessions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import Any, Protocol

import trio

from coordinator.ledger.record import Backend
from coordinator.looks import LookFailed
from coordinator.topology import Glance, NoAnswer, Seen

ANSWER_SECONDS_MAX = 3.0
LAGS_KEPT = 3  # a standby is as late as it was at its best in so many glances: one late commit is no lag
_BEYOND = 1 << 63

# A standby that is connected and has replayed all that came is not behind, however long ago that was; one
# that is not connected cannot know. Only a setting of the server's own makes it read-only, none of our role.
_SQL = """
SELECT (SELECT system_identifier::text FROM pg_control_system()),
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END,
       round(extract(epoch FROM pg_postmaster_start_time())::numeric * 1000000)::bigint,
       pg_is_in_recovery(),
       EXISTS (SELECT FROM pg_settings WHERE name = 'default_transaction_read_only' AND setting = 'on'
                  AND source IN ('configuration file', 'command line', 'environment variable', 'global')),
       CASE WHEN NOT pg_is_in_recovery() THEN 0::float8
            WHEN NOT EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming') THEN NULL
            WHEN pg_last_wal_receive_lsn() <= pg_last_wal_replay_lsn() THEN 0::float8
            ELSE extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float8 END
"""
_TYPES: tuple[type | tuple[type, ...], ...] = (str, int, int, bool, bool, (float, type(None)))


class Asks(Protocol):
    """What is needed of coordinator.looks.Looker."""

    async def ask(self, address: str, sql: str) -> tuple[Any, ...] | None: ...

    async def close(self, *addresses: str) -> None: ...


class Glances:
    """Glances at servers; remembers how often in a row one did not answer, and the last lags of each."""

    def __init__(self, asks: Asks, clock: Callable[[], float] = time.monotonic) -> None:
        self._asks = asks
        self._clock = clock
        self._failed: dict[str, int] = {}
        self._lags: dict[str, deque[float | None]] = {}

    async def at(self, address: str) -> Seen:
        """The server at `address` (host:port) as it is now, within ANSWER_SECONDS_MAX."""
        sent, why = self._clock(), f"no answer within {ANSWER_SECONDS_MAX:g} s"
        with trio.move_on_after(ANSWER_SECONDS_MAX):
            try:
                glance = read_glance(address, await self._asks.ask(address, _SQL), sent)
            except LookFailed as failed:
                why = str(failed)
            else:
                self._failed.pop(address, None)
                return replace(glance, lag_seconds=self._steady(glance))
        self._failed[address] = self._failed.get(address, 0) + 1
        self._lags.pop(address, None)
        return NoAnswer(why, sent, self._failed[address])

    async def close(self, *addresses: str) -> None:
        """Gives the sessions at these nodes back, and forgets what was seen there."""
        for address in addresses:
            self._failed.pop(address, None)
            self._lags.pop(address, None)
        if addresses:
            await self._asks.close(*addresses)

    def _steady(self, glance: Glance) -> float | None:
        lags = self._lags.setdefault(glance.backend.address, deque(maxlen=LAGS_KEPT))
        lags.append(glance.lag_seconds)
        return min((lag for lag in lags if lag is not None), default=None)


def read_glance(address: str, row: tuple[Any, ...] | None, at: float) -> Glance:
    """The answer to the statement, if it is one. Raises LookFailed."""
    if row is None or len(row) != len(_TYPES) or not all(map(isinstance, row, _TYPES)):
        raise LookFailed(f"{address}: what it answered is not what was asked for")
    system, timeline, start_us, in_recovery, read_only, lag = row
    if not 0 <= timeline < _BEYOND or not 0 <= start_us < _BEYOND:
        raise LookFailed(f"{address}: it answered with a number that no server has")
    lag = None if lag is None or isnan(lag) else max(0.0, lag)
    return Glance(Backend(address, system, timeline, start_us, in_recovery), at, read_only, lag)
