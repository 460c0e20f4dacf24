"""A policy that is refused at the first start is no secret of one log line."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.http import not_ready
from coordinator.store.memory import MemoryStore
from tests.coordinator.parts import policy_text
from tests.coordinator.stage import DB
from tests.coordinator.test_founding import Start, database


@pytest.mark.parametrize(("policy", "why"), [
    (None, "no policy file is configured"), (policy_text(db="other/write"), "the file is for 'other/write'")])
async def test_readyz_says_why_there_is_no_policy(tmp_path: Path, policy: str | None, why: str) -> None:
    start = Start(tmp_path, MemoryStore(), database(policy=policy))
    view = await start.run()
    (line,) = not_ready({DB: view}, start.founder.refused)
    assert line.startswith(f"{DB}: no policy yet: ")
    assert why in line


async def test_nothing_is_refused_where_one_was_published(tmp_path: Path) -> None:
    start = Start(tmp_path, MemoryStore(), database())
    view = await start.run()
    assert (start.founder.refused, not_ready({DB: view}, start.founder.refused)) == ({}, [])
