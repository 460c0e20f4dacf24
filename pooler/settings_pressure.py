"""Sizes and times of pools that are allowed together and hinder each other under load, a line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pooler.settings_models import DatabaseSettings, PoolSettings, Settings

QUERY_WAIT_SECONDS_MIN = 0.5  # at or below it nothing is left to expect a session in
CREATES_OF_SIZE = 4  # a pool is filled in so many rounds at least
RESERVE_OF_SIZE = 4


def pressure_warnings(settings: Settings) -> list[str]:
    """Of the section `pool`, and of each database where that is not what is there too."""
    pool = settings.pool
    found = list(_of_one("pool", pool, pool.default_pool_size, pool.pool_mode))
    for name, database in settings.databases.items():
        own = _with(pool, database)
        size = database.pool_size or pool.default_pool_size
        of_pool = {line.partition(" ")[2] for line in found if line.startswith("pool.")}
        mode = database.pool_mode or pool.pool_mode
        found += [line for line in _of_one(f"databases.{name}", own, size, mode)
                  if line.partition(" ")[2] not in of_pool]
    return found


def _with(pool: PoolSettings, database: DatabaseSettings) -> PoolSettings:
    names = ("min_pool_size", "reserve_pool_size", "query_wait_timeout_seconds")
    return pool.model_copy(update={
        name: value for name in names if (value := getattr(database, name)) is not None})


def _of_one(where: str, pool: PoolSettings, size: int, mode: str) -> Iterator[str]:
    wait, reserve = pool.query_wait_timeout_seconds, pool.reserve_pool_size
    if 0 < wait <= QUERY_WAIT_SECONDS_MIN:
        yield (f"{where}.query_wait_timeout of {wait:g} s leaves no time to expect a session that comes "
               "back: one is opened at once for each that waits")
    if reserve and 0 < wait < pool.reserve_pool_timeout_seconds:
        yield (f"{where}.query_wait_timeout of {wait:g} s ends every wait before reserve_pool_timeout "
               f"({pool.reserve_pool_timeout_seconds:g} s) opens the reserve")
    if reserve * RESERVE_OF_SIZE > size:
        yield f"{where}.reserve_pool_size {reserve} is more than a quarter of the pool's size {size}"
    creates = pool.scaling_max_parallel_creates
    is_default = creates == PoolSettings.model_fields["scaling_max_parallel_creates"].default
    if not is_default and creates * CREATES_OF_SIZE > size:
        yield (f"{where}.scaling_max_parallel_creates {creates} is more than a quarter of the pool's size "
               f"{size}: it paces nothing")
    if mode == "transaction" and pool.min_pool_size * 2 > size:
        yield (f"{where}.min_pool_size {pool.min_pool_size} is more than half of the pool's size {size}: "
               "little of it is left to other pools while this one is quiet")
