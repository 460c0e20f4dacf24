"""Execution classes and tenants of a ledger in one worker: who may execute, how many do, and who lacked room.

A ticket is granted its execution and its session in the same instant, so nobody holds the one while he waits
for the other. Where a session is free and the class is full, the waiters (`Group`: of one class in one pool)
stand in the class's ring; what comes free goes round that ring, and past it to nobody. Pure: `now` is an
argument; who is stirred is settled by the owner, behind whatever freed the room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, WeakValueDictionary

from pooler.admission.estimator import Estimator
from pooler.admission.tolls import Toll, Tolls

if TYPE_CHECKING:
    from pooler.admission.group import Group

UNLIMITED: Final = (1 << 30) - 1  # one digit: compared at once
FOREVER: Final = float("inf")
SAMPLE_SECONDS: Final = 0.01  # between two executions of a class that are looked at


class ExecutionClass:
    """One class of one ledger in this worker. `allotted`: how many this worker may execute of it."""

    __slots__ = (
        "__weakref__", "_aged_at", "_is_settling", "_is_stirred", "_pending", "_roused",
        "aging_limit_seconds", "allotted", "estimator", "executing", "groups", "high", "low",
        "max_wait_seconds", "name", "on_moved", "on_stir", "permits", "queue_deadline_seconds",
        "queue_max", "refused", "sample_at", "share", "starved", "transaction_limit_seconds",
        "wait_seconds_max", "waiting",
    )

    def __init__(self, name: str = "", on_stir: Callable[[ExecutionClass], None] | None = None) -> None:
        self.name = name
        self.on_stir = on_stir
        self.executing = self.waiting = self.refused = 0
        self.starved: OrderedDict[Group, None] = OrderedDict()  # the ring of those who lacked room
        self.groups: WeakSet[Group] = WeakSet()
        self._pending = 0  # ended, and counted as executing until the ring has been served
        self._roused: dict[Group, None] = {}  # whose tenant is below its inflight limit again
        self._is_stirred = self._is_settling = False
        self._aged_at = FOREVER  # nobody in the ring is older than the limit before
        self.estimator = Estimator()
        self.sample_at = 0.0  # from then on the next execution that ends is to be told
        self.share: int | None = None  # of the fleet's permits; None: unknown, so all of them count here
        self.on_moved: Callable[[ExecutionClass], None] | None = None
        self.high, self.low = UNLIMITED, -1  # `executing` above or below these is told, once
        self.learn({})

    def learn(self, said: Mapping[str, Any]) -> None:
        """What a generation says of it, by the names of the link; what is missing there has no limit."""
        self.permits: int = said.get("permits", UNLIMITED)
        self.allotted: int = self.permits if self.share is None else self.share
        self.queue_max: int = said.get("maxQueue", UNLIMITED)
        self.queue_deadline_seconds: float = said.get("queueDeadlineSeconds", FOREVER)
        self.max_wait_seconds: float = said.get("maxWaitSeconds", FOREVER)
        self.aging_limit_seconds: float = said.get("agingLimitSeconds", FOREVER)
        self.transaction_limit_seconds: float = said.get("transactionLimitSeconds", 0.0)
        self.wait_seconds_max = min(self.queue_deadline_seconds, self.max_wait_seconds)

    @property
    def in_use(self) -> int:
        """How many tickets execute, whatever the ring has not heard of yet."""
        return self.executing - self._pending

    def executed(self, seconds: float, now: float) -> None:
        """An execution ended that took so long. To be called at `sample_at` or later: a minute of all of them
        would be the last few milliseconds."""
        self.sample_at = now + SAMPLE_SECONDS
        self.estimator.executions.add(seconds, now)

    def allot(self, share: int | None) -> None:
        """So many may execute here from now on, with what other classes lent; who executes above that number
        goes on. None: it is unknown, and all of the class's permits count here."""
        self.share = share
        self.allotted = self.permits if share is None else share
        if self.starved:
            self.stir()

    # ---- what is told of it

    def listen(self, on_moved: Callable[[ExecutionClass], None]) -> None:
        """Called once whenever it is short or `executing` moved since it was last armed."""
        self.on_moved = on_moved
        self.arm()

    def arm(self) -> None:
        """Tell of the next move."""
        if self.on_moved is not None:
            self.high = self.low = self.executing

    def moved(self) -> None:
        """`executing` has left the marks, or somebody begins or ceases to wait for room."""
        if self.on_moved is not None and self.low >= 0:
            self.high, self.low = UNLIMITED, -1
            self.on_moved(self)

    # ---- what comes free

    def starve(self, group: Group) -> None:
        """These waiters could not be served for want of room: they are told when there is some."""
        if self.low >= 0:
            self.moved()
        if group not in self.starved:
            self.starved[group] = None
            if group.turn >= 1:  # it left in the middle of its turn
                self.starved.move_to_end(group, last=False)
        self._aged_at = min(self._aged_at, group.oldest_queued_at() + self.aging_limit_seconds)

    def freed(self, account: Account) -> None:
        """An execution of this account ended, and somebody lacks room."""
        if self.starved:
            self._pending += 1
        else:
            self.executing -= 1
            if self.executing < self.low:
                self.moved()
        if account.parked and account.executing < account.inflight_max:
            account.unpark()
        if self._pending or self._roused:
            self.stir()

    def rouse(self, group: Group) -> None:
        """A tenant that these wait for is below its limit again."""
        self._roused[group] = None

    def stir(self) -> None:
        """Somebody who lacked room may be served: the owner is to call `settle`."""
        if not self._is_stirred:
            self._is_stirred = True
            if self.on_stir is not None:
                self.on_stir(self)

    def has_room_for(self, group: Group) -> bool:
        """Whether one of these waiters may execute now, by the class; if not, the ring has them."""
        if self.executing < self.allotted:
            return True
        if self._pending and len(self.starved) == 1 and group in self.starved:
            self._take_pending()
            return self.executing < self.allotted
        self.starve(group)
        return False

    def settle(self, now: float) -> None:
        """Serve who was stirred, for as long as there is room and a session."""
        if self._is_settling:
            return  # somebody who was just served has ended already: the loop below sees it
        self._is_settling = True
        try:
            while self._is_stirred:
                self._is_stirred = False
                self._take_pending()
                roused, self._roused = self._roused, {}
                for group in roused:
                    while group.serve(now):
                        pass
                while self.starved and self.executing < self.allotted:
                    self._serve_ring(now)
        finally:
            self._is_settling = False

    def _take_pending(self) -> None:
        self.executing -= self._pending
        self._pending = 0
        if self.executing < self.low:
            self.moved()

    def _serve_ring(self, now: float) -> None:
        """One ticket of the group whose turn it is. One that cannot be served leaves the ring: it waits for a
        session."""
        group = self._aged(now) if now >= self._aged_at else None
        if group is None:
            group = next(iter(self.starved))
        if group.turn < 1:
            group.turn += group.weight
        if not group.serve(now):
            self.starved.pop(group, None)
            return
        group.turn = max(0, group.turn - 1) if group.tickets else 0
        if group.turn < 1 and group in self.starved:
            self.starved.move_to_end(group)

    def _aged(self, now: float) -> Group | None:
        """Who has somebody above the aging limit, the oldest first. A look at every group in the ring, which
        are pools that have waiters of this class: not tenants."""
        before = now - self.aging_limit_seconds
        self._aged_at = min(each.oldest_queued_at() for each in self.starved) + self.aging_limit_seconds
        oldest = min(self.starved, key=lambda each: each.overdue_since(before))
        return oldest if oldest.overdue_since(before) <= before else None


