"""Who may come in, and where users are looked up, without a server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from pooler.errors import LoginRefused, NotServing
from pooler.net.auth_query import DEFAULT_QUERY, NO_PASSWORD_FITS, SESSION_SETTINGS, Place
from pooler.serve.authority import Authority, check_pam
from pooler.serve.registry import PoolKey
from pooler.settings import Settings, load
from pooler.wire.auth import AuthType, Method, Secret, ServerSecret, md5_secret
from tests.serve.test_config_rows import POLICY

CONFIG = """
fleet: {name: o, run_dir: run, proxy_protocol_from: [192.0.2.0/24]}
etcd: {endpoints: ["127.0.0.1:2379"]}
services: {primary: {worker_ports: 6440, database_role: write}}
auth: AUTH
databases:
  o: {hosts: ["127.0.0.1:5432"], policy: o.yaml, user: forced}
  own: {hosts: ["127.0.0.1:5432"], policy: o.yaml, dbname: x,
        auth_user: own, auth_query: "q $1", auth_dbname: o}
"""


class Registry(SimpleNamespace):
    """As much of a registry as logins need; remembers which pool was asked for, and has none."""

    def pool(self, *args: Any, **more: Any) -> Any:
        self.asked.append((*args, more))
        raise NotServing("the server at 10.0.0.1 is away")


async def made(
    tmp_path: Path, nursery: trio.Nursery, auth: str, **files: str
) -> tuple[Authority, Registry]:
    for name, content in {"o.yaml": POLICY, "users": '"ann" "pw"\n"asker" "asking"\n', **files}.items():
        (tmp_path / name).write_text(content)
    parts = SimpleNamespace(nursery=nursery)
    registry = Registry(settings=settings(tmp_path, auth), parts=parts, asked=[], pools={}, disabled=set())
    return Authority(registry, b"mock"), registry  # type: ignore[arg-type]


def settings(folder: Path, auth: str) -> Settings:
    (folder / "pooler.yaml").write_text(CONFIG.replace("AUTH", auth))
    return load(folder / "pooler.yaml")


@pytest.mark.parametrize(("service", "database", "place"), [
    (None, "o", Place("o", "asker", DEFAULT_QUERY)),
    (None, "own", Place("o", "own", "q $1")),
    ("primary", "x", Place("o", "own", "q $1")),
    (None, "not_here", Place("o", "asker", DEFAULT_QUERY)),
    (None, "pgbouncer", Place("o", "asker", DEFAULT_QUERY)),
])
async def test_a_user_is_looked_up_where_its_database_says(
    tmp_path: Path, nursery: trio.Nursery, service: str | None, database: str, place: Place
) -> None:
    authority, _ = await made(tmp_path, nursery, "{type: md5, file: users, user: asker}")
    assert authority._place(service, database) == place


async def test_who_stands_in_the_file_is_not_asked_for(tmp_path: Path, nursery: trio.Nursery) -> None:
    authority, registry = await made(tmp_path, nursery, "{type: md5, file: users, user: asker}")
    assert await authority.rules(None).find_user("ann", "o") == Secret(plain=b"pw")
    assert registry.asked == []


async def test_the_asker_logs_in_as_itself_with_its_own_secret_and_its_failure_stays_here(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    authority, registry = await made(tmp_path, nursery, "{type: md5, file: users, user: asker}")
    with pytest.raises(NotServing) as refused:
        await authority.rules(None).find_user("bob", "o")
    assert "10.0.0.1" not in str(refused.value)
    assert registry.asked == [("o", "asker", None, ServerSecret(plain=b"asking"), {"forces_user": False})]
    registry.settings = settings(tmp_path, "{type: md5, file: users, user: asker, password: other}")
    authority.take(registry.settings)
    with pytest.raises(NotServing):
        await authority.rules(None).find_user("bob", "o")
    assert registry.asked[1][3] == ServerSecret(plain=b"other")


class Pool:
    """A pool whose session answers every question with these rows."""

    def __init__(self, rows: list[list[bytes | None]]) -> None:
        self.rows, self.asked = rows, list[Any]()

    @asynccontextmanager
    async def checkout(self, _seconds: float) -> AsyncIterator[Pool]:
        await trio.lowlevel.checkpoint()
        yield self

    async def ask(self, *question: Any) -> list[list[bytes | None]]:
        self.asked.append(question)
        return self.rows


async def test_who_does_not_exist_is_asked_as_most_are_whom_the_server_knows(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, registry = await made(tmp_path, nursery, "{type: md5, user: asker}")
    assert authority.rules(None).unknown_method is Method.SCRAM
    hashed = md5_secret(b"pw", "bob")
    pool = Pool([[b"bob", hashed]])
    monkeypatch.setattr(registry, "pool", lambda *_, **__: pool)
    assert await authority.rules(None).find_user("bob", "o") == Secret(md5=hashed)
    assert authority.rules(None).unknown_method is Method.MD5
    assert pool.asked == [(SESSION_SETTINGS, DEFAULT_QUERY, [b"bob"], 2)]


@pytest.mark.parametrize("rows", [[[b"bob"]], [[b"bob", b"x"], [b"bob", b"y"]]])
async def test_an_answer_that_is_none_is_told_to_no_outsider(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, rows: list[list[bytes | None]]
) -> None:
    authority, registry = await made(tmp_path, nursery, "{type: md5, user: asker}")
    monkeypatch.setattr(registry, "pool", lambda *_, **__: Pool(rows))
    with capture_logs() as logs, pytest.raises(NotServing, match=r"^users cannot be looked up now"):
        await authority.rules(None).find_user("bob", "o")
    assert [(entry["event"], entry["database"], entry["user"]) for entry in logs] == [
        ("auth_query_failed", "o", "asker")]


async def test_a_name_that_no_server_can_have_is_not_asked_for(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    authority, registry = await made(tmp_path, nursery, "{type: md5, file: users, user: asker}")
    assert await authority.rules(None).find_user("caf\udce9", "o") is None
    assert registry.asked == []


async def test_without_a_file_and_an_asker_everybody_exists_and_no_password_fits(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    authority, _ = await made(tmp_path, nursery, "{type: trust}")
    assert await authority.rules(None).find_user("anybody", "o") == NO_PASSWORD_FITS


async def test_a_faulty_file_at_a_reload_leaves_what_was_in_force_and_says_so(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    auth = "{type: hba, hba_file: rules, file: users}"
    authority, registry = await made(tmp_path, nursery, auth, rules="host all all all reject\n")
    before = authority.rules(None).hba
    (tmp_path / "rules").write_text("host all all all kerberos\n")
    (tmp_path / "users").write_text('"bob" "pw"\n')
    authority.take(registry.settings)
    assert authority.problems == [
        f'{tmp_path}/rules:1: method "kerberos" is not served: write one of trust, reject, password, md5, '
        "scram-sha-256, peer, cert, pam (the files of before stay)"]
    assert authority.rules(None).hba is before
    assert await authority.rules(None).find_user("bob", "o") is None
    (tmp_path / "rules").write_text("host all all all trust\n")
    authority.take(registry.settings)
    assert authority.problems == []
    assert authority.rules(None).hba.rules[0].method is AuthType.TRUST
    assert await authority.rules(None).find_user("bob", "o") == Secret(plain=b"pw")


async def test_a_secret_that_changed_in_the_file_is_told_to_its_pools(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, registry = await made(tmp_path, nursery, "{type: md5, file: users}")
    registry.pools = {PoolKey("own", "ann", None): None, PoolKey("own", "unlisted", None): None,
                      PoolKey("gone", "ann", None): None, PoolKey("o", "bob", None): None}
    monkeypatch.setattr(registry, "pool", lambda *args, **more: registry.asked.append((*args, more)))
    (tmp_path / "users").write_text('"ann" "new"\n"forced" "his"\n')
    authority.take(registry.settings)
    assert registry.asked == [
        ("own", "ann", None, ServerSecret(plain=b"new"), {"forces_user": True}),
        ("o", "bob", None, ServerSecret(plain=b"his"), {"forces_user": True})]  # sessions are this user's
    assert registry.listed_secret("forced") == ServerSecret(plain=b"his")


async def test_where_it_stands_for_pgbouncer_it_says_who_is_not_there_and_what_is_wrong(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, registry = await made(tmp_path, nursery, "{type: md5, file: users, user: asker}")
    admin = registry.settings.admin.model_copy(update={"as_pgbouncer": True})

    def change(**auth: str) -> None:
        was = registry.settings
        registry.settings = was.model_copy(
            update={"admin": admin, "auth": was.auth.model_copy(update=auth)})

    change()
    monkeypatch.setattr(registry, "pool", lambda *_, **__: Pool([]))
    with pytest.raises(LoginRefused, match=r"^no such user$"):
        await authority.rules(None).find_user("bob", "o")
    registry.disabled = {"o"}
    with pytest.raises(LoginRefused, match=r'^authentication database "o" is disabled$'):
        await authority.rules(None).find_user("bob", "o")
    for name in ("nix", "pgbouncer"):
        change(dbname=name)
        with pytest.raises(LoginRefused, match=r"^bouncer config error$"):
            await authority.rules(None).find_user("bob", "o")


async def test_proxies_are_not_counted_among_failures(tmp_path: Path, nursery: trio.Nursery) -> None:
    authority, _ = await made(tmp_path, nursery, "{type: trust}")
    failures = authority.rules(None).failures
    assert failures is not None
    assert failures.source("192.0.2.9") is None
    assert failures.source("198.51.100.1") == "198.51.100.1"


def test_pam_is_asked_about_whole_names_with_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Authenticator:
        def authenticate(self, *args: object, **more: object) -> bool:
            asked.append((*args, more))
            return args[1] == b"right"

    monkeypatch.setitem(sys.modules, "pam", SimpleNamespace(PamAuthenticator=Authenticator))
    assert check_pam("änn", b"right")
    assert not check_pam("änn", b"wrong")
    assert not check_pam("änn", b"")
    assert not check_pam("caf\udce9", b"right")
    assert asked == [("änn".encode(), word, {"service": "pgbouncer", "resetcreds": False})
                     for word in (b"right", b"wrong")]
