"""What a client hears through the pooler is what it hears from PostgreSQL itself, in every pool mode."""

from __future__ import annotations

import pytest

from tests.differential.compare import wrong
from tests.differential.conftest import POOLS, Rig
from tests.differential.scripts import BOUND, EVERYWHERE, TWO

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


@pytest.mark.parametrize("pool", POOLS)
def test_every_script_is_answered_as_by_the_server(rig: Rig, pool: str) -> None:
    assert wrong(rig, EVERYWHERE, pool) == {}


def test_what_a_session_keeps_it_keeps_in_session_pooling(rig: Rig) -> None:
    assert wrong(rig, BOUND, "_session") == {}


@pytest.mark.parametrize("pool", POOLS)
def test_two_clients_hear_only_their_own(rig: Rig, pool: str) -> None:
    assert wrong(rig, TWO, pool) == {}
