"""What one worker has: its pools, its clients by cancel key, its sessions by permit.

The one place where these are looked up; who decides about them is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic

from coordinator.ledger.record import Permit
from pooler.console.session import Interrupt
from pooler.errors import LoginRefused, TooManyClients
from pooler.net.name_counts import NameCounts
from pooler.pool import steering
from pooler.pool.ledger_view import LedgerView
from pooler.pool.parts import Parts
from pooler.pool.plan import plan_for
from pooler.pool.pool import Pool
from pooler.relay.asking import Asked
from pooler.relay.client import ClientConn
from pooler.relay.server import ServerConn
from pooler.serve.changes import apply_changes
from pooler.serve.client_numbers import ClientNumbers
from pooler.serve.replication import ReplicationClient
from pooler.serve.tenants import who_asks
from pooler.settings import Settings
from pooler.wire.auth import ServerSecret
from pooler.wire.messages import is_utf8
from pooler.wire.own_parameters import CLASS, TENANT

EVERY = ""  # among the names of what is paused: all there are, and all that come


@dataclass(frozen=True, slots=True)
class PoolKey:
    """A pool's name: two modes of one (database, user) are two pools under one set of seats."""

    name: str
    user: str
    service: str | None
    forces_user: bool = True  # False: of who asks for secrets, where clients' sessions are another user's


