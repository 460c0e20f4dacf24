"""The scenario of drains: planned under fifty writers, and of a primary that is stopped."""

from __future__ import annotations

import pytest

from chaos.drain import drain
from pooler.demo.etcd import find_etcd
from pooler.demo.postgres import installations
from tests.support.need import missing

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.etcd]


@pytest.mark.timeout(300)
def test_a_planned_drain_is_not_noticed_and_a_stopped_primary_is_freed_by_proof_only() -> None:
    if not installations() or find_etcd() is None:
        missing("the drains need a PostgreSQL and an etcd")
    result = drain(seed=1, seconds=0, say=print)
    timed = ("gap",)  # judged by `python -m chaos run drain` only: other tests have the processors, too
    assert [each for each in result.verdicts if not each.held and each.name not in timed] == []
    assert result.figures["planned"]["writes_around"] >= 300
