"""SET of the console: one setting of the config's `pool` section, in force until the next reload. Pure."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pooler.errors import UsageFault
from pooler.serve.config_rows import AT_START_ONLY
from pooler.settings import PoolSettings, Settings
from pooler.settings_inert import inert_settings

_BOOLEANS = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False,
             "no": False}
_FIELDS = {field.alias or name: (name, field) for name, field in PoolSettings.model_fields.items()}
IN_FILE = "change it in the fleet's config file, then say RELOAD"


def with_setting(settings: Settings, key: str, text: str) -> Settings:
    """`settings` with this one changed. Raises UsageFault: what cannot be set so, or not to that."""
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


def _value(field: FieldInfo, text: str) -> Any:
    """What the config file would have; what does not fit is left for the check to say."""
    if field.annotation is bool:
        return _BOOLEANS.get(text.lower(), text)
    if field.annotation is int and text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    if get_origin(field.annotation) is tuple:
        return [each.strip() for each in text.split(",") if each.strip()]
    return text
