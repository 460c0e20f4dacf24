"""Where suites come from: a registry, through its ordinary client, into a cache outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pooler.demo.process import PartFailed

PREPARE_SECONDS_MAX = 900


def cache() -> Path:
    """POOLER_SUITES, else ~/.cache/pooler-suites. Nothing of it is ever part of the repository."""
    chosen = os.environ.get("POOLER_SUITES")
    directory = Path(chosen) if chosen else Path.home() / ".cache" / "pooler-suites"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def run(*argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """One program to its end; what it printed. Raises PartFailed with the end of what it said."""
    done = subprocess.run(
        [str(word) for word in argv], cwd=cwd, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, timeout=PREPARE_SECONDS_MAX, env={**os.environ, **(env or {})})
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-2000:]
        raise PartFailed(f"{argv[0]} ended with status {done.returncode}: {said}")
    return done.stdout


def sdist(home: Path, requirement: str) -> Path:
    """The unpacked source distribution from PyPI, fetched once: delete `home` for a newer one."""
    if not (home / "source").exists():
        home.mkdir(parents=True, exist_ok=True)
        name = requirement.partition("=")[0].partition(">")[0].partition("<")[0].strip()
        pip = (sys.executable, "-m", "pip", "download", "--no-deps")
        run(*pip, "--no-binary", name, "-d", home, requirement)
        (archive,) = home.glob("*.tar.gz")
        unpack(archive, home)
    return home / "source"


def unpack(archive: Path, home: Path) -> Path:
    """The one directory of an archive as `home/source`."""
    fresh = home / "unpacking"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    # GNU tar leaves out what would lie elsewhere; Python's filters are not in Debian 12's
    subprocess.run(["tar", "-xf", archive, "-C", fresh, "--no-same-owner"], check=True)
    (top,) = fresh.iterdir()
    top.rename(home / "source")
    fresh.rmdir()
    return home / "source"


def venv(home: Path, requirements: Sequence[str | Path]) -> Path:
    """The Python of an environment that has these, made once. They are words for pip."""
    python = home / "venv" / "bin" / "python"
    if not (home / "venv" / "complete").exists():
        shutil.rmtree(home / "venv", ignore_errors=True)
        run(sys.executable, "-m", "venv", home / "venv")
        run(python, "-m", "pip", "install", "-q", *requirements, cwd=home)
        (home / "venv" / "complete").touch()
    return python


def version(home: Path) -> str:
    """What the source calls itself, from its PKG-INFO."""
    for line in (home / "source" / "PKG-INFO").read_text().splitlines():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return "unknown"
