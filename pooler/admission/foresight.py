"""Whether a ticket that has to wait has the time for it. Pure: `now` is an argument.

What is compared is the least that it must wait: for the class, its session and its tenant's limit, each as
if nothing else were short, and by the shares of tenants: a flood of one says nothing of another's wait. So
who is refused would have been refused by its deadline.
"""

from __future__ import annotations

from pooler.admission.classes import Account
from pooler.admission.line import Line


def turns_ahead(line: Line, account: Account, sessions: int, in_use: int) -> float:
    """In how many executions' time the last of this account is served: its position, beyond what is free, by
    what is served at a time. `sessions`: those its pool may have."""
    klass, position = account.klass, line.position_of(account)
    pools = max(1, len(klass.starved))  # where the class is short its waiters in several pools take turns
    return max(
        _turns(position, sessions, in_use),
        _turns(min(klass.waiting, position * pools), klass.allotted, klass.in_use),
        _turns(line.count_of(account), account.inflight_max, account.executing))


def expected_seconds(
    line: Line, account: Account, sessions: int, in_use: int, now: float
) -> float | None:
    """Until the last of this account that waits is served. None: it cannot be told yet."""
    return account.klass.estimator.expected_seconds(turns_ahead(line, account, sessions, in_use), now)


def _turns(position: float, permits: int, in_use: int) -> float:
    if position <= permits - in_use:
        return 0.0  # it waits for no end of an execution
    return position / max(1, permits)
