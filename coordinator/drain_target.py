"""Where a drain may go: found and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Backend, Epoch, EpochState
from coordinator.looks import Eyes, LookFailed


class Code(IntEnum):
    """Exit codes of the command. Only DRAINED may gate a promotion."""

    DRAINED = 0
    UNFIT = 1
    UNKNOWN_LEFT = 3
    TIMED_OUT = 4


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done.

    `target`: host:port to go to; None: whichever of `hosts` is primary now. `promote`: runs the promotion and
    returns its exit code; None: somebody else promotes when told to.
    """

    db: str
    role: str  # write or read
    hosts: Sequence[str]
    target: str | None = None
    promote: Callable[[], Awaitable[int]] | None = None
    switch_first: bool = False
    timeout_seconds: float = 30.0
    drain_timeout_seconds: float = 30.0
    lease_ttl_seconds: float = 5.0  # of workers' leases


class Ended(Exception):
    """The drain cannot go on: with which code, and why."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


async def fit_target(epoch: Epoch, eyes: Eyes, order: Order) -> Look:
    """The target as it is. Raises Ended (UNFIT) if it is not fit; nothing has been changed then."""
    if epoch.state is EpochState.DRAINING:
        raise Ended(Code.UNFIT, f"epoch {epoch.number} is being drained already (--abort gives it up)")
    look = await _look_at_target(eyes, order, epoch)
    seen = look.backend
    known = epoch.backend.system_identifier or await _identifier_of(eyes, epoch.backend.address)
    if seen.system_identifier != known:
        raise Ended(Code.UNFIT, f"{seen.address} is another cluster: its system identifier is "
                                f"{seen.system_identifier}, the epoch's is {known}")
    at_once = order.switch_first or seen.address == epoch.backend.address
    if order.role == "write" and at_once and seen.in_recovery:
        raise Ended(Code.UNFIT, f"{seen.address} is in recovery: it cannot take writes")
    if order.role == "write" and is_stale(epoch, seen):
        raise Ended(Code.UNFIT, _stale(epoch, seen))
    return look


def is_stale(epoch: Epoch, seen: Backend) -> bool:
    """Whether it is a primary of before: another was promoted since, and what it took after that is lost."""
    return not seen.in_recovery and seen.timeline < epoch.backend.timeline


def _stale(epoch: Epoch, seen: Backend) -> str:
    return (f"{seen.address} is a primary of before: it is on timeline {seen.timeline}, the epoch's backend "
            f"on {epoch.backend.timeline}")


async def _look_at_target(eyes: Eyes, order: Order, epoch: Epoch) -> Look:
    if order.target is not None:
        try:
            return await eyes.look(order.target)
        except LookFailed as failed:
            raise Ended(Code.UNFIT, f"the target cannot be reached: {failed}") from None
    faults = []
    for host in order.hosts:
        try:
            look = await eyes.look(host)
        except LookFailed as failed:
            faults.append(str(failed))
            continue
        if order.role == "read" or not (look.backend.in_recovery or is_stale(epoch, look.backend)):
            return look
        faults.append(f"{host}: is in recovery" if look.backend.in_recovery else _stale(epoch, look.backend))
    raise Ended(Code.UNFIT, f"no primary among the hosts: {'; '.join(faults)}")


async def _identifier_of(eyes: Eyes, address: str) -> str:
    try:
        return (await eyes.look(address)).backend.system_identifier
    except LookFailed as failed:
        raise Ended(Code.UNFIT, f"the current backend's identity is not known: {failed}") from None
