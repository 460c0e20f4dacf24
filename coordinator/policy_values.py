"""A policy as a flat list of its values, by their paths in the document: to show it, and to hold two side by
side. Pure.

What counts is what a policy means, every default filled in: a comment or a default spelled out is no
difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from coordinator.policy import Policy

NOT_SHOWN = frozenset({"resolved"})
_NAMES = {"classes": "executionClasses", "wait_budget_p99_seconds": "waitBudgetP99"}
_SECONDS = "_seconds"
_UNITS_US = (("d", 86_400_000_000), ("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1000))


@dataclass(frozen=True, slots=True)
class Value:
    """One value: its path, what it is in effect, and whether the document gives it."""

    path: str
    value: object
    given: bool


def values_of(policy: Policy, document: Mapping[str, Any]) -> list[Value]:
    """Every value of a policy in effect, in the document's order of fields; what was worked out when it was
    published has what became of it."""
    effective = dict(_flat(policy, ""))
    effective["failoverPermits"] = policy.failover_slots
    if policy.hard_connection_limit is None:
        effective["hardConnectionLimit"] = policy.resolved.hard_connection_limit
    for name in policy.tenants:
        path = f"tenants.{name}.inflight"
        if effective[path] is None:
            effective[path] = max(each.permits for each in policy.classes.values())
    return [Value(path, value, _is_given(path, document)) for path, value in effective.items()]


def differences(one: Policy, other: Policy) -> list[tuple[str, object, object]]:
    """Where they differ: the path, and the value of either; None: not given, or not there."""
    left, right = dict(_flat(one, "")), dict(_flat(other, ""))
    paths = dict.fromkeys((*left, *right))
    return [(path, left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path)]


def difference_text(one: Policy, other: Policy, other_is: str) -> list[str]:
    """The same, for people: `serverSessionPermits 8 (in force: 4)`."""
    return [f"{path} {word(new)} ({other_is}: {word(old)})" for path, new, old in differences(one, other)]


def word(value: object) -> str:
    """A value for people."""
    return "none" if value is None else str(value)


def duration_text(seconds: float) -> str:
    """`10s`, `100ms`, `5m`: as a document would say it."""
    us = round(seconds * 1_000_000)
    if not us:
        return "0s"
    unit, length = next(((u, n) for u, n in _UNITS_US if us % n == 0), ("us", 1))
    return f"{us // length}{unit}"


def _flat(record: object, path: str) -> Iterator[tuple[str, object]]:
    for each in fields(record):  # type: ignore[arg-type]  # a dataclass: the callers' records all are
        if each.name not in NOT_SHOWN:
            yield from _values(each.name, getattr(record, each.name), path)


def _values(name: str, value: object, path: str) -> Iterator[tuple[str, object]]:
    at = path + _document_name(name)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{at}.{key}.")
    elif is_dataclass(value):
        yield from _flat(value, f"{at}.")
    elif name.endswith(_SECONDS) and isinstance(value, int | float):
        yield at, duration_text(value)
    elif name != "bucket":  # without one there is nothing to say
        yield at, value


def _document_name(name: str) -> str:
    plain = name.removesuffix(_SECONDS)
    return _NAMES.get(name) or re.sub(r"_(\w)", lambda at: at[1].upper(), plain)


def _is_given(path: str, document: Mapping[str, Any]) -> bool:
    """Names of classes and tenants may have dots in them."""
    at: object = document
    rest = path
    while rest:
        if not isinstance(at, Mapping):
            return False
        fitting = [str(key) for key in at if rest == str(key) or rest.startswith(f"{key}.")]
        here = max(fitting, key=len, default=None)
        if here is None:
            return False
        at = next(value for key, value in at.items() if str(key) == here)
        rest = rest[len(here) + 1:]
    return at is not None
