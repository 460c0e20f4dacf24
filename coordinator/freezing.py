"""`pooler fleet freeze` and `thaw`: no growth of a ledger until an operator says so.

It stands in the `ledger/` key, which every reservation compares: one that was on its way when it was written
loses. Sessions that are there serve on, and none is closed by choice meanwhile. Commands may look all the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from coordinator.ledger.attestation import Attestation
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.record import LedgerHead
from coordinator.store.api import Put, Store, StoreUnavailable, Txn, Won, absent, unchanged

ROUNDS_MAX = 8


class NoLedger(Exception):
    """There is no such ledger."""


async def set_frozen(
    store: Store, keys: FleetKeys, db: str, frozen: bool, *, who: str, evidence: str,
    now_us: Callable[[], int],
) -> bool:
    """Freezes the ledger, or thaws it; False if it was so already.

    Raises NoLedger, StoreUnavailable, StoreUnknown (then it may have been done: ask again).
    """
    key = keys.db(db).ledger()
    for _ in range(ROUNDS_MAX):
        standing = await store.read(key)
        if not standing.entries:
            raise NoLedger(f"there is no ledger {db}")
        entry = standing.entries[0]
        head = LedgerHead.decode(entry.value)
        if bool(head.frozen) == frozen:
            return False
        what = f"{'freeze' if frozen else 'thaw'} {db}"
        noted = Attestation(who, what, evidence, now_us(), db).put(keys)
        put = Put(key, replace(head, frozen=who if frozen else "").encode())
        txn = Txn((unchanged(key, entry.mod_revision), absent(noted.key)), (put, noted))
        if isinstance(await store.txn(txn), Won):
            return True
    raise StoreUnavailable("others were faster")
