"""What the workers of this host may ask, over the unix socket: the operations of the link, one method each.

Every answer rests on etcd; a worker is told plainly when etcd does not answer. A link that ends says nothing
about the worker behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import structlog
import trio

from coordinator.creating import Creating, WorkerCreates
from coordinator.events import Event
from coordinator.granting import Granting
from coordinator.greeting import Greeter
from coordinator.host_shares import HostShares
from coordinator.ledger.ledger import Granted, Ledger
from coordinator.ledger.record import Permit, Session
from coordinator.ledger.reservation import Reserve
from coordinator.ledger.rules import Code, Refused
from coordinator.link import Args, Handler, Link, LinkLost, LinkRefused
from coordinator.link_guard import guarded, name_of
from coordinator.link_values import permit_list
from coordinator.ordinals import Ordinals
from coordinator.registry import Introduction, Local, Registry
from coordinator.store.api import Store, StoreUnavailable, StoreUnknown
from coordinator.tickets import Tickets
from coordinator.view import View, Views
from coordinator.worker_permits import WorkerPermits
from coordinator.worker_shares import WorkerShares
from coordinator.worker_tickets import WorkerTickets

ASK_WORKER_TIMEOUT_SECONDS = 5.0
FORGET_AT_RECEIPTS = 32
SHARES_TIMEOUT_SECONDS = 3.0
REPEAT_SECONDS = 0.1

_log = structlog.get_logger("coordinator.workers")


class RowsOf(Protocol):
    """What SHOW LEDGER prints."""

    async def __call__(self) -> list[dict[str, Any]]: ...


class WorkerServer:
    """Serves the links of this host's workers."""

    def __init__(
        self, store: Store, views: Views, ledgers: dict[str, Ledger], registry: Registry, granting: Granting,
        *, host: str, ttl_seconds: float, rows: RowsOf,
    ) -> None:
        self.store = store
        self.views = views
        self.ledgers = ledgers
        self.registry = registry
        self.granting = granting
        self.tickets = Tickets(store, registry.keys, registry.now_us)
        self.greeter = Greeter(store, views, ledgers, registry, granting)
        self.shares = HostShares(store, ledgers, registry, host=host)
        self.ordinals = Ordinals(store, registry.keys)
        self.creating = Creating(lambda: views.views)
        self.host = host
        self.ttl_seconds = ttl_seconds
        self.rows = rows
        self.on_hello: list[Callable[[], None]] = []
        self.on_decided: list[Callable[[str, Reserve, Granted | Refused], None]] = []
        self.on_backend_hint: list[Callable[[str], None]] = []
        self.on_report: list[Callable[[Local, Args], None]] = []
        views.on_change.append(self._tell)

    async def serve(self, stream: trio.abc.Stream) -> None:
        """One worker's link, until it ends."""
        await _Peer(self, stream).run()

    def _tell(self, view: View) -> None:
        """Every worker hears of every change; whoever waits for it may try."""
        ledger = view.for_workers()
        for local in self.registry.workers.values():
            if local.link is not None:
                _notify(local.link, "ledger", db=view.db, ledger=ledger)
        self.granting.stir(view.db)

    def became_unknown(self, db: str, session: Session) -> None:
        """A reaper marked it: its owner, if it is linked here, reasserts what it still holds."""
        local = self.registry.workers.get(session.owner)
        if local is not None and local.link is not None:
            _notify(local.link, "permit_unknown", db=db, permit=permit_list(local.name_of(db, session)))

    def was_released(self, db: str, session: Session) -> None:
        """A reaper freed it: an owner that had given it up need not follow it any more."""
        local = self.registry.workers.get(session.owner)
        if local is None:
            self.granting.stir(db)
            return
        permit = local.name_of(db, session)
        self.drop(local, db, permit)
        if local.link is not None:
            _notify(local.link, "permit_gone", db=db, permit=permit_list(permit))

    def drop(self, local: Local, db: str, permit: Permit) -> None:
        """The worker does not hold it any more: whoever waits may try."""
        pool = local.permits.pop((db, permit), None)
        if pool is not None:
            self.granting.freed(local, db, pool)
        else:
            self.granting.stir(db)


