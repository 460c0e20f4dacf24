"""SET of the console: one setting of the config's `pool` section, in force until the next reload. Pure."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pooler.errors import UsageFault
from pooler.serve.config_rows import AT_START_ONLY
from pooler.settings import PoolSettings, Settings
from pooler.settings_checks import faults_across
from pooler.settings_inert import inert_settings

_BOOLEANS = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False,
             "no": False}
_FIELDS = {field.alias or name: (name, field) for name, field in PoolSettings.model_fields.items()}
LISTS = frozenset({"admin_users", "stats_users"})
ELSEWHERE = {  # PgBouncer's settings that are SET, too, where the console stands for its own
    "admin_users": ("admin", "users"), "stats_users": ("admin", "stats_users"), "auth_type": ("auth", "type"),
    "auth_user": ("auth", "user"), "auth_dbname": ("auth", "dbname"), "verbose": ("log", "level"),
    **{f"{side}_tls_{name}": (f"{side}_tls", name) for side in ("client", "server")
       for name in ("ca_file", "cert_file", "key_file", "sslmode")},
}
TLS_KEYS = frozenset(key for key, (section, _) in ELSEWHERE.items() if section.endswith("_tls"))
IN_FILE = "change it in the fleet's config file, then say RELOAD"


def with_setting(settings: Settings, key: str, text: str) -> Settings:
    """`settings` with this one changed. Raises UsageFault: what cannot be set so, or not to that."""
    if settings.admin.as_pgbouncer and key in ELSEWHERE:
        return _with_section(settings, key, text)
    if key not in _FIELDS:
        near = get_close_matches(key, _FIELDS, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UsageFault(f"{key} cannot be SET{meant}: {IN_FILE}")
    if key in AT_START_ONLY:
        raise UsageFault(f"{key} cannot change while the fleet runs: change it in the fleet's config file, "
                         "then restart the fleet")
    name, field = _FIELDS[key]
    try:
        value = getattr(PoolSettings.model_validate({key: _value(field, text)}), name)
    except ValidationError as fault:
        raise UsageFault(f"{key}: {fault.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    changed = settings.model_copy(update={"pool": settings.pool.model_copy(update={name: value})})
    for line in inert_settings(changed):
        if line.startswith(f"pool.{key} "):
            raise UsageFault(line.removeprefix("pool."))
    return changed


def _with_section(settings: Settings, key: str, text: str) -> Settings:
    """One that has its place outside of `pool`. What is missing for TLS yet is no fault of it."""
    section, name = ELSEWHERE[key]
    old = getattr(settings, section)
    value: Any = text
    if key == "verbose":
        value = "debug" if text.isdecimal() and int(text) > 0 else "info"
    elif key in LISTS:
        value = [each for each in text.replace(",", " ").split() if each]
    try:
        new = type(old).model_validate({name: value} if value or key in LISTS else {})
    except ValidationError as fault:
        raise UsageFault(f"{key}: {fault.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    field = next(each for each, found in type(old).model_fields.items() if (found.alias or each) == name)
    changed = settings.model_copy(update={
        section: old.model_copy(update={field: getattr(new, field)})})
    before = set(faults_across(settings.__dict__))
    for path, why in faults_across(changed.__dict__):
        waits = key in TLS_KEYS and path.partition(".")[0].endswith("_tls")
        if not waits and (path, why) not in before:
            raise UsageFault(f"{path} {why}")
    return changed


def _value(field: FieldInfo, text: str) -> Any:
    """What the config file would have; what does not fit is left for the check to say."""
    if field.annotation is bool:
        return _BOOLEANS.get(text.lower(), text)
    if field.annotation is int and text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    if get_origin(field.annotation) is tuple:
        return [each.strip() for each in text.split(",") if each.strip()]
    return text
