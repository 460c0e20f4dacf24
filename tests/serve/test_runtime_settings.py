"""SET: how a value is read, and what it is refused for."""

from __future__ import annotations

import pytest

from pooler import settings_inert
from pooler.errors import UsageFault
from pooler.serve.runtime_settings import with_setting
from pooler.settings import PoolSettings
from tests.serve.test_commands import SETTINGS


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
