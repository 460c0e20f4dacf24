"""A `pooler` command as anybody types it, and a sound config to give it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.supervisor.conftest import small_fleet

__all__ = ["small_fleet"]  # a fixture

SOURCES = Path(__file__).parents[2]
POLICY = """\
schema: dbAdmissionPolicy.v1
database: orders-primary/write
generation: 1
serverSessionPermits: 10
adminReserve: 2
executionClasses:
  interactive: {permits: 10, maxQueue: 100}
fairness: weighted-deficit-v2
"""
CONFIG = """\
fleet: {name: orders, workers: 2, listen: "127.0.0.1:6432", run_dir: run, proxy_protocol_from: [127.0.0.1]}
services:
  primary: {worker_ports: 6440, database_role: write, pool_mode: transaction}
  replica: {worker_ports: 6460, database_role: read}
  default: {worker_ports: 6480, database_role: write, pool_mode: session}
  offline: {worker_ports: 6500, database_role: offline}
etcd: embedded
databases:
  orders:
    hosts: ["10.0.0.11:5432"]
    policy: policy.yaml
    monitor: {user: watcher, password: secret}
auth: {type: trust}
"""


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Pooler = Callable[..., Done]


@pytest.fixture
def pooler(tmp_path: Path) -> Pooler:
    """pooler("config", "check", …, stdin="") → how it ended; in an empty folder, without POOLER_CONFIG."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POOLER_")}

    def run(*words: str | Path, stdin: str = "", cwd: Path = tmp_path) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "pooler.cli.main", *map(str, words)],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            timeout=60,
            env={**environment, "PYTHONPATH": str(SOURCES), "COLUMNS": "100"},
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A sound config with all four services."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    file = tmp_path / "pooler.yaml"
    file.write_text(CONFIG)
    return file
