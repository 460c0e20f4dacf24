"""The page about limits names settings that exist, with the places where they may stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from pooler.settings_models import DatabaseSettings, PoolSettings, UserSettings

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


def keys(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def rows() -> Iterator[tuple[list[str], str]]:
    """Names in the first column, and the last one."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield re.findall(r"`(\w+)`", cells[0]), cells[-1]


@pytest.mark.parametrize(("names", "places"), [*rows()])
def test_each_row_is_of_settings_that_are_there(names: list[str], places: str) -> None:
    known = keys(PoolSettings) | keys(DatabaseSettings) | keys(UserSettings)
    assert names
    assert set(names) <= known
    own = set(names) & (keys(DatabaseSettings) | keys(UserSettings))
    assert bool(own) is bool(places)
    assert ("db" in places) is bool(set(names) & keys(DatabaseSettings))
    assert ("user" in places) is bool(set(names) & keys(UserSettings))
