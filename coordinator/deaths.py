"""Owners that died with their machine: known from the permits themselves, where nothing else is left to tell.

A run directory on a tmpfs goes with a reboot, and with it what a supervisor noted of its children. A permit
says on which machine and under which boot of its kernel its owner ran; a coordinator on the same machine
under a later boot knows that every process of the earlier one is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import trio

from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Session, UnknownSchema
from coordinator.registry import Registry
from coordinator.store.api import StoreUnavailable, StoreUnknown

AGAIN_SECONDS = 2.0
HOW = "its machine was started anew"


def of_earlier_boots(
    sessions: Iterable[Session], *, host: str, machine_id: str, kernel_boot_id: str
) -> set[str]:
    """Owners of these permits whose processes ended with an earlier boot of this machine.

    A machine-id alone may be an image's, shared by many machines: one that is not made of more (the product's
    or the instance's own, see settings_host) proves nothing, nor does one under another host name.
    """
    if ":" not in machine_id or not kernel_boot_id:
        return set()
    return {each.owner for each in sessions
            if each.owner and (each.machine, each.host) == (machine_id, host)
            and each.kernel_boot not in ("", kernel_boot_id)}


async def bury_earlier_boots(
    ledgers: Mapping[str, Ledger], registry: Registry, *, host: str, machine_id: str, kernel_boot_id: str,
    now_us: Callable[[], int], on_buried: Callable[[], None],
) -> None:
    """Once at the start, which is where a new boot is met: puts every such death on record."""
    left = set(ledgers)
    while left:
        for db in tuple(left):
            try:
                snapshot = await ledgers[db].snapshot()
            except (StoreUnavailable, StoreUnknown, UnknownSchema, ValueError):
                continue
            dead = of_earlier_boots((held.session for held in snapshot.sessions), host=host,
                                    machine_id=machine_id, kernel_boot_id=kernel_boot_id)
            for boot_id in sorted(dead - snapshot.exits.keys()):
                await registry.bury(boot_id, HOW, now_us())
                on_buried()
            left.discard(db)
        if left:
            await trio.sleep(AGAIN_SECONDS)  # noqa: TID251 - back-off towards the store
