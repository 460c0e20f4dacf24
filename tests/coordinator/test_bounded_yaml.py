"""A file of a person is read within limits, and what is wrong with it is said without its escapes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from coordinator.bounded_yaml import BYTES_MAX, LEVELS_MAX, TooMuch, read_yaml, text_within
from coordinator.policy import PolicyRefused, load_policy
from tests.coordinator.parts import policy_text


@pytest.mark.parametrize("text", ["[" * 20_000, "{a: " * 20_000, "- " * 20_000, "[" * 60 + "]" * 60])
def test_what_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(TooMuch, match=f"nested over {LEVELS_MAX} levels"):
        read_yaml(text)


def test_aliases_of_aliases_that_unfold_to_more_than_memory_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    with pytest.raises(TooMuch, match="unfold"):
        read_yaml("\n".join(lines))


def test_a_value_within_itself_is_refused() -> None:
    with pytest.raises(TooMuch, match="unfold"):
        read_yaml("a: &a [*a]")


def test_a_file_that_never_ends_is_not_read_to_its_end() -> None:
    with pytest.raises(TooMuch, match=f"over {BYTES_MAX} bytes"):
        text_within(Path("/dev/zero"))
    with pytest.raises(TooMuch, match=f"over {BYTES_MAX} characters"):
        read_yaml("#" * (BYTES_MAX + 1))


@pytest.mark.parametrize(
    "text", ["a: 2026-99-99", "? [a]\n: b", "a: !!int x", "a: !!python/name:os.system x"])
def test_a_value_that_cannot_be_is_a_fault_of_the_text(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)


@given(text=some.text("[]{}:-&*a! \n\"'<?|>%@,.0", max_size=60))
def test_no_text_raises_anything_but_a_fault_of_yaml(text: str) -> None:
    with suppress(yaml.YAMLError):
        read_yaml(text)


def test_an_ordinary_document_is_read_as_ever() -> None:
    assert read_yaml("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize("more", ['"\\e[2Jx": 1', 'tenants: {"\\e[2Jx": {"\\x07": 1}}',
                                  'tenants: {"\\e[2Jx": 5}',
                                  'poolMode: "\\e[2J"', 'tenants: {"a\\nb": {weight: 0}}'])
def test_no_fault_of_a_policy_has_a_terminals_escapes_in_it(more: str) -> None:
    with pytest.raises(PolicyRefused) as refused:
        load_policy(policy_text() + more)
    assert all(fault.isprintable() for fault in refused.value.faults), refused.value.faults


@pytest.mark.parametrize("text", ["[" * 20_000, "x: " + "[" * 20_000])
def test_a_policy_of_brackets_is_refused_as_any_that_is_not_yaml(text: str) -> None:
    with pytest.raises(PolicyRefused, match=r"it is not YAML: .*nested"):
        load_policy(text)