class _Peer:
    """One link and the worker that said hello on it."""

    def __init__(self, server: WorkerServer, stream: trio.abc.Stream) -> None:
        self._server = server
        self._local: Local | None = None
        self._greeted = trio.Event()
        operations: tuple[Handler, ...] = (
            self.hello, self.heartbeat, self.epoch_ack, self.backend_hint, self.cancel, self.cancel_any,
            self.fleet, self.ledger_rows, *WorkerPermits(server, self._worker).operations(),
            *WorkerCreates(server.creating, self._worker).operations(),
            *WorkerShares(server.shares, server.ledgers, self._worker).operations(),
            *WorkerTickets(server.tickets, server.registry, server.ledgers, server.host,
                           self._worker).operations(),
        )
        self._link = Link(stream, {name_of(each): guarded(each) for each in operations})

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat_ledgers)
            await self._link.run()
            nursery.cancel_scope.cancel()
        local = self._local
        if local is not None and local.link is self._link:
            local.link = None
            _log.warning(Event.WORKER_LINK_LOST, worker=local.boot_id)

    async def _repeat_ledgers(self) -> None:
        """A change that was told while hello was being answered may have been overtaken by the answer."""
        while True:
            await self._greeted.wait()
            self._greeted = trio.Event()
            await trio.sleep(REPEAT_SECONDS)  # noqa: TID251 - until the answer has surely been taken in
            for db, view in self._server.views.views.items():
                _notify(self._link, "ledger", db=db, ledger=view.for_workers())
            if self._local is not None:
                self._server.shares.repeat(self._local)

    # ---- being there

    async def hello(self, args: Args) -> Args:
        """Registers the worker and settles what it and the ledger believe of its permits."""
        server = self._server
        who = Introduction(
            boot_id=args["boot_id"], index=args["index"], pid=args["pid"], pid_start=args["pid_start"],
            cancel_address=args.get("cancel_address") or "", schemas=tuple(args.get("schemas") or (1,)))
        local = server.registry.workers.get(who.boot_id) or Local(who)
        local.who, local.serves = who, dict(args.get("epochs") or {})
        local.shares = args.get("shares") is not None
        heard = await server.greeter.greet(local, self._link, args)
        shares = await self._shares_of(local, args) if local.shares and local.settled else None
        server.registry.workers[who.boot_id] = local
        local.link, self._local = self._link, local
        self._greeted.set()
        for listener in server.on_hello:
            listener()
        _log.info(Event.WORKER_REGISTERED, worker=who.boot_id, index=who.index, ordinal=local.ordinal,
                  permits=len(local.permits), settled=local.settled)
        return {
            "ordinal": local.ordinal,
            "lease_ttl_seconds": server.ttl_seconds,
            "registered": local.settled,
            "ledgers": {db: view.for_workers() for db, view in server.views.views.items()},
            "unknown": heard.unknown,
            "gone": heard.gone,
            "moved": heard.moved,
            **({} if shares is None else {"shares": shares}),
        }

    async def _shares_of(self, local: Local, args: Args) -> Args | None:
        """Its shares of execution permits; None where they cannot be said: it keeps what it has, and says
        hello again."""
        try:
            with trio.fail_after(SHARES_TIMEOUT_SECONDS):
                return await self._server.shares.greet(local, args["shares"])
        except (StoreUnavailable, StoreUnknown, trio.TooSlowError):
            local.settled = False
            return None

    async def heartbeat(self, args: Args) -> Args:
        """Renews the lease. False: hello is to be said again, which settles everything once etcd answers.
        Once a lease cycle it tells what its pools hold."""
        local, server = self._worker(), self._server
        for listener in server.on_report if "late" in args else ():
            listener(local, args)
        if local.exited or not server.views.reachable or not local.settled:
            return {"alive": False}
        try:
            if await server.registry.keep_alive(local):
                with trio.move_on_after(server.ttl_seconds / 3):
                    await self._forget_answered(local)
                return {"alive": True}
        except (StoreUnavailable, StoreUnknown):
            return {"alive": False}
        _log.warning(Event.WORKER_LEASE_LOST, worker=local.boot_id)
        local.settled = False
        return {"alive": False}

    async def _forget_answered(self, local: Local) -> None:
        """Receipts of requests whose answers it has used go, while it has none outstanding."""
        for db, answered in local.answered.items():
            if len(answered) >= FORGET_AT_RECEIPTS and not local.attempts:
                going = frozenset(answered)
                if await self._server.ledgers[db].forget(local.boot_id, going):
                    answered.difference_update(going)

    async def backend_hint(self, args: Args) -> Args:
        """The worker met a server that its epoch's backend should not be: the leader looks sooner."""
        self._worker()
        for listener in self._server.on_backend_hint:
            listener(args["db"])
        return {}

    async def epoch_ack(self, args: Args) -> Args:
        await self._server.registry.acknowledge(self._worker(), args["db"], args["epoch"])
        return {}

    # ---- for the whole fleet

    async def cancel(self, args: Args) -> Args:
        """A cancel key of another worker: handed on to it, or where its host takes it."""
        ordinal, server = args["ordinal"], self._server
        target = server.registry.by_ordinal(ordinal)
        if target is not None and target.link is not None:
            with trio.move_on_after(ASK_WORKER_TIMEOUT_SECONDS):
                await target.link.call("cancel", key=args["key"])
            return {"address": ""}
        try:
            with trio.fail_after(ASK_WORKER_TIMEOUT_SECONDS):
                address = await server.ordinals.address_of(ordinal)
        except (StoreUnavailable, StoreUnknown, trio.TooSlowError):
            raise LinkRefused(Code.LEDGER_UNAVAILABLE, "etcd does not answer") from None
        if target is not None or not address:
            raise LinkRefused("unknown_ordinal", f"no worker with ordinal {ordinal} can be reached")
        return {"address": address}

    async def cancel_any(self, args: Args) -> Args:
        """A cancel key that says nothing of its worker: every other worker of this host has a look."""
        own, server = self._worker(), self._server
        locals_ = tuple(server.registry.workers.values())
        addresses: list[str] = []
        with trio.move_on_after(ASK_WORKER_TIMEOUT_SECONDS):
            async with trio.open_nursery() as nursery:
                for local in locals_:
                    if local is not own and local.link is not None:
                        nursery.start_soon(_offer, local.link, args["key"])
                if args["to_hosts"]:
                    with suppress(StoreUnavailable, StoreUnknown):
                        addresses = await server.ordinals.other_hosts({each.ordinal for each in locals_})
        return {"addresses": addresses}

    async def fleet(self, args: Args) -> Args:
        """Asks every worker of the fleet, each within a time limit."""
        answers: list[Args] = []
        async with trio.open_nursery() as nursery:
            for local in tuple(self._server.registry.workers.values()):
                if local.link is not None:
                    nursery.start_soon(_ask, local, local.link, args["op"], args.get("args") or {}, answers)
        answers.sort(key=lambda answer: str(answer["worker"]))
        return {"answers": answers}

    async def ledger_rows(self, args: Args) -> Args:
        return {"rows": await self._server.rows()}

    # ---- who is asking

    def _worker(self) -> Local:
        if self._local is None:
            raise LinkRefused("no_hello", "say hello first")
        return self._local


def _notify(link: Link, op: str, **args: Any) -> None:
    try:
        link.notify(op, **args)
    except LinkLost:
        return  # it does not read: its link ends by itself


async def _offer(link: Link, key: bytes) -> None:
    with suppress(LinkRefused, LinkLost):
        await link.call("cancel", key=key)


async def _ask(local: Local, link: Link, op: str, args: Args, answers: list[Args]) -> None:
    answer: Args = {"worker": local.who.index, "error": "no answer in time"}
    with trio.move_on_after(ASK_WORKER_TIMEOUT_SECONDS):
        try:
            answer = {"worker": local.who.index, "value": await link.call(op, **args)}
        except LinkRefused as refused:
            answer = {"worker": local.who.index, "error": refused.message}
        except LinkLost:
            answer = {"worker": local.who.index, "error": "its link was lost"}
    answers.append(answer)
