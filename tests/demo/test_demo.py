"""`pooler demo` ends well, its figures agree, and each planted fault is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pooler.demo.etcd import find_etcd
from pooler.demo.fleet import http_status, import_path
from pooler.demo.postgres import installations
from tests.repo.sources import ROOT
from tests.support.need import missing

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.etcd]


@pytest.fixture(autouse=True)
def _parts() -> None:
    if not installations() or find_etcd() is None:
        missing("pooler demo needs a PostgreSQL and an etcd")


def run(tmp_path: Path, *options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `pooler demo` with a folder of its own for temporary files."""
    done = subprocess.run(
        [sys.executable, "-m", "pooler.cli.main", "demo", "--seconds", "5", *options], capture_output=True,
        text=True, check=False, timeout=200, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": import_path(), "TMPDIR": str(tmp_path)})
    return done.returncode, done.stdout, done.stderr


def test_the_demonstration_holds_and_its_figures_agree(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "--json")
    said: dict[str, Any] = json.loads(out)
    assert code == 0, (said, err)
    assert said["ok"]
    assert all(check["held"] for check in said["checks"])
    assert said["transactions"] == sum(each["transactions"] for each in said["tenants"].values()) >= 20_000
    assert set(said["tenants"]) == {"shop", "batch"}
    assert said["permits_open"] == said["server_sessions"] <= said["permits"]
    assert said["writes_acknowledged"] >= 300
    moves = " ".join(entry["what"] for entry in said["timeline"])
    assert moves.index("killed with -9") < moves.index("SESSION_UNKNOWN")
    assert "SESSION_RELEASED" in moves


@pytest.mark.parametrize(("fault", "failed"), [
    ("skip-compare", "budget"), ("leak", "leak"), ("lost-ack", "writes"),
])
def test_a_planted_fault_ends_with_1_and_is_named(tmp_path: Path, fault: str, failed: str) -> None:
    code, out, _ = run(tmp_path, "--break", fault, "--json")
    said = json.loads(out)
    assert code == 1
    assert said["fault"] == fault
    assert failed in [check["check"] for check in said["checks"] if not check["held"]]


def test_a_fault_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "--break", "nothing")
    assert (code, out) == (2, "")
    assert "skip-compare, leak, lost-ack" in err
    assert len(err.splitlines()) == 1


def paste(line: str) -> subprocess.CompletedProcess[str]:
    """Run it as from a shell in the checkout, where no environment is active."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("POOLER_", "PG"))}
    places = [place for place in own["PATH"].split(os.pathsep) if place != str(Path(sys.executable).parent)]
    return subprocess.run(
        ["/bin/sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        stdin=subprocess.DEVNULL, env={**own, "PATH": os.pathsep.join(places)})


def test_what_is_kept_answers_to_each_printed_line_and_is_stopped(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "--keep")
    lines = [line.strip() for line in out.partition("ready to paste:")[2].splitlines() if line.strip()]
    try:
        assert code == 0, out
        [show] = [line for line in lines if " ledger show " in line]
        config = show.split()[-1]
        assert "10 slots" in paste(show).stdout
        assert lines.pop().endswith("pooler demo --stop")
        for line in lines:
            if line.startswith("http://"):
                port, _, path = line.removeprefix("http://127.0.0.1:").partition("/")
                assert http_status(int(port), f"/{path}") == 200, line
            else:
                done = paste(line)
                assert done.returncode == 0, (line, done.stderr)
        again = run(tmp_path)
        assert again[0] == 2  # one at a time
        assert "demo --stop" in again[2]
    finally:
        stopped = run(tmp_path, "--stop")
    assert stopped[0] == 0
    assert not Path(config).exists()
    assert "no demonstration" in run(tmp_path, "--stop")[1]
