"""The worker's end of its link to the coordinator: every permit it asks for, holds and gives back.

The link may be down at any time and for any length of time; the worker then goes on with what it holds. What
the ledger must learn (the end of a session, a reservation given up) is kept and repeated until answered, so
that nothing is lost while the process lives. A reservation whose caller gave up or was cancelled is voided,
whatever became of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import Any

import trio

from coordinator.ledger.record import Backend, Kind, Permit
from coordinator.ledger.states import Proof, SessionState
from coordinator.link import Args, LinkLost, LinkRefused
from pooler.errors import FleetUnreachable, NoPermit, PermitLost, PoolerError
from pooler.pool.errands import Errands
from pooler.pool.hearing import Hearing
from pooler.pool.holder import Holder
from pooler.pool.holdings import Holdings, plain
from pooler.pool.ledger_view import LedgerView
from pooler.pool.link_up import Identity, Uplink
from pooler.pool.recovering import named as _permit

ANSWER_SECONDS_MAX = 5.0  # how long an answer may take beyond the wait that was asked for
CLOSING_SECONDS_MAX = 1.0  # CLOSING is recorded for those who look: Terminate does not wait longer for it
HINT_SECONDS = 1.0
REQUESTS_MAX = 3  # a request id can be void (the worker registered anew meanwhile): then another one asks

# refusals after which the ledger holds nothing for the request, or the coordinator sees to that
SETTLED = frozenset({"full", "seats_full", "draining", "frozen", "voided", "ledger_lost"})


@dataclass(frozen=True, slots=True)
class Wish:
    """A permit for one session of the pool (dbname, user), which may have `seats` over the whole fleet."""

    db: str
    kind: Kind
    dbname: str
    user: str
    seats: int
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Granted:
    """The answer to a reservation: with it in hand one may connect, once, to `address` with `tag`."""

    permit: Permit
    epoch: int
    address: str
    tag: str


class OpenRefused(PoolerError):
    """The ledger still has the permit, but this session may not be used: close it with proof."""


@dataclass(frozen=True, slots=True)
class PermitsStatistics:
    """One snapshot for tests, metrics and the console."""

    linked: bool
    held: Mapping[str, int]  # by state
    requests_open: int
    errands_open: int
    granted_total: int
    refused_total: Mapping[str, int]  # by reason
    voided_total: int
    released_total: int
    unknown_total: int
    reasserted_total: int
    permits_gone_total: int
    links_lost_total: int


class Permits:
    """All permits of one worker. `run()` must be running for anything to move.

    `connect` opens a stream to the coordinator's socket, or raises OSError.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[trio.abc.Stream]], identity: Identity, holder: Holder
    ) -> None:
        self.ledgers: dict[str, LedgerView] = {}
        self._holdings = Holdings()
        self._counts: Counter[str] = Counter()
        self._hint_at: dict[str, float] = {}  # when the next may be given, by database
        self._refused: Counter[str] = Counter()
        self._hearing = Hearing(self.ledgers, self._holdings, holder, self._counts)
        self._uplink = Uplink(connect, identity, self._holdings, self._hearing)
        self._errands = Errands(self._uplink)
        self._hearing.answer_over(self._uplink, self._errands)
        self.shares = self._hearing.shares

    # -- life

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the link up and carry what is to be told. Started at once: `registered` says when linked."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._uplink.run)
            nursery.start_soon(self._errands.run)
            nursery.start_soon(self._follow_given_up)
            nursery.start_soon(self.shares.run)
            task_status.started()

    @property
    def registered(self) -> trio.Event:
        """Set for ever once a first hello was answered."""
        return self._uplink.registered

    @property
    def ordinal(self) -> int:
        """This worker's number in cancel keys; meaningless before `registered`."""
        return self._uplink.ordinal

    def lease_left_seconds(self) -> float:
        """How long the worker's lease certainly lasts, counted from the sending of what last renewed it."""
        return self._uplink.lease_left_seconds()

    def on_renewed(self, listener: Callable[[], object]) -> None:
        """Called whenever the lease was renewed."""
        self._uplink.on_renewed = listener

    def growth_allowed(self, db: str) -> bool:
        """May sessions be opened, and closed by choice, now?"""
        view = self.ledgers.get(db)
        return view is not None and view.grows

    def held(self, db: str) -> int:
        """How many of this ledger's this worker has."""
        return len(self._holdings.of(db))

    def leaked(self) -> frozenset[tuple[str, Permit]]:
        """Open permits that were in no pool at the last two heartbeats: nobody will use them or give them
        back."""
        return self._hearing.leaked

    async def settled(self) -> None:
        """Wait until the ledger has answered for everything it was to be told."""
        await self._errands.settled()

    def statistics(self) -> PermitsStatistics:
        """The snapshot."""
        counts = self._counts
        return PermitsStatistics(
            linked=self._uplink.linked, held=self._holdings.count(),
            requests_open=len(self._holdings.requests()), errands_open=len(self._errands),
            granted_total=counts["granted"], refused_total=dict(self._refused),
            voided_total=counts["voided"], released_total=counts["released"],
            unknown_total=counts["unknown"], reasserted_total=counts["reasserted"],
            permits_gone_total=counts["gone"], links_lost_total=self._uplink.lost_total,
        )

    # -- a session's life

    async def reserve(self, wish: Wish, wait_seconds: float) -> Granted:
        """Wait up to `wait_seconds` (0: one try) for a permit.

        Raises NoPermit with the reason. Whoever is cancelled here, or refused, holds nothing: what the ledger
        may have granted is given back.
        """
        deadline = trio.current_time() + wait_seconds
        for _ in range(REQUESTS_MAX):
            try:
                return await self._request(wish, deadline)
            except NoPermit as refusal:
                self._refused[refusal.reason] += 1
                if refusal.reason != "voided":
                    raise
        raise NoPermit(f'no session permit for database "{wish.db}": the worker registers anew', "voided")

    def connecting(self, db: str, permit: Permit) -> None:
        """The socket is about to be connected. Told, not waited for."""
        self._holdings.moved(db, permit, SessionState.CONNECTING)
        self._uplink.notify("connecting", db=db, permit=plain(permit))

    def backend_hint(self, db: str) -> None:
        """The server met is not what the epoch's backend should be. Told at most once a second, not waited
        for: who leads looks at the servers by itself, only later."""
        if trio.current_time() >= self._hint_at.get(db, 0.0):
            self._hint_at[db] = trio.current_time() + HINT_SECONDS
            self._uplink.notify("backend_hint", db=db)

    async def opened(
        self, db: str, permit: Permit, pid: int, backend_start_us: int, *, backend: Backend
    ) -> None:
        """Record the session as OPEN; repeated over broken links until answered: the caller bounds it.

        Raises PermitLost if the ledger no longer has the permit, OpenRefused if it must not be used.
        """
        try:
            await self._uplink.insist("open", db=db, permit=plain(permit), pid=pid,
                                      backend_start_us=backend_start_us, backend=asdict(backend))
        except LinkRefused as refused:
            if refused.code == "gone":
                self._hearing.gone(db, permit)
                raise PermitLost(f"permit {permit} of {db} is gone") from None
            raise OpenRefused(f"permit {permit} of {db}: {refused.code} {refused.message}") from None
        if not self._holdings.moved(db, permit, SessionState.OPEN):
            raise PermitLost(f"permit {permit} of {db} is gone")

    async def closing(self, db: str, permit: Permit) -> None:
        """Terminate is about to be sent. Waits a moment for the answer, and not for a link."""
        live = self._holdings.moved(db, permit, SessionState.CLOSING)
        if not live:
            return
        try:
            with trio.move_on_after(CLOSING_SECONDS_MAX):
                await self._uplink.call("closing", db=db, permit=plain(permit))
        except LinkLost:
            return
        except LinkRefused as refused:
            if refused.code == "gone" and self._hearing.is_whole(db):
                self._holdings.forget(db, permit)
                self._hearing.violated(db, permit)

    def released(self, db: str, permit: Permit, proof: Proof) -> None:
        """The session is gone (`eof`), or never was (`unused`). Returns at once, told until answered."""
        if self._holdings.ended(db, permit, SessionState.RELEASED):
            self._counts["released"] += 1
            self._errands.tell("release", lambda _: self._holdings.forget(db, permit),
                               db=db, permit=plain(permit), proof=str(proof))

    def unknown(self, db: str, permit: Permit, abandoned: bool) -> None:
        """Nobody can say whether the session still exists. `abandoned`: it was not recorded as open, and its
        socket is closed for good. Returns at once, told until answered.
        """
        def done(refusal: str) -> None:
            settle = self._holdings.forget if refusal == "gone" else self._holdings.given_up
            settle(db, permit)

        if self._holdings.ended(db, permit, SessionState.UNKNOWN, abandoned):
            self._counts["unknown"] += 1
            self._errands.tell("unknown", done, db=db, permit=plain(permit), abandoned=abandoned)

    async def _follow_given_up(self) -> None:
        """What was given up is said again each lease time until its slot is gone: a late write may have made
        something else of it, and nobody would look at it again."""
        while True:
            await trio.sleep(self._uplink.ttl_seconds or 1.0)  # noqa: TID251 - a level, looked at in time
            for held in self._holdings.given_up_now():
                try:
                    await self._uplink.insist(
                        "unknown", db=held.db, permit=plain(held.permit), abandoned=held.abandoned)
                except LinkRefused as refused:
                    if refused.code == "gone":
                        self._holdings.forget(held.db, held.permit)

    # -- the rest of the link

    def epoch_ack(self, db: str, epoch: int) -> None:
        """No session of an older epoch is granted any more. Returns at once, told until answered."""
        self._errands.tell("epoch_ack", lambda _: None, db=db, epoch=epoch)

    async def forward_cancel(self, ordinal: int, key: bytes) -> str:
        """Pass a CancelRequest on to the worker with that ordinal: "" if it is this host's, else host:port to
        send it to. Raises FleetUnreachable."""
        return str((await self._once("cancel", ordinal=ordinal, key=key)).get("address") or "")

    async def offer_cancel(self, key: bytes, *, to_hosts: bool) -> list[str]:
        """Pass it on to every worker of this host. → host:port of the others. Raises FleetUnreachable."""
        return list((await self._once("cancel_any", key=key, to_hosts=to_hosts)).get("addresses") or ())

    async def fleet(self, op: str, args: Args) -> list[Args]:
        """Ask every worker of the fleet: {worker, value or error} each. Raises FleetUnreachable."""
        return list((await self._once("fleet", op=op, args=args))["answers"])

    async def ledger_rows(self) -> list[Any]:
        """What SHOW LEDGER prints. Raises FleetUnreachable."""
        return list((await self._once("ledger_rows"))["rows"])

    # -- tickets that clients have named

    async def register_ticket(self, db: str, ticket_id: str, client: str, tenant: str, klass: str) -> Args:
        """{attempt}, or {refused, …}. Repeated until answered: the caller bounds it. Raises LinkRefused."""
        answer: Args = await self._uplink.insist(
            "ticket_register", db=db, id=ticket_id, client=client, tenant=tenant, **{"class": klass})
        return answer

    async def begin_ticket(self, db: str, ticket_id: str, attempt: int, permit: Permit, pid: int) -> Args:
        """{}, or {refused, …}: nothing may be sent then. As register_ticket."""
        answer: Args = await self._uplink.insist(
            "ticket_begin", db=db, id=ticket_id, attempt=attempt, permit=plain(permit), pid=pid)
        return answer

    def ticket_ended(self, db: str, ticket_id: str, attempt: int, state: str, outcome: str) -> None:
        """Returns at once, told until answered."""
        self._errands.tell("ticket_end", lambda _: None, db=db, id=ticket_id, attempt=attempt, state=state,
                           outcome=outcome)

    def on_ticket_moved(self, listener: Callable[[Args], None]) -> None:
        """Called with {db, id, attempt} when a later registration of a name took the place of that one."""
        self._hearing.ticket_moved = listener

    async def ticket_rows(self, ticket_id: str) -> list[Any]:
        """What SHOW TICKET prints. Raises FleetUnreachable."""
        return list((await self._once("ticket_show", id=ticket_id))["rows"])

    async def _once(self, op: str, /, **args: Any) -> Any:
        try:
            return await self._uplink.call(op, **args)
        except LinkLost:
            raise FleetUnreachable("this host's coordinator is unreachable") from None
        except LinkRefused as refused:
            raise FleetUnreachable(f"{op}: {refused.message or refused.code}") from None

    # -- the gate

    async def enter_gate(self, wait_seconds: float, **ask: Any) -> tuple[bool, bool]:
        """Whether this host's coordinator lets one more connect in by then, and whether it had to wait.
        Raises NoPermit where it does not answer. One that knows no gate lets in whoever asks."""
        deadline = trio.current_time() + wait_seconds
        with trio.move_on_at(deadline + ANSWER_SECONDS_MAX):
            while True:
                with trio.move_on_at(deadline):
                    await self._uplink.settled()
                if not self._uplink.is_settled:
                    break
                try:
                    answer = await self._uplink.call(
                        "create", wait_seconds=max(0.0, deadline - trio.current_time()), **ask)
                    return bool(answer["in"]), bool(answer["waited"])
                except LinkRefused as refused:
                    if refused.code == "unknown_operation":
                        return True, False
                    raise NoPermit(refused.message or refused.code, refused.code) from None
                except LinkLost:
                    await trio.lowlevel.checkpoint()
        raise NoPermit("this host's coordinator does not answer", "unreachable")

    def leave_gate(self, request_id: str) -> None:
        """That connect is over. Told, not waited for: where it is not heard, it is taken for over in time."""
        self._uplink.notify("created", request_id=request_id)

    # -- asking

    async def _request(self, wish: Wish, deadline: float) -> Granted:
        """One request id. However this ends, the request is answered for good, or voided."""
        view = self.ledgers.get(wish.db)
        if view is not None and view.no_growth:
            raise NoPermit(f'nothing more is granted to database "{wish.db}": {view.no_growth}', "no_growth")
        request_id = token_hex(12)
        self._holdings.asked(request_id)
        settled = False
        try:
            with trio.move_on_at(deadline + ANSWER_SECONDS_MAX):
                answer = await self._ask(wish, request_id, deadline)
                settled = True
                return self._grant(wish.db, answer)
            raise NoPermit(f'no answer from the ledger of database "{wish.db}"', "unreachable")
        except NoPermit as refusal:
            settled = refusal.reason in SETTLED
            raise
        finally:
            if settled:
                self._holdings.answered(request_id)
            else:
                self._void(wish.db, request_id)

    async def _ask(self, wish: Wish, request_id: str, deadline: float) -> Args:
        """The same request id over as many links as it takes."""
        while True:
            with trio.move_on_at(deadline):
                await self._uplink.settled()
            if not self._uplink.is_settled:
                raise NoPermit(f'the ledger of database "{wish.db}" is unreachable', "unreachable")
            try:
                answer: Args = await self._uplink.call(
                    "reserve", db=wish.db, request_id=request_id, kind=str(wish.kind), dbname=wish.dbname,
                    user=wish.user, pool=wish.pool, seats=wish.seats,
                    wait_seconds=max(0.0, deadline - trio.current_time()))
                return answer
            except LinkRefused as refused:
                raise NoPermit(refused.message or refused.code, refused.code) from None
            except LinkLost:
                await trio.lowlevel.checkpoint()

    def _grant(self, db: str, answer: Args) -> Granted:
        permit = _permit(answer["permit"])
        self._holdings.granted(db, permit)
        self._counts["granted"] += 1
        return Granted(permit, answer["epoch"], answer["address"], permit.birth_tag(answer["tag"]))

    def _void(self, db: str, request_id: str) -> None:
        self._counts["voided"] += 1
        self._errands.tell(
            "void", lambda _: self._holdings.answered(request_id), db=db, request_id=request_id)
