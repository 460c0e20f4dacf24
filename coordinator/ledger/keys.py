"""Where everything stands in etcd: the one place that spells keys.

Slot and seat numbers have fixed width, so that ranges compare; `/` in a database's name is written %2F.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote

from coordinator.ledger.record import Kind
from coordinator.store.api import prefix_end

__all__ = ["SLOT_DIGITS", "DbKeys", "FleetKeys", "number_at", "numbers_at", "only", "prefix_end"]

SLOT_DIGITS = 6
NUMBER_DIGITS_MAX = 19


def only(key: str) -> tuple[str, str]:
    """The range that holds this one key."""
    return key, key + "\0"


def number_at(key: str) -> int | None:
    """The number that a key ends with; None where it does not end as we write one: nobody of us wrote it."""
    end = key.rpartition("/")[2]
    if not (end.isascii() and end.isdigit() and len(end) < NUMBER_DIGITS_MAX):
        return None
    return int(end) if end == f"{int(end):0{SLOT_DIGITS}d}" else None


def numbers_at(keys: Iterable[str]) -> frozenset[int]:
    """The numbers of those that end with one."""
    return frozenset(number for key in keys if (number := number_at(key)) is not None)


@dataclass(frozen=True, slots=True)
class FleetKeys:
    """Keys of a whole fleet, under `/<prefix>/<fleet>/`."""

    prefix: str
    fleet: str

    @classmethod
    def under(cls, root: str) -> FleetKeys:
        """The fleet whose root this is."""
        prefix, _, fleet = root.strip("/").rpartition("/")
        return cls(prefix, fleet)

    @property
    def root(self) -> str:
        return f"/{self.prefix}/{self.fleet}/"

    def workers(self) -> str:
        return self.root + "worker/"

    def worker_exits(self) -> str:
        return self.root + "worker-exit/"

    def leader(self) -> str:
        return self.root + "leader"

    def reaches(self) -> str:
        return self.root + "reach/"

    def reach(self, coordinator: str) -> str:
        """On a coordinator's own lease: it is there, and which servers it reaches."""
        return self.reaches() + quote(coordinator, safe="-._~")

    def worker(self, boot_id: str) -> str:
        return self.root + "worker/" + boot_id

    def worker_exit(self, boot_id: str) -> str:
        return self.root + "worker-exit/" + boot_id

    def claims(self) -> str:
        return self.root + "claim/"

    def claim(self, boot_id: str) -> str:
        """On a worker's lease: the server processes it holds, as it told when a ledger was rebuilt."""
        return self.claims() + boot_id

    def ordinals(self) -> str:
        return self.root + "ordinal/"

    def every_session(self) -> str:
        return self.root + "session/"

    def ordinal(self, number: int) -> str:
        return f"{self.root}ordinal/{number:0{SLOT_DIGITS}d}"

    def operators(self) -> str:
        return self.root + "operator/"

    def operator(self, entry: str) -> str:
        return self.root + "operator/" + entry

    def every_ticket(self) -> str:
        return self.root + "ticket/"

    def growth_stops(self) -> str:
        return self.root + "growth/"

    def ledgers(self) -> str:
        return self.root + "ledger/"

    def epochs(self) -> str:
        return self.root + "epoch/"

    def database_of(self, epoch: str) -> str:
        """Whose epoch has this key."""
        return unquote(epoch.removeprefix(self.epochs()))

    def db(self, database: str) -> DbKeys:
        return DbKeys(self.root, quote(database, safe="-._~"))


