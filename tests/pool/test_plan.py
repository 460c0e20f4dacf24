"""What a pool is told: the keepalive of its connections, and whose names it may bear."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pooler.errors import LoginRefused
from pooler.net.stream import KeepAlive, RawSocket
from pooler.pool.plan import PoolPlan, keepalive_of, plan_for
from pooler.settings import PoolSettings, load
from pooler.wire.auth import ServerSecret
from tests.net.wires import tcp_pair

OPTIONS = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)


def options(keepalive: KeepAlive | None) -> list[int]:
    """Whether it probes, then OPTIONS, of a socket that was set up so."""
    ours, theirs = tcp_pair()
    with ours, theirs:
        RawSocket(ours, keepalive=keepalive)
        found = [ours.getsockopt(socket.IPPROTO_TCP, option) for option in OPTIONS]
        return [ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *found]


def test_each_tcp_setting_reaches_the_socket() -> None:
    settings = PoolSettings.model_validate({
        "tcp_keepidle": "90s", "tcp_keepintvl": "1500ms", "tcp_keepcnt": 3, "tcp_user_timeout": "2500ms"})
    assert options(keepalive_of(settings, KeepAlive())) == [1, 90, 2, 3, 2500]


@pytest.mark.parametrize("unset", [KeepAlive(0, 0, 0), KeepAlive(11, 7, 5)])
def test_what_is_not_set_is_the_systems_own_or_what_the_side_has(unset: KeepAlive) -> None:
    own = options(None)[1:]
    kept = [unset.idle_seconds, unset.interval_seconds, unset.probes, 0]
    expected = [value or system for value, system in zip(kept, own, strict=True)]
    assert options(keepalive_of(PoolSettings.model_validate({}), unset)) == [1, *expected]


def test_without_keepalive_nothing_is_probed_and_the_user_timeout_still_holds() -> None:
    settings = PoolSettings.model_validate({"tcp_keepalive": False, "tcp_user_timeout": "4s"})
    found = options(keepalive_of(settings, KeepAlive()))
    assert (found[0], found[-1]) == (0, 4000)


ANY = """
fleet: {name: o}
auth: {type: trust}
etcd: {endpoints: ["127.0.0.1:2379"]}
databases: {"*": {hosts: ["127.0.0.1:5432"], policy: o.yaml}}
"""


@pytest.mark.parametrize(("database", "user", "sqlstate"), [
    ("d" * 128, "u" * 128, ""), ("d" * 129, "u", "3D000"), ("ä" * 65, "u", "3D000"),
    ("d\udce4", "u", "3D000"), ("d", "u" * 129, "28000"),
], ids=["fits", "long", "long in bytes", "no UTF-8", "long user"])
def test_a_name_that_only_a_client_can_bring_is_refused_when_it_asks(
    tmp_path: Path, database: str, user: str, sqlstate: str
) -> None:
    (tmp_path / "o.yaml").write_text("schema: dbAdmissionPolicy.v1\ndatabase: o/write\n")
    (tmp_path / "pooler.yaml").write_text(ANY)
    settings = load(tmp_path / "pooler.yaml")
    if not sqlstate:
        assert plan_for(settings, database, user, ServerSecret()).dbname == database
        return
    with pytest.raises(LoginRefused) as refused:
        plan_for(settings, database, user, ServerSecret())
    assert refused.value.code == sqlstate
    assert len(str(refused.value)) < 100


OVERRIDES = """
fleet: {name: o}
auth: {type: trust}
etcd: {endpoints: ["127.0.0.1:2379"]}
pool: {default_pool_size: 10, reserve_pool_size: 3, min_pool_size: 4, query_timeout: 9s,
       query_wait_timeout: 8s, max_user_connections: 50, server_lifetime: 7s, client_idle_timeout: 6s}
databases:
  a: {hosts: ["127.0.0.1:5432"], policy: o.yaml}
  b: {hosts: ["127.0.0.1:5432"], policy: o.yaml, pool_size: 5, reserve_pool_size: 0, min_pool_size: 0,
      query_wait_timeout: 1s, server_lifetime: 0s, pool_mode: session}
  c: {hosts: ["127.0.0.1:5432"], policy: o.yaml, user: ann}
users:
  ann: {pool_size: 2, reserve_pool_size: 1, pool_mode: statement, query_timeout: 0s, query_wait_timeout: 2s,
        transaction_timeout: 3s, idle_transaction_timeout: 4s, client_idle_timeout: 5s}
  few: {max_user_connections: 11}
"""


def overridden(directory: Path, name: str, user: str) -> PoolPlan:
    (directory / "o.yaml").write_text("schema: dbAdmissionPolicy.v1\ndatabase: o/write\n")
    (directory / "pooler.yaml").write_text(OVERRIDES)
    return plan_for(load(directory / "pooler.yaml"), name, user, ServerSecret())


@pytest.mark.parametrize(("name", "user", "expected"), [
    ("a", "bob", (10, 3, 4, "transaction")), ("b", "bob", (5, 0, 0, "session")),
    ("a", "ann", (2, 1, 2, "statement")), ("b", "ann", (2, 1, 0, "statement")),
    ("c", "bob", (2, 1, 2, "transaction")),  # the sessions are ann's, the client is bob
    ("a", "few", (10, 1, 4, "transaction")),
])
def test_sizes_and_mode_are_the_users_before_the_databases_before_those_of_all(
    tmp_path: Path, name: str, user: str, expected: tuple[int, int, int, str]
) -> None:
    plan = overridden(tmp_path, name, user)
    assert (plan.size_max, plan.reserve, plan.size_min, plan.mode) == expected


@pytest.mark.parametrize(("name", "user", "query", "wait", "lifetime", "idle"), [
    ("a", "bob", 9, 8, 7, 6), ("b", "bob", 9, 1, 0, 6), ("b", "ann", 0, 2, 0, 5), ("a", "ann", 0, 2, 7, 5),
])
def test_times_are_the_users_before_the_databases_and_0_there_is_off_too(
    tmp_path: Path, name: str, user: str, query: float, wait: float, lifetime: float, idle: float
) -> None:
    """R75."""
    plan = overridden(tmp_path, name, user)
    assert (plan.settings.query_timeout_seconds, plan.query_wait_timeout_seconds,
            plan.server_lifetime_seconds, plan.settings.client_idle_timeout_seconds) == (
                query, wait, lifetime, idle)
    assert plan.settings.transaction_timeout_seconds == (3 if user == "ann" else 0)


SEVERAL = """
fleet: {name: o}
auth: {type: trust}
etcd: {endpoints: ["127.0.0.1:2379"]}
databases:
  app: {hosts: ["127.0.0.1:5432"], policy: o.yaml}
  app_session: {hosts: ["127.0.0.1:5432"], policy: o.yaml, dbname: app, pool_mode: session}
  other: {hosts: ["127.0.0.1:5432"], policy: o.yaml}
"""


def test_entries_of_one_database_have_seats_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text("schema: dbAdmissionPolicy.v1\ndatabase: o/write\n")
    (tmp_path / "pooler.yaml").write_text(SEVERAL)
    settings = load(tmp_path / "pooler.yaml")
    seats = [plan_for(settings, name, "u", ServerSecret()).seats_of for name in settings.databases]
    assert seats == ["app/app", "app/app_session", "other"]
