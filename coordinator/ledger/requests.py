"""Requests for session permits: each is granted once, or voided, whatever the store's answers were.

Part of the Ledger. A request whose write had an unknown outcome stays *unsettled* until its receipt was won
or seen: a refusal of a later attempt does not settle it, since the earlier one may still land.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from coordinator.ledger.access import Access
from coordinator.ledger.answers import Applied, Granted, Voided
from coordinator.ledger.gathering import Gathering
from coordinator.ledger.keys import DbKeys, only
from coordinator.ledger.record import Kind, Permit, Receipt, Worker
from coordinator.ledger.reservation import Reserve, plan_void
from coordinator.ledger.reserving import Pending, Reserving
from coordinator.ledger.rules import Code, Command, Refused, Release
from coordinator.ledger.states import Actor, Proof
from coordinator.store.api import Entry, Put, StoreUnavailable, StoreUnknown, Txn, Won, unchanged

ROUNDS_MAX = 12  # of read, plan, lose


class Requests:
    """Reserves and voids; those that reserve at once share transactions while `gathering` runs. `apply`
    carries out a release."""

    def __init__(
        self, access: Access, keys: DbKeys, reserving: Reserving,
        apply: Callable[[Command], Awaitable[Applied | Refused]],
    ) -> None:
        self.gathering = Gathering(reserving.round)
        self._reserving = reserving
        self._access = access
        self._keys = keys
        self._apply = apply
        self._unsettled: dict[str, str] = {}  # request → owner

    async def reserve(self, ask: Reserve) -> Granted | Refused:
        """One attempt to take a slot, a seat and write the receipt; the caller waits and repeats.

        Codes: full, seats_full, draining, ledger_unavailable, ledger_lost, voided. A repeated request id
        gets the stored answer. With `settled=False` an attempt of this request may still take a slot: repeat
        the same request until it is granted, or `void` it until that answers.
        """
        pending = Pending(ask)
        if self.gathering.runs:
            await self.gathering.answer(pending)
        else:
            while pending.answer is None:
                await self._reserving.round([pending])
        return self._settle(pending)

    def _settle(self, pending: Pending) -> Granted | Refused:
        """The answer of a request that has one, and whether it is settled. Raises what its reading did."""
        ask, answer = pending.ask, pending.answer
        if not pending.sure:
            self._unsettled[ask.request_id] = ask.owner
        if isinstance(answer, Exception):
            raise answer
        if answer is None:  # its transaction may be on its way
            return Refused(Code.LEDGER_UNAVAILABLE, "the coordinator ends", settled=False)
        if isinstance(answer, Granted) or answer.code is Code.VOIDED:
            self._unsettled.pop(ask.request_id, None)
        elif ask.request_id in self._unsettled:
            return replace(answer, settled=False)
        return answer

    async def void(self, request_id: str, owner: str, kind: Kind = Kind.MAIN) -> Voided | Refused:
        """Give a request up: after Voided it takes nothing, and what it had taken is given back as `unused`.

        Only for a request whose permit was never connected. Refused(ledger_unavailable): repeat.
        """
        answer = await self._void(request_id, owner, kind)
        if isinstance(answer, Voided):
            self._unsettled.pop(request_id, None)
        return answer

    async def _void(self, request_id: str, owner: str, kind: Kind) -> Voided | Refused:
        receipt_key, worker_key = self._keys.receipt(request_id), self._keys.worker(owner)
        try:
            for _ in range(ROUNDS_MAX):
                if self._access.lost and not await self._access.check():
                    return Refused(Code.LEDGER_LOST, settled=False)
                receipt, worker = await self._access.read(only(receipt_key), only(worker_key))
                if self._access.lost:
                    continue
                if receipt is None and worker is None:
                    return Voided(None)  # what compares the registration can only lose now
                if receipt is None and worker is not None:
                    outcome, _ = await self._access.carry_out(plan_void(request_id, kind, worker, self._keys))
                    if isinstance(outcome, Won):
                        return Voided(None)
                    if outcome is None:
                        break
                if receipt is not None:
                    return await self._give_back(receipt)
        except (StoreUnavailable, StoreUnknown) as why:
            return Refused(Code.LEDGER_UNAVAILABLE, str(why), settled=False)
        return Refused(Code.LEDGER_UNAVAILABLE, "the void did not settle", settled=False)

    async def forget(self, owner: str, answered: Collection[str]) -> bool:
        """Delete answered receipts of a worker that has no request outstanding; False: not now.

        Its worker key is put again first, which makes every older reservation still on its way lose.
        """
        worker_key = self._keys.worker(owner)
        try:
            worker, _ = await self._access.read(only(worker_key), only(self._keys.ledger()))
            if worker is None:
                return False
            record = Worker.decode(worker.value)
            again = replace(record, registered=record.registered + 1)
            put = Put(worker_key, again.encode(), worker.lease)
            outcome, _ = await self._access.carry_out(
                Txn((unchanged(worker_key, worker.mod_revision),), puts=(put,), reads=(only(worker_key),)))
            if not isinstance(outcome, Won):
                return False
            self._unsettled = {each: of for each, of in self._unsettled.items() if of != owner}
            keys = [self._keys.receipt(request_id) for request_id in answered]
            for i in range(0, len(keys), 100):
                await self._access.carry_out(Txn(deletes=tuple(keys[i : i + 100])))
        except (StoreUnavailable, StoreUnknown, ValueError):
            return False
        return True

    async def _give_back(self, receipt: Entry) -> Voided | Refused:
        given = Receipt.decode(receipt.value)
        if given.voided:
            return Voided(None)
        permit = Permit(given.kind, given.slot, receipt.create_revision + given.base)
        answer = await self._apply(Release(permit, Proof.UNUSED, Actor.OWNER))
        if isinstance(answer, Refused) and answer.code is not Code.GONE:
            return answer
        return Voided(permit if isinstance(answer, Applied) else None)
