"""Who may come in by the limits of its database and its user, and what a refusal leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from pooler.errors import TooManyClients
from pooler.serve.registry import Registry
from pooler.settings import load

CONFIG = """
fleet: {name: o}
auth: {type: trust}
etcd: {endpoints: ["127.0.0.1:2379"]}
pool: {max_db_client_connections: 3, max_user_client_connections: 2}
databases:
  a: {hosts: ["127.0.0.1:5432"], policy: o.yaml}
  free: {hosts: ["127.0.0.1:5432"], policy: o.yaml, max_db_client_connections: 0}
  one: {hosts: ["127.0.0.1:5432"], policy: o.yaml, max_db_client_connections: 1}
users:
  many: {max_user_client_connections: 0}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "o.yaml").write_text("schema: dbAdmissionPolicy.v1\ndatabase: o/write\n")
    (tmp_path / "pooler.yaml").write_text(CONFIG)
    return Registry(load(tmp_path / "pooler.yaml"), cast(Any, None))


def admitted(registry: Registry, name: str, user: str, tries: int = 9) -> int:
    count = 0
    for _ in range(tries):
        try:
            registry.admit(name, user)
        except TooManyClients:
            continue
        count += 1
    return count


@pytest.mark.parametrize(("name", "user", "most"), [
    ("a", "bob", 2), ("a", "many", 3), ("free", "many", 9), ("one", "many", 1), ("free", "bob", 2),
])
def test_the_entrys_own_limit_counts_before_that_of_all_and_0_is_none(
    registry: Registry, name: str, user: str, most: int
) -> None:
    """R75."""
    assert admitted(registry, name, user) == most


def test_one_that_is_refused_by_one_limit_is_not_counted_by_the_other(registry: Registry) -> None:
    assert admitted(registry, "a", "bob") == 2
    assert admitted(registry, "a", "ann") == 1
    registry.dismiss("a", "bob")
    assert admitted(registry, "a", "ann") == 1
    assert admitted(registry, "free", "bob") == 1


def test_one_that_was_let_in_elsewhere_counts_whatever_the_limit(registry: Registry) -> None:
    for _ in range(4):
        registry.admit_always("one", "many")
    for _ in range(4):
        assert admitted(registry, "one", "many") == 0
        registry.dismiss("one", "many")
    assert admitted(registry, "one", "many") == 1
