"""Which of our settings there are, and a value of PgBouncer's as they take it. Pure.

Looked up in the settings' own models, so that a setting which gains a counterpart is carried over without a
word here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pooler.dropin.values import Value
from pooler.settings import Settings


def field_at(path: str, root: type[BaseModel] = Settings) -> FieldInfo | None:
    """The field at `section.key` of pooler.yaml (`section.*.key` where the section has names), None if our
    settings have none there."""
    head, _, rest = path.partition(".")
    found = field_of(root, head)
    rest = rest.removeprefix("*").removeprefix(".")
    if found is None or not rest:
        return found
    model = next(_models(found.annotation), None)
    return None if model is None else field_at(rest, model)


def field_of(model: type[BaseModel], key: str) -> FieldInfo | None:
    """The field of a model by its name in YAML."""
    for name, field in model.model_fields.items():
        if (field.alias or name) == key:
            return field
    return None


def as_field(field: FieldInfo, value: Value) -> tuple[Any, str]:
    """(what to write into YAML, why it is not the value itself or empty)."""
    kinds = set(_flat(field.annotation))
    if isinstance(value, float):
        fits = _within(field, value)
        return _seconds(fits), "" if fits == value else f"{value:g} becomes {fits:g}, the nearest allowed"
    if isinstance(value, tuple):
        return list(value), ""
    if isinstance(value, bool):
        return (value if bool in kinds else int(value)), ""
    if isinstance(value, int):
        if float in kinds and int not in kinds:
            return as_field(field, float(max(0, value)))
        fits = _within(field, value)
        return fits, "" if fits == value else f"{value} becomes {fits}, the nearest allowed"
    return value, ""


def allowed_words(field: FieldInfo) -> tuple[str, ...]:
    """The words of a field that takes one of several; none for any other."""
    return tuple(word for kind in _literals(field.annotation) for word in get_args(kind))


def _seconds(value: float) -> str:
    text = f"{value:.6f}"
    return text.rstrip("0").rstrip(".") + "s"


_Number = TypeVar("_Number", int, float)


def _within(field: FieldInfo, value: _Number) -> _Number:
    limits: list[Any] = list(field.metadata)
    for limit in field.metadata:
        limits += getattr(limit, "metadata", ())
    for each in limits:
        value = max(value, getattr(each, "ge", value))
        value = min(value, getattr(each, "le", value))
    return value


def _flat(kind: Any) -> Iterator[Any]:
    inner = get_args(kind)
    if get_origin(kind) is Literal or not inner:
        yield kind
    for each in inner:
        yield from _flat(each) if get_origin(kind) is not Literal else ()


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    for each in _flat(kind):
        if isinstance(each, type) and issubclass(each, BaseModel):
            yield each


def _literals(kind: Any) -> Iterator[Any]:
    for each in _flat(kind):
        if get_origin(each) is Literal:
            yield each
