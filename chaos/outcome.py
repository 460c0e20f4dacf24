"""What a scenario says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pooler.demo.judge import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """The checks, and figures for the JSON."""

    verdicts: list[Verdict]
    figures: dict[str, Any] = field(default_factory=dict)
