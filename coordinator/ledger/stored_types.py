"""Whether what was stored is of the types that a record declares, and those types made of it. Pure.

A stored value is msgpack: enumerations are texts there, tuples are lists, and a record within a record is a
map. Each record's fields are its annotations; nothing else says what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

AS_STORED = frozenset({int, str, bool, bytes})  # exactly these: True is no number here

Convert = Callable[[Any], Any]
Shape = Mapping[str, tuple[type | None, Convert]]


class WrongType(ValueError):
    """A value is not what its field declares."""


def shape_of(record: type, leave_out: frozenset[str] = frozenset()) -> Shape:
    """By field: the type that needs no conversion (None: there is no such), and the conversion.

    Raises TypeError for an annotation that nothing stored can be: our bug.
    """
    hints = get_type_hints(record)
    kept = {each.name: hints[each.name] for each in fields(record) if each.name not in leave_out}
    return {name: (hint if hint in AS_STORED else None, _reader(hint)) for name, hint in kept.items()}


def read_fields(shape: Shape, stored: Mapping[Any, Any]) -> dict[str, Any]:
    """The fields of `stored` that are in `shape`, each of its declared type. Raises WrongType naming one."""
    found = {}
    for name, (plain, convert) in shape.items():
        if name in stored:
            value = stored[name]
            if type(value) is not plain:
                try:
                    value = convert(value)
                except ValueError as fault:
                    raise WrongType(f"{name}: {fault}") from None
            found[name] = value
    return found


def _reader(hint: Any) -> Convert:
    if hint is Any:
        return lambda value: value
    if hint in AS_STORED:
        return lambda value: _only(value, hint)
    if hint is float:
        return lambda value: float(_only(value, int, float))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value: hint(_only(value, str))
    if is_dataclass(hint):
        return _within(hint)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _one_of(get_args(hint))
    if origin is tuple:
        return _tuple(get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _map(*map(_reader, get_args(hint)))
    raise TypeError(f"{hint} is nothing that can be stored")


def _only(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise WrongType(f"{type(value).__name__} where {types[-1].__name__} is to be")
    return value


def _one_of(hints: tuple[Any, ...]) -> Convert:
    (some,) = [each for each in hints if each is not NoneType]
    read = _reader(some)
    return lambda value: None if value is None else read(value)


def _tuple(hints: tuple[Any, ...]) -> Convert:
    readers = [_reader(each) for each in hints if each is not Ellipsis]
    is_open = hints[-1] is Ellipsis

    def read(value: Any) -> tuple[Any, ...]:
        _only(value, tuple, list)
        if is_open:
            return tuple(map(readers[0], value))
        if len(value) != len(readers):
            raise WrongType(f"{len(value)} values where {len(readers)} are to be")
        return tuple(convert(each) for convert, each in zip(readers, value, strict=True))
    return read


def _map(key: Convert, of: Convert) -> Convert:
    return lambda value: {key(name): of(each) for name, each in _only(value, dict).items()}


def _within(record: Any) -> Convert:
    """A record within a record: what it does not know is dropped, for it is always written whole."""
    shape = shape_of(record)

    def read(value: Any) -> Any:
        try:
            return record(**read_fields(shape, _only(value, dict)))
        except TypeError as fault:
            raise WrongType(str(fault)) from None
    return read
