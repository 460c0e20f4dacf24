"""SET: how a value is read, and what it is refused for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.link import LinkRefused
from pooler import settings_inert
from pooler.errors import UsageFault
from pooler.net.certificate import certificates_in, read_certificate
from pooler.serve.commands import TLS_WAITS, Commands
from pooler.serve.encryption import Encryption
from pooler.serve.runtime_settings import with_setting
from pooler.serve.standing import Standing
from pooler.settings import PoolSettings, Settings
from tests.serve.test_commands import SETTINGS, Registry
from tests.support.certificates import Authority, Pair

AS_PGBOUNCER = SETTINGS.model_copy(update={
    "admin": SETTINGS.admin.model_copy(update={"as_pgbouncer": True})})


@dataclass
class Worker:
    """As much of a worker as SET touches, with its real encryption."""

    run_dir: Path
    broken: list[str] = field(default_factory=list)  # what is wrong whatever is SET

    def __post_init__(self) -> None:
        self.registry = cast(Any, Registry())
        self.registry.settings = AS_PGBOUNCER
        self.encryption = Encryption(AS_PGBOUNCER)
        self.commands = Commands(self.registry, Standing(self.run_dir), self.take)

    def take(self, settings: Settings) -> list[str]:
        problems, _ = self.encryption.take(settings)
        self.registry.settings = settings
        return [*self.broken, *problems]

    async def set(self, key: str, value: object) -> list[str]:
        return await self.commands.run("set", {"key": key, "value": str(value)})

    def shows(self, pair: Pair) -> bool:
        clients = self.encryption.clients
        return clients is not None and clients.end_point == end_point_of(pair)


def end_point_of(pair: Pair) -> bytes:
    return read_certificate(certificates_in(pair.cert.read_text())[0]).end_point


def test_what_would_have_no_effect_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_setting(SETTINGS, "max_client_conn", "17").pool.max_client_conn == 17
    monkeypatch.setattr(settings_inert, "INERT", {"pool.max_client_conn": None})
    with pytest.raises(UsageFault, match=r"^max_client_conn has no effect"):
        with_setting(SETTINGS, "max_client_conn", "17")


@pytest.mark.parametrize(("key", "value", "held"), [
    ("tcp_keepalive", "0", False), ("server_idle_timeout", "30", 30.0), ("pool_mode", "session", "session"),
    ("ignore_startup_parameters", "extra_float_digits, options", ("extra_float_digits", "options")),
])
def test_values_are_read_as_pgbouncer_writes_them(key: str, value: str, held: object) -> None:
    changed = with_setting(SETTINGS, key, value).pool
    assert {field.alias or name: getattr(changed, name) for name, field in PoolSettings.model_fields.items()
            }[key] == held


async def test_settings_of_tls_that_need_each_other_are_set_one_by_one_and_serve_once_all_are_there(
    tmp_path: Path
) -> None:
    old, new = (Authority(tmp_path / name).host("localhost") for name in ("old", "new"))
    worker = Worker(tmp_path)
    assert (await worker.set("client_tls_sslmode", "require"))[0].startswith(TLS_WAITS)
    assert worker.encryption.clients is None
    assert (await worker.set("client_tls_key_file", old.key))[0].startswith(TLS_WAITS)
    assert await worker.set("default_pool_size", 7) == []  # what waits is no other's fault
    assert await worker.set("client_tls_cert_file", old.cert) == []
    assert worker.shows(old)
    (told,) = await worker.set("client_tls_cert_file", new.cert)
    assert f"{old.key} is not the key of the certificate {new.cert}" in told
    assert worker.shows(old)
    assert await worker.set("client_tls_key_file", new.key) == []
    assert worker.shows(new)
    later = Worker(tmp_path)
    later.commands.recall()
    assert later.shows(new)
    assert later.registry.settings == worker.registry.settings


async def test_a_file_for_tls_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    with pytest.raises(LinkRefused, match="client_tls_cert_file"):
        await worker.set("client_tls_cert_file", tmp_path / "nowhere")
    assert worker.registry.settings == AS_PGBOUNCER


async def test_a_set_is_refused_for_what_it_does_and_not_for_what_was_wrong_before(tmp_path: Path) -> None:
    worker = Worker(tmp_path, broken=["auth.file: cannot be read"])
    assert await worker.set("default_pool_size", 7) == []
    assert worker.registry.settings.pool.default_pool_size == 7
    with pytest.raises(LinkRefused, match="auth"):
        await worker.set("auth_type", "hba")
    assert (worker.registry.settings.auth.type, worker.registry.settings.pool.default_pool_size) == (
        AS_PGBOUNCER.auth.type, 7)