class Account:
    """One tenant in one class of a ledger, in all pools of this worker; its clients' tickets hold it."""

    __slots__ = (
        "__weakref__", "asked", "cost", "executing", "inflight_max", "klass", "parked", "refused", "served",
        "tenant", "tolls", "weight",
    )

    def __init__(self, klass: ExecutionClass, tenant: str = "", asked: str = "") -> None:
        self.klass = klass
        self.tenant = tenant
        self.asked = asked  # the class that its clients name; the policy may not have it
        self.weight = 1
        self.inflight_max = UNLIMITED
        self.cost = 1.0  # of a ticket, in the share of its tenant
        self.executing = self.served = self.refused = 0
        self.tolls: tuple[Toll, ...] = ()  # what a ticket of it pays before it is queued
        self.parked: dict[Group, None] = {}  # where it is passed over, for it is at its limit

    @property
    def waiting(self) -> int:
        """How many of its tickets wait. Looks at every pool that has waiters of its class."""
        return sum(group.count_of(self) for group in self.klass.groups)

    def unpark(self) -> None:
        """It is below its limit again."""
        parked, self.parked = self.parked, {}
        for group in parked:
            group.unpark(self)
            self.klass.rouse(group)

    def limit(self, weight: int, inflight_max: int) -> None:
        """What a generation says of the tenant."""
        self.weight, self.inflight_max = weight, inflight_max

    def move(self, klass: ExecutionClass) -> None:
        """Into another class, with what it executes. Nobody of it may wait."""
        assert not self.waiting
        self.klass.executing -= self.executing
        klass.executing += self.executing
        self.klass = klass


NOBODY: Final = Account(ExecutionClass())  # of tickets that belong to no ledger


