"""Settings that are read and checked, and so far change nothing: whoever sets one is told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pydantic import BaseModel

from pooler.settings_models import Settings

# path (* stands for any name): with which settings it does what it says all the same; None: with none
INERT: Mapping[str, Callable[[Settings], bool] | None] = {
    "fleet.drain_notice": None,
    "pool.server_reset_query_always": lambda settings: settings.pool.session_state in ("allow", "warn"),
    "pool.pkt_buf": None,
    "pool.scaling_fast_retries": None,
}


def inert_settings(settings: Settings) -> list[str]:
    """One line for each setting whose value differs from the default and has no effect."""
    return [
        f"{path} has no effect in this version yet"
        for pattern, works in INERT.items() if works is None or not works(settings)
        for path, value, default in _found(settings, pattern.split("."), "") if value != default
    ]


def _found(holder: object, steps: list[str], path: str) -> Iterator[tuple[str, object, object]]:
    """(path, value, default) of each setting that the steps lead to."""
    step, rest = steps[0], steps[1:]
    if isinstance(holder, Mapping):
        for name, entry in holder.items():
            yield from _found(entry, rest, f"{path}{name}.")
    elif isinstance(holder, BaseModel):
        fields = type(holder).model_fields
        name, field = next((name, field) for name, field in fields.items() if (field.alias or name) == step)
        value = getattr(holder, name)
        if rest:
            yield from _found(value, rest, f"{path}{step}.")
        else:
            yield f"{path}{step}", value, field.get_default(call_default_factory=True)
