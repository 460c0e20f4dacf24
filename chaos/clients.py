"""The load of a scenario: token writers and readers in a process of their own, and what they were told."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from signal import SIGTERM
from typing import Any

from chaos.world import DBNAME
from pooler.demo.fleet import import_path
from pooler.demo.judge import Writes
from pooler.demo.load import Group, LoadSpec
from pooler.demo.process import Child

LAST_ANSWERS_SECONDS = 40.0


@dataclass(frozen=True)
class Told:
    """What the clients were told; times are seconds since 1970."""

    started: float
    ended: float
    tenants: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def acknowledged(self) -> dict[str, float]:
        return {token: at for each in self.tenants for token, at in each["acknowledged"]}

    @property
    def errors(self) -> dict[str, int]:
        return dict(sum((Counter(each["errors"]) for each in self.tenants), Counter()))

    def total(self, name: str) -> int:
        """Of `done`, `unknown`, `disconnects`."""
        return sum(int(each[name]) for each in self.tenants)

    def longest_gap_seconds(self) -> float:
        """Between two acknowledged writes, whoever made them."""
        times = sorted(self.acknowledged.values())
        return round(max((b - a for a, b in pairwise(times)), default=0.0), 3)

    def writes(self, found: dict[str, int]) -> Writes:
        """Beside the tokens that are there."""
        return Writes(
            self.acknowledged, self._tokens("unknown_tokens"), self._tokens("refused_tokens"), found)

    def _tokens(self, name: str) -> frozenset[str]:
        return frozenset(token for each in self.tenants for token in each[name])


class Clients:
    """A running load. Its files are `directory/name.*`."""

    def __init__(self, directory: Path, port: int, groups: tuple[Group, ...], name: str = "load") -> None:
        base = directory / name
        self._result, self._progress = base.with_suffix(".result"), base.with_suffix(".progress")
        spec = LoadSpec("127.0.0.1", port, DBNAME, groups, str(self._result), str(self._progress))
        spec.save(base.with_suffix(".json"))
        self.child = Child([sys.executable, "-m", "pooler.demo.load", base.with_suffix(".json")],
                           base.with_suffix(".log"), env={"PYTHONPATH": import_path()})

    def writes(self) -> int:
        """How many were acknowledged so far."""
        try:
            return int(json.loads(self._progress.read_text())["writes"])
        except FileNotFoundError:
            return 0

    def stop(self) -> None:
        """No new question; the last answers are waited for."""
        self.child.stop(SIGTERM, LAST_ANSWERS_SECONDS)

    def told(self) -> Told:
        """After `stop`."""
        said = json.loads(self._result.read_text())
        return Told(said["started"], said["ended"], list(said["tenants"].values()))
