"""Why a request is refused, with which SQLSTATE, and what its client may do then: one table.

The code, docs/refusals.md and the tests read it. The HINT of such an error has a line for programs
(`retry=… after_ms=… ticket=…`) and ends with the one command that shows more. Pure: chance is an argument.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pooler.errors import Retry

DELAY_MS_MIN: Final = 50
DELAY_MS_PER_WAITING: Final = 10
DELAY_MS_MAX: Final = 30_000
WAITERS: Final = "SHOW WAITERS"
TICKET: Final = "SHOW TICKET 'ID'"
UNKNOWN: Final = "pooler ledger show DB --state SESSION_UNKNOWN"


class Situation(NamedTuple):
    """One row: `more` is the command that shows more."""

    text: str
    sqlstate: str
    retry: Retry
    more: str


TABLE: Final[dict[str, Situation]] = {
    "queue_full": Situation("queue full", "53300", Retry.AFTER, WAITERS),
    "too_late": Situation("deadline too short for the expected wait", "53300", Retry.AFTER, WAITERS),
    "wait_ended": Situation("a wait ended by its deadline", "57014", Retry.AFTER, WAITERS),
    "rate": Situation("rate limit", "53400", Retry.AFTER, WAITERS),
    "cost": Situation("cost above the bucket's capacity", "54000", Retry.NEVER, WAITERS),
    "no_permit": Situation(
        "no session permit and none to be had in time", "53300", Retry.AFTER, UNKNOWN),
    "draining": Situation("draining, no backend yet", "57P03", Retry.AFTER, WAITERS),
    "lost_unsent": Situation("backend lost before anything was sent", "08006", Retry.NOW, UNKNOWN),
    "lost_in_transaction": Situation(
        "backend lost in a transaction, the server said nothing", "08006", Retry.APPLICATION, UNKNOWN),
    "lost_in_commit": Situation(
        "backend lost while COMMIT was unanswered", "08007", Retry.LOOK_UP, UNKNOWN),
    "ticket_moved": Situation("ticket id registered anew meanwhile", "57014", Retry.AFTER, TICKET),
    "ticket_executing": Situation("ticket id is executing", "53300", Retry.AFTER, TICKET),
    "ticket_finished": Situation("ticket id already finished", "25000", Retry.NEVER, TICKET),
    "ticket_ledger": Situation(
        "a ticket id cannot be recorded: the ledger does not answer", "53300", Retry.AFTER, TICKET),
}


def delay_ms(waiting: int, chance: float) -> int:
    """What a refused client is advised to wait: longer behind a longer queue, and spread by half around that,
    so that a refused crowd does not return as one. `chance`: from 0 to 1."""
    mean = min(DELAY_MS_MAX, DELAY_MS_MIN + DELAY_MS_PER_WAITING * waiting)
    return max(1, round(mean * (0.5 + chance)))


def hint(situation: str, after_ms: int = 0, ticket: str = "") -> str:
    """The HINT of an error of this situation. `after_ms` counts only where a retry is for later."""
    row = TABLE[situation]
    words = [f"retry={row.retry.value}"]
    if row.retry is Retry.AFTER:
        words.append(f"after_ms={after_ms}")
    if ticket:
        words.append(f"ticket={ticket}")
    return f"{' '.join(words)}\n{row.more}"


def table_rows() -> tuple[str, ...]:
    """The rows as docs/refusals.md has them."""
    return tuple(f"| {row.text} | {row.sqlstate} | {row.retry.value} | `{row.more}` |"
                 for row in TABLE.values())