@dataclass
class Registry:
    """Everything that comes and goes."""

    settings: Settings
    parts: Parts
    pools: dict[PoolKey, Pool] = field(default_factory=dict)
    clients: dict[bytes, ClientConn] = field(default_factory=dict)
    replications: dict[bytes, ReplicationClient] = field(default_factory=dict)
    numbers: ClientNumbers[ClientConn | ReplicationClient] = field(default_factory=ClientNumbers)
    consoles: dict[bytes, Interrupt] = field(default_factory=dict)
    names: NameCounts = field(default_factory=NameCounts)  # clients by database and by user
    known_users: Collection[str] = ()  # those of the userlist
    listed_secret: Callable[[str], ServerSecret] = lambda _user: ServerSecret()  # what it has for one
    followed: dict[Pool, Pool] = field(default_factory=dict)  # by the pool of another ledger, see changes
    paused: set[str] = field(default_factory=set)
    disabled: set[str] = field(default_factory=set)
    set_here: dict[str, str] = field(default_factory=dict)  # by SET, on top of the config
    draining: bool = False  # no new clients; those whose login is under way are let in
    leaving: bool = False  # as draining, and clients stay as long as they like
    stopping: bool = False  # everybody goes
    console_queries: int = 0
    suspended: bool = False  # nothing moves until RESUME

    @property
    def key_owner(self) -> int:
        """What cancel keys say of whose they are: the worker's ordinal, or its number among peers."""
        fleet = self.settings.fleet
        return fleet.peer_id if fleet.peer_id and fleet.workers == 1 else self.parts.permits.ordinal

    def console_asked(self) -> None:
        """A console's command came."""
        self.console_queries += 1

    def is_paused(self, name: str) -> bool:
        """Whether a pool of this database may grant nothing."""
        return self.suspended or name in self.paused or EVERY in self.paused

    def pool(
        self, name: str, user: str, service: str | None, secret: ServerSecret, *, forces_user: bool = True
    ) -> Pool:
        """The pool of this entry and user, made when first asked for; it learns a newer secret.

        Raises LoginRefused for a user whom the ledger's keys cannot name.
        """
        if not is_utf8(user):
            raise LoginRefused(f'the name of user "{user}" is not UTF-8', "22021")
        if service is not None and self.settings.services[service].pool_mode is None:
            service = None  # the same pool as by name
        key = PoolKey(name, user, service, forces_user or self.settings.database(name).user is None)
        pool = self.pools.get(key)
        secret = self.secret_for(name, secret, forces_user=key.forces_user)
        if pool is not None:
            secret = pool.plan.secret.followed_by(secret, pool.plan.user)
        plan = plan_for(self.settings, name, user, secret, service, forces_user=key.forces_user)
        if pool is None:
            pool = self.pools[key] = Pool(self.parts, plan)
            pool.counted_as = (name, user)
            pool.core.paused = self.is_paused(name)
            view = self.parts.permits.ledgers.get(plan.ledger)
            if view is not None:
                steering.ledger_changed(pool, view)
            else:
                pool.core.serving = False  # until the ledger was heard
        else:
            if plan.secret != pool.plan.secret:
                pool.growth.forget()  # what the server refused was the older secret
            pool.apply_settings(plan)
        return pool

    def keep_minimums(self) -> None:
        """An entry with a user of its own and a min_pool_size has its sessions before anybody comes."""
        for name, entry in self.settings.databases.items():
            least = self.settings.pool.min_pool_size if entry.min_pool_size is None else entry.min_pool_size
            if entry.user is not None and least and name not in self.disabled and not self.leaving and (
                    not any(self.by_name(name))):
                self.pool(name, entry.user, None, ServerSecret())

    def secret_for(self, name: str, secret: ServerSecret, *, forces_user: bool = True) -> ServerSecret:
        """What logs in to the servers: the entry's user has his own, of the entry or else of the userlist; a
        client's says nothing of him."""
        forced = self.settings.database(name).user if forces_user else None
        return secret if forced is None else self.listed_secret(forced)

    def admit(self, name: str, user: str) -> None:
        """Count one more client of this database and user. Raises TooManyClients."""
        settings = self.settings
        known = settings.database_for(name, None) is not None  # the console's is not
        pool, database, whose = settings.pool, settings.database(name) if known else None, settings.user(user)
        limits = (
            ("max_db_client_connections", pool, database, b"d" + name.encode(errors="surrogateescape")),
            ("max_user_client_connections", pool, whose, b"u" + user.encode(errors="surrogateescape")))
        counted: list[bytes] = []
        for setting, of_all, own, key in limits:
            limit: int | None = getattr(own, setting, None)
            limit = getattr(of_all, setting) if limit is None else limit
            if not self.names.enter(key, limit or 0):
                for each in counted:
                    self.names.leave(each)
                raise TooManyClients(f"no more connections allowed ({setting} = {limit})")
            counted.append(key)

    def dismiss(self, name: str, user: str) -> None:
        """One client fewer of this database and user."""
        self.names.leave(b"d" + name.encode(errors="surrogateescape"))
        self.names.leave(b"u" + user.encode(errors="surrogateescape"))

    def admit_always(self, name: str, user: str) -> None:
        """Count one more that was let in elsewhere."""
        self.names.enter_always(b"d" + name.encode(errors="surrogateescape"))
        self.names.enter_always(b"u" + user.encode(errors="surrogateescape"))

    def entered(self, client: ClientConn) -> None:
        """A client was let in."""
        self.clients[client.cancel_key] = client
        self.numbers.give(client, self.parts.permits.ordinal)

    def left(self, client: ClientConn) -> None:
        """A client is gone; one that had not entered is none."""
        self.dismiss(*client.pool.counted_as)
        self.clients.pop(client.cancel_key, None)
        self.numbers.drop(client)

    def apply_settings(self) -> None:
        """After a reload."""
        apply_changes(self)

    def ledger_changed(self, view: LedgerView) -> None:
        """Tell the pools of this ledger what epoch it is. Pools that were stopped stay so."""
        if self.stopping:
            return
        if self.parts.classes.of(view.db).learn(view.policy, monotonic()):
            self.parts.tollgate.stir()
        for pool in self.pools.values():
            if pool.plan.ledger == view.db:
                steering.ledger_changed(pool, view)
        for client in tuple(self.replications.values()):
            if client.plan.ledger == view.db and not (view.serving and client.opened.epoch == view.epoch):
                client.break_off("57P01", "another server takes over: connect again")

    def by_name(self, name: str | None) -> Iterator[Pool]:
        """Pools of one `databases` entry, or all."""
        for key, pool in self.pools.items():
            if name is None or key.name == name:
                yield pool

    def by_seat(self, db: str, name: str, user: str) -> Iterator[Pool]:
        """Pools that take their permits from one pool of the ledger."""
        for pool in self.pools.values():
            plan = pool.plan
            if (plan.ledger, plan.seats_of, plan.user) == (db, name, user):
                yield pool

    def of_user(self, user: str) -> Iterator[Pool]:
        """Pools whose sessions log in as this user."""
        for pool in self.pools.values():
            if pool.plan.user == user:
                yield pool

    def server(self, db: str, permit: Permit) -> ServerConn | None:
        """The session under a permit."""
        for server in self.parts.servers:
            if server.permit == permit and server.pool.plan.ledger == db:
                return server
        return None

    def replication(self, db: str, permit: Permit) -> ReplicationClient | None:
        """The replication connection whose session is under a permit."""
        for client in self.replications.values():
            if client.permit == permit and client.plan.ledger == db:
                return client
        return None

    def asked(
        self, user: str, database: str, application_name: str, address: str, own: Mapping[str, str]
    ) -> Asked:
        """Who asks, as the client says (`own`) and the first rule of `tenants` that fits it."""
        return who_asks(self.settings.tenants, {
            "user": user, "database": database, "application_name": application_name,
            "client_address": address, "pooler_tenant": own.get(TENANT, ""),
            "pooler_class": own.get(CLASS, "")}, own)