@dataclass(frozen=True, slots=True)
class DbKeys:
    """Keys of one database's ledger. `db` is already escaped."""

    root: str
    db: str

    @property
    def database(self) -> str:
        return unquote(self.db)

    def worker(self, boot_id: str) -> str:
        return FleetKeys.under(self.root).worker(boot_id)

    def worker_exit(self, boot_id: str) -> str:
        return FleetKeys.under(self.root).worker_exit(boot_id)

    def ledger(self) -> str:
        return f"{self.root}ledger/{self.db}"

    def epoch(self) -> str:
        return f"{self.root}epoch/{self.db}"

    def drain(self) -> str:
        """On the lease of the command that drains: gone means it died, and the old epoch comes back."""
        return f"{self.root}drain/{self.db}"

    def awaiting(self) -> str:
        """On the leader's lease: what its unknown permits wait for."""
        return f"{self.root}awaiting/{self.db}"

    def freed(self) -> str:
        """Touched by the leader when something was freed, for those who wait on other hosts."""
        return f"{self.root}freed/{self.db}"

    def alias(self) -> str:
        return f"{self.root}policy/{self.db}/alias"

    def growth(self) -> str:
        """There while nothing is granted to clients, for a server has no room: the leader says why."""
        return f"{self.root}growth/{self.db}"

    def shadows(self) -> str:
        return f"{self.root}shadow/{self.db}/"

    def shadow(self, generation: int, host: str) -> str:
        """What this generation would have granted on this host, beside the one that grants."""
        return f"{self.shadows()}{generation:0{SLOT_DIGITS}d}/{quote(host, safe='')}"

    def policies(self) -> str:
        return f"{self.root}policy/{self.db}/gen/"

    def policy(self, generation: int) -> str:
        return f"{self.root}policy/{self.db}/gen/{generation:0{SLOT_DIGITS}d}"

    def sessions(self, kind: Kind | None = None) -> str:
        base = f"{self.root}session/{self.db}/"
        return base if kind is None else f"{base}{kind}/"

    def session(self, kind: Kind, slot: int) -> str:
        return f"{self.sessions(kind)}{slot:0{SLOT_DIGITS}d}"

    def all_seats(self) -> str:
        return f"{self.root}seat/{self.db}/"

    def seats(self, dbname: str, user: str) -> str:
        return f"{self.root}seat/{self.db}/{quote(dbname, safe='')}/{quote(user, safe='')}/"

    def seat(self, dbname: str, user: str, number: int) -> str:
        return f"{self.seats(dbname, user)}{number:0{SLOT_DIGITS}d}"

    def receipts(self) -> str:
        return f"{self.root}receipt/{self.db}/"

    def wants(self) -> str:
        return f"{self.root}want/{self.db}/"

    def want(self, request_id: str) -> str:
        """On its worker's lease: who waits, and which worker of another host is to make room."""
        return self.wants() + request_id

    def receipt(self, request_id: str) -> str:
        return self.receipts() + request_id

    def tickets(self) -> str:
        return f"{self.root}ticket/{self.db}/"

    def ticket(self, ticket_id: str) -> str:
        """What stands under the name that a client gave its transaction."""
        return self.tickets() + quote(ticket_id, safe="-._~")

    def shares(self) -> str:
        """Execution permits, of every class and worker."""
        return f"{self.root}exec/{self.db}/"

    def share(self, execution_class: str, boot_id: str) -> str:
        """How many of a class's tickets this worker may execute at a time."""
        return f"{self.shares()}{quote(execution_class, safe='')}/{boot_id}"

    def raised(self, execution_class: str) -> str:
        """Moves with every raise that this class's permits are given in: of two raises one fails."""
        return self.share(execution_class, "raise")

    def buckets(self) -> str:
        """Token buckets, of every tenant and class."""
        return f"{self.root}bucket/{self.db}/"

    def bucket(self, bucket: str, boot_id: str) -> str:
        """What a worker has of a bucket: `tenant=NAME` or `class=NAME`."""
        return f"{self.buckets()}{quote(bucket, safe='=')}/{boot_id}"

    def bucket_pool(self, bucket: str) -> str:
        """What no worker has of it."""
        return self.bucket(bucket, "pool")

    def demands(self) -> str:
        return f"{self.root}demand/{self.db}/"

    def demand(self, host: str) -> str:
        """On its coordinator's lease: what the queues of that host want."""
        return self.demands() + quote(host, safe="")
