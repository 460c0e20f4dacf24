"""Backend epochs: what the next one is, and the writes that move them. Every write compares what was read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.ledger.keys import DbKeys
from coordinator.ledger.record import COMMAND_INDEX, Backend, Epoch, EpochState, Worker
from coordinator.store.api import Compare, Entry, Put, Store, Txn, Won, absent, unchanged


@dataclass(frozen=True, slots=True)
class EpochEntry:
    """An epoch as it was read, with the revision that a write compares."""

    epoch: Epoch
    mod_revision: int


class NoEpoch(Exception):
    """The ledger has no backend epoch yet: it was never started."""


class MayBePromoted(Exception):
    """The target of a drain is a primary or may become one: the old epoch must not grant beside it."""


def draining(
    epoch: Epoch, *, timeout_seconds: float, now_us: int, reason: str, target: Backend | None = None
) -> Epoch:
    """The same epoch without new grants; its busy sessions are cancelled after `timeout_seconds`."""
    return replace(epoch, state=EpochState.DRAINING, since_us=now_us, reason=reason,
                   drain_timeout_seconds=timeout_seconds, target=target, promotes=False)


def active_again(epoch: Epoch, *, now_us: int, reason: str) -> Epoch:
    """A drain that was given up: the same epoch grants again."""
    return replace(epoch, state=EpochState.ACTIVE, since_us=now_us, reason=reason, drain_timeout_seconds=0.0,
                   target=None, promotes=False)


def advanced(
    epoch: Epoch, backend: Backend, *, now_us: int, reason: str, drain_timeout_seconds: float = 0.0
) -> Epoch:
    """The next epoch, granting at `backend`; what is left of older ones ends within the drain timeout."""
    return replace(epoch, number=epoch.number + 1, state=EpochState.ACTIVE, backend=backend, since_us=now_us,
                   reason=reason, drain_timeout_seconds=drain_timeout_seconds, target=None, promotes=False)


def ordering(epoch: Epoch) -> Epoch:
    """The same drain with its promotion about to be ordered: what outlives the command that orders it."""
    return replace(epoch, promotes=True)


def is_promoted(epoch: Epoch, seen: Backend) -> bool:
    """Whether the server that a drain was to promote has been: the old one must not serve again then."""
    target = epoch.target
    return (target is not None and seen.address == target.address and not seen.in_recovery
            and target.in_recovery and seen.system_identifier == epoch.backend.system_identifier)


def is_in_recovery_still(epoch: Epoch, seen: Backend) -> bool:
    """Whether it is the target of the drain, seen not to have been promoted: then the old one may serve."""
    target = epoch.target
    return (target is not None and seen.address == target.address and seen.in_recovery
            and seen.system_identifier == epoch.backend.system_identifier)


def after_abandoned(epoch: Epoch, seen: Backend | None, *, now_us: int) -> Epoch | None:
    """What becomes of a drain whose command is gone; None: it stays as it is, until that can be told.

    `seen`: its target as it was looked at since; None: that failed. Where the promotion was ordered, the old
    epoch grants again only by a look that shows the target in recovery: who cannot be seen may be a primary.
    """
    why = "the draining command is gone"
    if seen is not None and is_promoted(epoch, seen):
        return advanced(epoch, seen, now_us=now_us, reason=f"{why}, and its target was promoted",
                        drain_timeout_seconds=epoch.drain_timeout_seconds)
    if epoch.promotes and (seen is None or not is_in_recovery_still(epoch, seen)):
        return None
    return active_again(epoch, now_us=now_us, reason=why)


def not_acknowledged(epoch: int, db: str, workers: dict[str, Worker]) -> list[str]:
    """Boot ids of live workers that may still grant a session of an older epoch."""
    return sorted(boot_id for boot_id, worker in workers.items()
                  if worker.index != COMMAND_INDEX and worker.epochs.get(db, 0) < epoch)


def acknowledged_by_registering(current: int, *, serves: int, before: int) -> int:
    """What the key of a worker says that it acknowledged, as it registers while epoch `current` stands.

    Not more than it has heard of: until its pools know of a later epoch they grant sessions of the one that
    they serve (`serves`; 0: it never heard of any, and so has no session). `before`: what it acknowledged.
    """
    return max(before, min(serves, current)) if serves else current


async def read_epoch(store: Store, keys: DbKeys) -> EpochEntry:
    """Raises NoEpoch, StoreUnavailable."""
    snapshot = await store.read(keys.epoch())
    if not snapshot.entries:
        raise NoEpoch(f"{keys.database}: no backend epoch; start the fleet once")
    return _entry(snapshot.entries[0])


async def swap_epoch(
    store: Store, keys: DbKeys, before: EpochEntry, after: Epoch, *compares: Compare,
    puts: tuple[Put, ...] = (), deletes: tuple[str, ...] = (),
) -> EpochEntry | None:
    """Writes `after` if the epoch still stands as it was read and `compares` hold; None: it does not.

    Raises StoreUnavailable; StoreUnknown, after which the epoch must be read again.
    """
    outcome = await store.txn(Txn(
        (unchanged(keys.epoch(), before.mod_revision), *compares),
        (Put(keys.epoch(), after.encode()), *puts), deletes))
    return EpochEntry(after, outcome.revision) if isinstance(outcome, Won) else None


async def read_drain(store: Store, keys: DbKeys) -> tuple[EpochEntry, int]:
    """The epoch, and the lease of the command that drains it (0: none does), at one revision.

    Raises NoEpoch, StoreUnavailable.
    """
    found, drain = await read_command(store, keys)
    return found, drain.lease if drain is not None else 0


async def read_command(store: Store, keys: DbKeys) -> tuple[EpochEntry, Entry | None]:
    """The epoch, and the key of the command that drains it, at one revision.

    Raises NoEpoch, StoreUnavailable.
    """
    snapshot = await store.read(keys.epoch(), keys.drain())
    found = {entry.key: entry for entry in snapshot.entries}
    if keys.epoch() not in found:
        raise NoEpoch(f"{keys.database}: no backend epoch; start the fleet once")
    return _entry(found[keys.epoch()]), found.get(keys.drain())


async def note_promotion(
    store: Store, keys: DbKeys, stopped: EpochEntry, lease: int
) -> EpochEntry | None:
    """Notes in the epoch that the promotion is about to be ordered; the epoch with that, once it stands.

    None: the epoch is not as this command left it, or its key (on `lease`) is gone: nothing may be promoted.
    From then on nobody reopens the old epoch without a word of the target. Raises NoEpoch, StoreUnavailable;
    StoreUnknown: ask again.
    """
    found, command = await read_command(store, keys)
    if command is None or command.lease != lease:
        return None
    if found.epoch == ordering(stopped.epoch):
        return found
    if found.mod_revision != stopped.mod_revision:
        return None
    return await swap_epoch(store, keys, stopped, ordering(stopped.epoch),
                            unchanged(command.key, command.mod_revision))


def allow_abort(epoch: Epoch, command: Entry | None, *, attested: bool = False) -> None:
    """Whether an operator may give the drain of `epoch` up. The write of that compares the epoch.

    `attested`: somebody vouches that the target is no primary and will not become one. Raises MayBePromoted
    where the promotion was ordered, and the command is still at it, or nobody vouches; and where the command
    is gone and nobody has looked at the target since.
    """
    is_gone = command is None
    may_be = epoch.promotes or (is_gone and epoch.target is not None and epoch.target.in_recovery)
    if not may_be or (attested and is_gone):
        return
    who = ("the command that drains is gone: the leader ends the drain as soon as it sees that server; "
           "where you know that it is no primary and will be none, say how: --evidence '…'"
           if is_gone else
           "the command that drains ends by itself; interrupt it if it should not wait any longer")
    address = epoch.target.address if epoch.target is not None else "the target"
    raise MayBePromoted(f"{address} may be promoted already: {who}")


async def abandoned_drain(store: Store, keys: DbKeys) -> EpochEntry | None:
    """A DRAINING epoch whose command is gone."""
    try:
        before, command = await read_drain(store, keys)
    except NoEpoch:
        return None
    return before if before.epoch.state is EpochState.DRAINING and not command else None


async def end_abandoned(
    store: Store, keys: DbKeys, before: EpochEntry, seen: Backend | None, now_us: int, *, fence: Compare
) -> Epoch | None:
    """Ends an abandoned drain as `after_abandoned` says; None: it stays, or somebody was faster."""
    after = after_abandoned(before.epoch, seen, now_us=now_us)
    if after is None:
        return None
    won = await swap_epoch(store, keys, before, after, absent(keys.drain()), fence)
    return None if won is None else after


def _entry(entry: Entry) -> EpochEntry:
    return EpochEntry(Epoch.decode(entry.value), entry.mod_revision)
