"""What a pool is told: the keepalive of its connections, and whose names it may bear."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pooler.errors import LoginRefused
from pooler.net.stream import KeepAlive, RawSocket
from pooler.pool.plan import keepalive_of, plan_for
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
