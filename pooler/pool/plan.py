"""What a pool is told at its making: whom it serves, where, and by which limits. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from coordinator.ledger.record import pool_name
from pooler.errors import LoginRefused
from pooler.net.stream import KeepAlive
from pooler.pool.duty import Duty
from pooler.settings import DatabaseSettings, PoolMode, PoolSettings, Settings
from pooler.settings_models import UserSettings
from pooler.wire.auth import ServerSecret

# what an entry of `databases` or of `users` may say otherwise than `pool`
_OVERRIDES = frozenset(PoolSettings.model_fields) & (
    frozenset(DatabaseSettings.model_fields) | frozenset(UserSettings.model_fields))
NAME_BYTES_MAX = 128  # of a database and of a user, as PgBouncer's


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One (database, user) of one worker; durations in seconds, 0 = off (server_lifetime: used once)."""

    name: str  # the entry under `databases`
    ledger: str  # the ledger's database
    dbname: str
    user: str
    secret: ServerSecret
    mode: PoolMode
    size_max: int  # over the whole fleet: the ledger's seats, without the reserve
    size_min: int
    query_wait_timeout_seconds: float
    server_lifetime_seconds: float
    settings: PoolSettings
    eof_is_proof: bool | None = None  # None: where nothing is seen to stand between
    is_forced: bool = False  # its user is the entry's own
    connect_query: str = ""  # run on every session before anybody has it
    reserve: int = 0  # sessions more, once somebody has waited reserve_pool_timeout
    user_sessions_max: int = 0  # of its user, over all pools of this worker; 0: no limit
    duty: Duty = field(default_factory=Duty)  # what its server has to be
    pool: str = ""  # the entry, where others are of the same database of the same ledger: its own seats

    @property
    def seats_of(self) -> str:
        """With the user: whose seats its sessions take in the ledger."""
        return pool_name(self.dbname, self.pool)

    @property
    def keepalive(self) -> KeepAlive:
        """Of its TCP connections to the server."""
        return keepalive_of(self.settings, KeepAlive())


def keepalive_of(settings: PoolSettings, unset: KeepAlive) -> KeepAlive:
    """The tcp_* settings in whole units, rounded up; what is 0 is as in `unset`."""
    return KeepAlive(
        idle_seconds=ceil(settings.tcp_keepidle_seconds) or unset.idle_seconds,
        interval_seconds=ceil(settings.tcp_keepintvl_seconds) or unset.interval_seconds,
        probes=settings.tcp_keepcnt or unset.probes,
        user_timeout_ms=ceil(settings.tcp_user_timeout_seconds * 1000) or unset.user_timeout_ms,
        is_probing=settings.tcp_keepalive)


def _fits(name: str) -> bool:
    try:
        return len(name.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False


def plan_for(
    settings: Settings, name: str, user: str, secret: ServerSecret, service: str | None = None,
    *, forces_user: bool = True,
) -> PoolPlan:
    """The plan of the pool that serves `user` on the `databases` entry `name`; as the entry's own user where
    it has one, unless not `forces_user`. `secret` is of the user whose sessions they are.

    Raises LoginRefused for a name that no server and no ledger can bear, which only clients can bring.
    """
    database: DatabaseSettings = settings.database(name)
    if not _fits(database.dbname or name):
        raise LoginRefused(f"no such database: its name is no UTF-8 or over {NAME_BYTES_MAX} bytes", "3D000")
    forced = database.user if forces_user else None
    if not _fits(forced or user):
        raise LoginRefused(f"the user's name is no UTF-8 or over {NAME_BYTES_MAX} bytes", "28000")
    if forced is not None and database.password is not None:
        secret = ServerSecret(plain=database.password.get_secret_value().encode())
    effective = _settings_for(settings, database, user)
    whose = user if forced is None else forced  # whose sessions they are
    reserve = settings.user(whose).reserve_pool_size
    if reserve is None:
        reserve = effective.reserve_pool_size
    size = settings.pool_size(name, whose)
    limit = settings.user(whose).max_user_connections
    limit = settings.pool.max_user_connections if limit is None else limit
    size, reserve = min(size, limit or size), max(0, min(reserve, limit - size) if limit else reserve)
    proof = settings.failover.server_eof_is_proof
    return PoolPlan(
        name=name,
        ledger=database.ledger,
        dbname=database.dbname or name,
        user=forced or user,
        secret=secret,
        mode=settings.pool_mode(name, service, user),
        size_max=size,
        size_min=min(effective.min_pool_size, size),
        query_wait_timeout_seconds=effective.query_wait_timeout_seconds,
        server_lifetime_seconds=effective.server_lifetime_seconds,
        settings=effective,
        eof_is_proof=None if proof == "auto" else proof,
        reserve=reserve,
        user_sessions_max=limit,
        is_forced=forced is not None,
        connect_query=database.connect_query or "",
        duty=Duty(database.role, database.max_replica_lag_seconds),
        pool=name if settings.entries_of(database.ledger, database.dbname or name) - {name} else "",
    )


def _settings_for(settings: Settings, database: DatabaseSettings, user: str) -> PoolSettings:
    """The `pool` section as it is for this database and the clients of this user."""
    given = {name: value for of in (database, settings.user(user)) for name in _OVERRIDES
             if (value := getattr(of, name, None)) is not None}
    return settings.pool.model_copy(update=given) if given else settings.pool
