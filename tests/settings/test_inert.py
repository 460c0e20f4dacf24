"""Settings without effect are told, and only those that somebody set."""

from __future__ import annotations

from pathlib import Path

import pytest

from pooler.settings import load, warnings_of
from pooler.settings_inert import INERT
from pooler.settings_models import Settings
from tests.settings.test_load import SOUND, folder, write

__all__ = ["folder"]  # a fixture

SET = {
    "fleet.drain_notice": "1s",
    "pool.server_reset_query_always": "true",
    "pool.pkt_buf": "4096",
    "pool.scaling_fast_retries": "20",
}


def with_settings(values: dict[str, str]) -> str:
    text = SOUND + "pool:\n  default_pool_size: 20\nfailover:\n  drain_timeout: 30s\n"
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        if section == "fleet":
            text = text.replace("fleet: {", f"fleet: {{{name}: {value}, ")
        else:
            head = "  orders:\n" if section == "databases.orders" else f"\n{section}:\n"
            indent = "    " if section == "databases.orders" else "  "
            text = text.replace(head, f"{head}{indent}{name}: {value}\n")
    return text


def named(lines: list[str]) -> set[str]:
    return {line.split()[0] for line in lines if "has no effect in this version yet" in line}


def test_each_setting_without_effect_is_told_once_when_it_is_set(folder: Path) -> None:
    assert {path.replace(".orders.", ".*.") for path in SET} == set(INERT)
    warnings = warnings_of(load(write(folder, with_settings(SET))))
    assert named(warnings) == set(SET)
    assert len(warnings) == len(SET)
    assert all("\n" not in line for line in warnings)


def test_a_default_is_no_reason_for_a_warning(folder: Path) -> None:
    assert warnings_of(load(write(folder, with_settings({"fleet.drain_notice": "3s"})))) == []


@pytest.mark.parametrize("state", ["allow", "warn"])
def test_a_reset_always_does_what_it_says_where_state_is_let_through(folder: Path, state: str) -> None:
    both = {"pool.session_state": state, "pool.server_reset_query_always": "true"}
    assert warnings_of(load(write(folder, with_settings(both)))) == []


@pytest.mark.parametrize("pattern", INERT)
def test_each_name_in_the_table_is_a_setting(pattern: str) -> None:
    section, *_, name = pattern.split(".")
    annotation = str(Settings.model_fields[section].annotation)
    from pooler import settings_models

    model = getattr(settings_models, annotation.rpartition(".")[2].rstrip("]'>"))
    assert name in [field.alias or own for own, field in model.model_fields.items()]
