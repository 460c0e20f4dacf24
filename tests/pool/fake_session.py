"""A server session as the core of a pool needs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class FakeSession:
    epoch: int = 0
    generation: int = 0
    expires_at: float = float("inf")
    idle_since: float = 0.0
    promised: bool = False
