"""The relay's tests run over plain sockets and over TLS: it must not notice the difference."""

from __future__ import annotations

import pytest

from tests.relay import world


@pytest.fixture(autouse=True, params=["plain", "tls"])
def wires(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the worlds of a test are joined."""
    name = str(request.param)
    monkeypatch.setattr(world, "joined", {"plain": world.in_clear, "tls": world.in_tls}[name])
    return name
