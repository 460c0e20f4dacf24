"""node-postgres: the tests of its driver, pool, cursor and query stream, from Debian's copy of the sources.

The npm packages hold no tests. What is tested is that copy's driver; what it needs besides is npm's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pooler.demo.postgres import Server
from pooler.demo.process import PartFailed
from tests.suites import sources
from tests.suites.debian import Apt
from tests.suites.outcomes import DETAIL_LENGTH_MAX, Outcome, Run, from_junit
from tests.suites.rig import PASSWORD, USER, Target
from tests.suites.run import command

FILE_SECONDS_MAX: Final = 60
MOCHA_SECONDS_MAX: Final = 300
NEEDS: Final = (
    "async@2.6.4", "bluebird@3.7.2", "co@4.6.0", "pg-copy-streams@0.3.0", "lodash@4", "expect.js@0.3.1",
    "mocha@10", "tsx@4", "concat-stream@1.0.1", "JSONStream@1.3.5", "stream-spec@0.3.5")
BY_MOCHA: Final = {"pg-pool": "test/*.js", "pg-cursor": "test/*.js", "pg-query-stream": "test/**/*.ts"}
# what has nothing to do with a server, or wants one that is set up for TLS
LEFT_OUT: Final = frozenset({"integration/connection-pool/tls-tests.js", "integration/client/ssl-tests.js"})


@dataclass(frozen=True, slots=True)
class NodePostgres:
    """Each file of `pg` is a program of its own; the other packages have mocha."""

    name: str = "node-postgres"
    postgres: Mapping[str, str] = field(default_factory=dict)
    pooler: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def prepare(self, home: Path) -> str:
        home = home.parent / "node-postgres"
        if not (home / "complete").exists():
            _fetch(home)
            (home / "complete").touch()
        return str(_package(home, "pg")["version"])

    def set_up(self, server: Server) -> None:
        """It needs nothing more."""

    def run(self, home: Path, where: Target, out: Path, only: Sequence[str]) -> Run:
        home = home.parent / "node-postgres"
        env = {**where.libpq, "PGTESTNOSSL": "true", "USER": USER, "TEST_TIMEOUT": "20000",
               "SCRAM_TEST_PGUSER": USER, "SCRAM_TEST_PGPASSWORD": PASSWORD}
        run: dict[str, Outcome] = {}
        packages = home / "source" / "packages"
        _program(packages / "pg", ["script/create-test-tables.js", where.url], env)
        for file in sorted((packages / "pg" / "test" / "integration").rglob("*-tests.js")):
            name = str(file.relative_to(packages / "pg" / "test"))
            if name not in LEFT_OUT and (not only or any(each.startswith(f"pg/{name}") for each in only)):
                run |= read_file(f"pg/{name}", *_program(packages / "pg", [str(file), where.url], env))
        for package, files in BY_MOCHA.items():
            if not only or any(each.startswith(package) for each in only):
                run |= _mocha(home, packages / package, files, out, env)
        return {test: outcome for test, outcome in run.items() if not only or test in only}


def _fetch(home: Path) -> None:
    """The repository at the newest release that can be had, and what its tests need."""
    home.mkdir(parents=True, exist_ok=True)
    addresses = [each for each in Apt(home, ("sid",)).addresses("node-pg")
                 if re.search(r"/node-postgres_[^/]*\.orig\.tar", each)]
    if not addresses:
        raise PartFailed("no source package of node-postgres")
    archive = Apt(home, ("sid",)).fetch(addresses[0], home / "node-postgres.tar.gz")
    if not (home / "source").exists():
        sources.unpack(archive, home)
    own = [f"{name}@{_package(home, name)['version']}"
           for name in ("pg", "pg-pool", "pg-cursor", "pg-query-stream")]
    (home / "package.json").write_text('{"private": true}\n')
    sources.run("npm", "install", "--no-audit", "--no-fund", *own, *NEEDS, cwd=home)


def _package(home: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "source" / "packages" / name / "package.json").read_text())
    return found


def _program(cwd: Path, words: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Its status (-1: it did not end) and all it said."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    process = subprocess.Popen(["node", *words], cwd=cwd, env={**inherited, **env}, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        said, _ = process.communicate(timeout=FILE_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        return -1, said + f"\nnot ended within {FILE_SECONDS_MAX} s"
    return process.returncode, said


_TEST: Final = re.compile(r"^ {2}(\S.*?) (✔|\? - SKIPPED|FAILED!)", re.MULTILINE)


def read_file(name: str, status: int, said: str) -> Run:
    """One file's tests as it named them, and the file itself: it ends at its first failure."""
    run = {}
    for test, verdict in _TEST.findall(said):
        if verdict == "✔":
            run[f"{name}::{test}"] = Outcome("passed")
        elif verdict != "FAILED!":
            run[f"{name}::{test}"] = Outcome("skipped")
    run[name] = Outcome("passed") if status == 0 else Outcome("failed", said[-DETAIL_LENGTH_MAX:])
    return run


def _mocha(home: Path, package: Path, files: str, out: Path, env: Mapping[str, str]) -> Run:
    report = out / f"{package.name}.xml"
    report.unlink(missing_ok=True)
    with suppress(PartFailed):  # it hung: what it wrote, if anything, counts
        command(
            ["node", home / "node_modules/mocha/bin/mocha.js", "--require", "tsx/cjs", "--exit", "--timeout",
             "20000", "--reporter", "xunit", "--reporter-option", f"output={report}", files],
            out / f"{package.name}.log", cwd=package, env=env, seconds_max=MOCHA_SECONDS_MAX)
    if not report.exists():
        return {package.name: Outcome("failed", f"no report: {out / package.name}.log")}
    return dict(_named(package.name, from_junit(report.read_text())))


def _named(package: str, run: Run) -> Iterator[tuple[str, Outcome]]:
    for test, outcome in run.items():
        yield f"{package}/{test}", outcome


PINNED: Final = NodePostgres("node-postgres-pin", {}, {"pool": {"session_state": "pin", "max_pinned": 60}})
"""Shows which differences are those of state that `clean` undoes."""
