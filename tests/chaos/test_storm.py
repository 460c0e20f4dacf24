"""The short form of the storm: workers killed at random under logins and load, the budget holds."""

from __future__ import annotations

import pytest

from chaos.storm import PERMITS, storm
from pooler.demo.etcd import find_etcd
from pooler.demo.postgres import installations
from tests.support.need import missing

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.etcd]


def test_a_storm_of_logins_under_kills_keeps_the_budget() -> None:
    if not installations() or find_etcd() is None:
        missing("the storm needs a PostgreSQL and an etcd")
    result = storm(seed=1, seconds=12, say=print)
    assert [verdict for verdict in result.verdicts if not verdict.held] == []
    assert result.figures["kills"] >= 2
    assert result.figures["transactions"] > 100 * PERMITS
