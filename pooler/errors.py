"""One family of outcomes. Each class knows its SQLSTATE, whether a client may retry, and the exit code of a
command that ends with it. The text says what, where and what to do; a traceback never reaches a user.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import ClassVar

AFTER_SECONDS_MAX = 24 * 3600.0  # nobody is told to wait longer


class Retry(StrEnum):
    """What a refused client may do."""

    NOW = "now"
    AFTER = "after"
    NEVER = "never"
    APPLICATION = "application"
    LOOK_UP = "unknown"


class PoolerError(Exception):
    """Base. `sqlstate` is what a client sees, `exit_code` what a command ends with."""

    sqlstate: ClassVar[str] = "58000"
    retry: ClassVar[Retry] = Retry.NEVER
    exit_code: ClassVar[int] = 1
    situation: str = ""  # its row in admission.refusals, which has the HINT; none: it has no such HINT


class UsageFault(PoolerError):
    """Wrong usage or configuration."""

    exit_code = 2


class ProtocolViolation(PoolerError):
    """The peer broke the protocol: it is told and disconnected."""

    sqlstate = "08P01"


class MessageTooLong(PoolerError):
    """A message that has to be taken whole is longer than the pooler keeps."""

    sqlstate = "54000"


class LoginRefused(PoolerError):
    """A client may not log in. `sqlstate` is an instance's own here."""

    def __init__(self, message: str, sqlstate: str = "28000", detail: str = "") -> None:
        super().__init__(message)
        self.code = sqlstate
        self.detail = detail


class WaitEnded(PoolerError):
    """A wait for a session ended by its deadline."""

    sqlstate = "57014"
    retry = Retry.AFTER
    situation = "wait_ended"


class WaitCancelled(WaitEnded):
    """A wait for a session ended by its client's own wish."""

    situation = ""


class TicketMoved(WaitEnded):
    """The client's ticket was taken over by a later registration of its name: nothing was sent."""

    situation = "ticket_moved"


class TicketExecuting(PoolerError):
    """What this client's ticket names runs, or it is not known that it does not."""

    sqlstate = "53300"
    retry = Retry.AFTER
    situation = "ticket_executing"


class TicketFinished(PoolerError):
    """What this client's ticket names has run: never again."""

    sqlstate = "25000"
    situation = "ticket_finished"


class TicketLedgerAway(PoolerError):
    """A named ticket could not be recorded: nothing was sent."""

    sqlstate = "53300"
    retry = Retry.AFTER
    situation = "ticket_ledger"


class NoPermit(PoolerError):
    """No session permit and none to be had in time. `reason`: a code of docs/link.md, or `unreachable`."""

    sqlstate = "53300"
    retry = Retry.AFTER
    situation = "no_permit"

    def __init__(self, message: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class QueueFull(PoolerError):
    """As many wait for a session as the policy lets."""

    sqlstate = "53300"
    retry = Retry.AFTER
    situation = "queue_full"


class TooLate(PoolerError):
    """A request whose time is less than what it has to expect of its wait."""

    sqlstate = "53300"
    retry = Retry.AFTER
    situation = "too_late"


class RateLimited(PoolerError):
    """The tokens of a tenant or a class are not there. `after_ms`: in how long they will be."""

    sqlstate = "53400"
    retry = Retry.AFTER
    situation = "rate"

    def __init__(self, message: str, after_seconds: float) -> None:
        super().__init__(message)
        self.after_ms = max(1, math.ceil(min(after_seconds, AFTER_SECONDS_MAX) * 1000))


class CostAboveBucket(PoolerError):
    """It costs more than the bucket of its tenant or class can hold."""

    sqlstate = "54000"
    situation = "cost"


class TooManyClients(PoolerError):
    """A client limit is reached."""

    sqlstate = "53300"
    retry = Retry.AFTER


class NotServing(PoolerError):
    """Draining, paused without a wait, or no backend yet."""

    sqlstate = "57P03"
    retry = Retry.AFTER
    situation = "draining"


class BackendLost(PoolerError):
    """The server went away before anything was sent, or in a transaction that was not being committed
    (`in_transaction`)."""

    sqlstate = "08006"
    retry = Retry.NOW
    situation = "lost_unsent"

    def __init__(self, message: str = "", *, in_transaction: bool = False) -> None:
        super().__init__(message)
        if in_transaction:
            self.situation = "lost_in_transaction"


class OutcomeUnknown(PoolerError):
    """The server went away while a COMMIT was unanswered."""

    sqlstate = "08007"
    retry = Retry.LOOK_UP
    situation = "lost_in_commit"


class PermitLost(PoolerError):
    """The ledger no longer has the permit of a session that this worker holds."""


class LedgerLost(PoolerError):
    """The ledger in etcd is not the one that this host knows, or is not whole again yet."""


class FleetUnreachable(PoolerError):
    """A command could not reach the fleet or its ledger."""
