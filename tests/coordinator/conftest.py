"""The clock of tests without real parts."""

from __future__ import annotations

import pytest
from trio.testing import MockClock


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    """Jumps to the next deadline when nothing else can run. A test runs on it by naming it."""
    return autojump_clock
