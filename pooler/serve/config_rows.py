"""SHOW CONFIG: every setting of this worker under PgBouncer's name, with its default and its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pooler.net.auth_query import DEFAULT_QUERY
from pooler.observe.rows import Row, config_row
from pooler.observe.snapshot import ConfigRow
from pooler.settings import AuthSettings, FleetSettings, PoolSettings, Settings

AT_START_ONLY = frozenset({
    "pkt_buf", "track_extra_parameters", "session_state_functions",
})
NOTHING_SET: Mapping[str, str] = {}


def config_rows(settings: Settings, set_here: Mapping[str, str] = NOTHING_SET) -> Iterator[Row]:
    """Rows sorted by key; nothing secret is among them. `set_here`: what was SET, and to what."""
    if settings.admin.show_config:
        yield from _as_shown(settings, set_here)
        return
    rows = list(_of(settings.pool, PoolSettings.model_fields))
    rows += [*_of_tls("client", settings.client_tls), *_of_tls("server", settings.server_tls)]
    fleet = settings.fleet
    rows += [
        _row("listen_addr", ",".join(each.host for each in fleet.listen), "127.0.0.1", changeable=False),
        _row("listen_port", _port(fleet), "6432", changeable=False),
        _row("listen_backlog", str(fleet.listen_backlog), "128", changeable=False),
        _row("unix_socket_dir", str(fleet.unix_socket_dir or ""), "", changeable=False),
        *_auth(settings.auth),
        _row("admin_users", ",".join(settings.admin.users), ""),
        _row("stats_users", ",".join(settings.admin.stats_users), ""),
        _row("drain_timeout", _text(fleet.drain_timeout_seconds), "60"),
        _row("workers", str(fleet.workers), None, changeable=False),
    ]
    for row in sorted(rows, key=lambda each: each.key):
        yield config_row(replace(row, source="runtime") if row.key in set_here else row)


def _auth(auth: AuthSettings) -> Iterator[ConfigRow]:
    yield _row("auth_type", auth.type, "scram-sha-256")
    for name, value in (("file", auth.file), ("hba_file", auth.hba_file), ("ident_file", auth.ident_file),
                        ("user", auth.user), ("dbname", auth.dbname)):
        yield _row(f"auth_{name}", str(value or ""), "")
    yield _row("auth_query", auth.query or DEFAULT_QUERY, DEFAULT_QUERY)


def _as_shown(settings: Settings, set_here: Mapping[str, str]) -> Iterator[Row]:
    """The rows that the config brings along; what was SET has its value of now."""
    pool = {row.key: row.value for row in _of(settings.pool, PoolSettings.model_fields)}
    now = {key: pool.get(key, text) for key, text in set_here.items()}
    for key, value, default, changeable in settings.admin.show_config:
        name = str(key)
        shown = now.get(name, value)
        yield {"key": name, "value": shown, "default": default, "changeable": changeable}


def _of(model: BaseModel, fields: dict[str, FieldInfo]) -> Iterator[ConfigRow]:
    for name, field in fields.items():
        key = field.alias or name
        value, default = _text(getattr(model, name)), _text(field.default)
        yield _row(key, value, default, changeable=key not in AT_START_ONLY)


def _of_tls(side: str, section: BaseModel) -> Iterator[ConfigRow]:
    for name, field in type(section).model_fields.items():
        key = f"{side}_{name}" if name.startswith("tls13") else f"{side}_tls_{name}"
        yield _row(key, _text(getattr(section, name) or ""), _text(field.default or ""))


def _row(key: str, value: str, default: str | None, *, changeable: bool = True) -> ConfigRow:
    return ConfigRow(key, value, default, changeable, "default" if value == default else "file")


def _port(fleet: FleetSettings) -> str:
    return str(fleet.listen[0].port if fleet.listen else fleet.unix_socket_port or "")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
