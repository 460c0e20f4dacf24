"""What a pool's sizes and times mean under load is told when it is started, and defaults tell nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pooler.settings import load, warnings_of
from pooler.settings_models import Settings
from tests.settings.test_load import SOUND, faults_of, folder, write

__all__ = ["folder"]  # a fixture


def loaded(folder: Path, pool: str, database: str = "") -> Settings:
    text = SOUND.replace("    query_wait_timeout: 750ms\n", f"    {database}\n" if database else "")
    return load(write(folder, f"{text}pool: {{{pool}}}\n"))


@pytest.mark.parametrize(("pool", "told"), [
    ("query_wait_timeout: 500ms", "pool.query_wait_timeout of 0.5 s leaves no time to expect"),
    ("query_wait_timeout: 2s, reserve_pool_size: 1", "ends every wait before reserve_pool_timeout (5 s)"),
    ("reserve_pool_size: 6", "pool.reserve_pool_size 6 is more than a quarter of the pool's size 20"),
    ("scaling_max_parallel_creates: 6", "pool.scaling_max_parallel_creates 6 is more than a quarter"),
    ("min_pool_size: 11", "pool.min_pool_size 11 is more than half of the pool's size 20"),
])
def test_what_hinders_is_told_once(folder: Path, pool: str, told: str) -> None:
    found = warnings_of(loaded(folder, pool))
    assert len(found) == 1
    assert told in found[0]


@pytest.mark.parametrize("pool", [
    "", "query_wait_timeout: 501ms", "query_wait_timeout: 0", "query_wait_timeout: 2s",
    "reserve_pool_size: 5", "default_pool_size: 1", "scaling_max_parallel_creates: 5", "min_pool_size: 10",
    "min_pool_size: 11, pool_mode: session"])
def test_what_does_not_is_not(folder: Path, pool: str) -> None:
    assert warnings_of(loaded(folder, pool)) == []


def test_a_database_is_told_of_where_it_is_otherwise(folder: Path) -> None:
    found = warnings_of(loaded(folder, "default_pool_size: 40, min_pool_size: 8", "pool_size: 10"))
    assert len(found) == 1
    assert found[0].startswith("databases.orders.min_pool_size 8 is more than half")


@pytest.mark.parametrize("name", ["scaling_max_parallel_creates", "max_server_creates"])
def test_a_gate_that_lets_nobody_in_is_a_fault(folder: Path, name: str) -> None:
    assert faults_of(folder, f"{SOUND}pool: {{{name}: 0}}\n").keys() == {f"pool.{name}"}
