"""What a pool is told at its making: whom it serves, where, and by which limits. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pooler.errors import LoginRefused
from pooler.net.stream import KeepAlive
from pooler.settings import DatabaseSettings, PoolMode, PoolSettings, Settings
from pooler.wire.auth import ServerSecret

NAME_BYTES_MAX = 128  # of a database and of a user, as PgBouncer's


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One (database, user) of one worker; durations in seconds, 0 = off."""

    name: str  # the entry under `databases`
    ledger: str  # the ledger's database
    dbname: str
    user: str
    secret: ServerSecret
    mode: PoolMode
    size_max: int  # over the whole fleet: the ledger's seats
    size_min: int
    query_wait_timeout_seconds: float
    server_lifetime_seconds: float
    settings: PoolSettings
    eof_is_proof: bool | None = None  # None: where nothing is seen to stand between

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
    it has one, unless not `forces_user`.

    Raises LoginRefused for a name that no server and no ledger can bear, which only clients can bring.
    """
    database: DatabaseSettings = settings.database(name)
    if not _fits(database.dbname or name):
        raise LoginRefused(f"no such database: its name is no UTF-8 or over {NAME_BYTES_MAX} bytes", "3D000")
    forced = database.user if forces_user else None
    if not _fits(forced or user):
        raise LoginRefused(f"the user's name is no UTF-8 or over {NAME_BYTES_MAX} bytes", "28000")
    if forced is not None:
        password = database.password.get_secret_value() if database.password is not None else None
        secret = ServerSecret(plain=password.encode() if password is not None else None)
    lifetime = database.server_lifetime_seconds
    wait = database.query_wait_timeout_seconds
    least = database.min_pool_size
    proof = settings.failover.server_eof_is_proof
    return PoolPlan(
        name=name,
        ledger=database.ledger,
        dbname=database.dbname or name,
        user=forced or user,
        secret=secret,
        mode=settings.pool_mode(name, service),
        size_max=settings.pool_size(name),
        size_min=settings.pool.min_pool_size if least is None else least,
        query_wait_timeout_seconds=settings.pool.query_wait_timeout_seconds if wait is None else wait,
        server_lifetime_seconds=settings.pool.server_lifetime_seconds if lifetime is None else lifetime,
        settings=settings.pool,
        eof_is_proof=None if proof == "auto" else proof,
    )
