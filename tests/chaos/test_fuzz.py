"""The short form of the fuzz: hostile bytes end their sender alone."""

from __future__ import annotations

import pytest

from chaos.fuzz import fuzz
from chaos.fuzz_client import made
from pooler.demo.etcd import find_etcd
from pooler.demo.postgres import installations
from tests.support.need import missing


def test_an_input_is_made_again_from_its_number() -> None:
    assert [made(3, n) for n in range(50)] == [made(3, n) for n in range(50)]
    assert made(3, 7) != made(4, 7)


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.etcd
def test_hostile_bytes_end_their_sender_alone() -> None:
    if not installations() or find_etcd() is None:
        missing("the fuzz needs a PostgreSQL and an etcd")
    outcome = fuzz(seed=1, seconds=10, say=print)
    assert [verdict for verdict in outcome.verdicts if not verdict.held] == []