class Book:
    """The classes and accounts of one ledger. Without a policy: one class without limits."""

    def __init__(self, on_stir: Callable[[ExecutionClass], None]) -> None:
        self._on_stir = on_stir
        self.classes: dict[str, ExecutionClass] = {"": ExecutionClass("", on_stir)}
        self.own = Account(ExecutionClass("", on_stir))  # of what the pooler itself does
        self._accounts: WeakValueDictionary[tuple[str, str], Account] = WeakValueDictionary()
        self._tenants: Mapping[str, Mapping[str, Any]] = {}
        self._on_moved: Callable[[ExecutionClass], None] | None = None
        self.generation = 0
        self.tolls = Tolls()

    def account(self, tenant: str, class_name: str) -> Account:
        """Of a client's tenant and class; of one without a class of the policy, in the first."""
        asked = class_name or next(iter(self.classes))
        account = self._accounts.get((asked, tenant))
        if account is None:
            account = self._accounts[asked, tenant] = Account(self._class_of(asked), tenant, asked)
            self._tell(account)
        return account

    def known(self) -> frozenset[str] | None:
        """The names of the classes; None without a policy."""
        return frozenset(self.classes) if self.generation else None

    def accounts(self) -> list[Account]:
        """Those that somebody has."""
        return sorted(self._accounts.values(), key=lambda each: (each.klass.name, each.tenant))

    def listen(self, on_moved: Callable[[ExecutionClass], None]) -> None:
        """See ExecutionClass.listen: of all its classes, and of those that it learns of."""
        self._on_moved = on_moved
        for each in self.classes.values():
            each.listen(on_moved)

    def executing(self) -> Iterator[Account]:
        """Those of which a ticket executes."""
        return (each for each in self._accounts.values() if each.executing)

    def learn(self, policy: Mapping[str, Any], now: float = 0.0) -> bool:
        """A policy as the link tells it. False if it is the one of before."""
        generation = int(policy.get("generation") or 0)
        if generation == self.generation:
            return False
        self.generation = generation
        lines = {group.line: None for each in self.classes.values() for group in each.groups if group.tickets}
        waiters = [(line, line.take_all()) for line in lines]
        said: Mapping[str, Mapping[str, Any]] = policy.get("executionClasses") or {"": {}}
        self._tenants = policy.get("tenants") or {}
        self.tolls.learn(policy, now)
        before, self.classes = self.classes, {}
        for name, numbers in said.items():
            self.classes[name] = before.get(name) or ExecutionClass(name, self._on_stir)
            self.classes[name].learn(numbers)
        accounts = list(self._accounts.values())
        self._accounts.clear()
        for account in accounts:
            self._move(account)
        for line, tickets in waiters:
            for ticket in tickets:
                line.add(ticket)
        if self._on_moved is not None:
            self.listen(self._on_moved)
            for each in self.classes.values():
                each.moved()
        return True

    def _move(self, account: Account) -> None:
        """To the class that it has now."""
        account.asked = account.asked or next(iter(self.classes))
        account.move(self._class_of(account.asked))
        self._tell(account)
        self._accounts.setdefault((account.asked, account.tenant), account)

    def _class_of(self, asked: str) -> ExecutionClass:
        return self.classes.get(asked) or next(iter(self.classes.values()))

    def _tell(self, account: Account) -> None:
        said = self._tenants.get(account.tenant) or {}
        account.limit(said.get("weight") or 1, said.get("inflight") or UNLIMITED)
        account.tolls = self.tolls.of(account.tenant, account.klass.name)


class Classes:
    """The books of one worker, by ledger."""

    def __init__(self, on_stir: Callable[[], None] | None = None) -> None:
        self._on_stir = on_stir
        self._stirred: dict[ExecutionClass, None] = {}
        self._books: dict[str, Book] = {}
        self._on_moved: Callable[[str, ExecutionClass], None] | None = None

    def of(self, ledger: str) -> Book:
        """The book of a ledger, made when first asked for."""
        book = self._books.get(ledger)
        if book is None:
            book = self._books[ledger] = Book(self._stir)
            if self._on_moved is not None:
                book.listen(partial(self._on_moved, ledger))
        return book

    def listen(self, on_moved: Callable[[str, ExecutionClass], None]) -> None:
        """See ExecutionClass.listen: of every class of every ledger."""
        self._on_moved = on_moved
        for ledger, book in self._books.items():
            book.listen(partial(on_moved, ledger))

    def all(self) -> Mapping[str, Book]:
        """Every book, by ledger."""
        return self._books

    def settle(self, now: float) -> None:
        """Serve whoever was stirred since the last call."""
        while self._stirred:
            stirred, self._stirred = self._stirred, {}
            for each in stirred:
                each.settle(now)

    def _stir(self, klass: ExecutionClass) -> None:
        is_first = not self._stirred
        self._stirred[klass] = None
        if is_first and self._on_stir is not None:
            self._on_stir()

