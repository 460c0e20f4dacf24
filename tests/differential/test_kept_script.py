"""A script that test_generated kept, made short: for who looks for what is wrong. See there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.differential import players
from tests.differential.conftest import Rig
from tests.differential.script import Write, kinds
from tests.differential.shorten import shortened
from tests.differential.test_generated import Compared

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


@pytest.mark.timeout(3600)
def test_a_kept_script_is_heard_as_straight_from_the_server(
    newest: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(players, "WAIT_SECONDS", 1.5)
    script = json.loads(Path(os.environ["POOLER_DIFFERENTIAL_SCRIPT"]).read_text())
    compared = Compared(newest, script["pool"])
    why = ""

    def fails(steps: list[Write]) -> bool:
        nonlocal why
        try:
            compared.compare(steps, script["cut_seed"])
        except AssertionError as fault:
            said = str(fault).partition("\nassert ")[0]
            if not why or _kind(said) == _kind(why):
                why = said
                return True
        return False

    steps = [Write(bytes.fromhex(data), client) for data, client in script["steps"]]
    failed = fails(steps)
    if failed:
        steps = shortened(steps, fails)
    compared.close()
    if failed:
        lines = [f"{client} {kinds(data).decode()} {data!r}" for data, client in steps]
        pytest.fail("\n".join([*lines, why]))


def _kind(why: str) -> str:
    """What a shorter script must fail with too."""
    return re.sub(r"\d", "", why)[:100]
