"""PostgreSQL's own regression tests, the parallel schedule, from the source package of its version."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pooler.demo.postgres import Server, temporary_directory
from pooler.demo.process import PartFailed, unprivileged
from tests.suites import sources
from tests.suites.debian import Apt, installed
from tests.suites.outcomes import DETAIL_LENGTH_MAX, Outcome, Run, Verdict
from tests.suites.rig import PASSWORD, USER, Target
from tests.suites.run import command

VERSION: Final = 15
DATABASE: Final = "regression"
PROGRAM: Final = Path("/usr/lib/postgresql/15/lib/pgxs/src/test/regress/pg_regress")
LIBRARIES: Final = Path("/usr/lib/postgresql/15/lib")
AT_ONCE: Final = 20  # connections of one group of tests
SECONDS_MAX: Final = 900
_LINE: Final = re.compile(r"^(?:test|    ) (\w[\w.]*) +\.\.\. (ok|FAILED|failed \(ignored\))", re.MULTILINE)
_VERDICTS: Final[dict[str, Verdict]] = {
    "ok": "passed", "FAILED": "failed", "failed (ignored)": "skipped"}  # `random` may fail by chance

_ASKS: Final[Mapping[str, Mapping[str, Any]]] = {"auth": {"user": USER}}  # the server, for its owner's secret

# what pg_regress sets on a database that it makes itself, `timezone` and the like being set by its clients
_SETTINGS: Final = (
    "lc_messages TO 'C'", "lc_monetary TO 'C'", "lc_numeric TO 'C'", "lc_time TO 'C'",
    "bytea_output TO 'hex'", "timezone_abbreviations TO 'Default'")


@dataclass(frozen=True, slots=True)
class PgRegress:
    """All tests of the schedule run each time: one uses what another made."""

    name: str = "pg_regress"
    pooler: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {**_ASKS})
    postgres: Mapping[str, str] = field(default_factory=lambda: {"max_prepared_transactions": "10"})

    def prepare(self, home: Path) -> str:
        shared = home.parent / "pg_regress"
        release = installed(f"postgresql-{VERSION}")
        done = shared / "complete"
        if not done.exists() or done.read_text() != release:
            _build(shared, release)
            done.write_text(release)
        return release

    def set_up(self, server: Server) -> None:
        """Its database, as it would make it, and a password for the owner of the catalog, as whom it runs."""
        server.execute(f"ALTER ROLE postgres PASSWORD '{PASSWORD}'")
        server.execute(f"CREATE DATABASE {DATABASE} TEMPLATE template0")
        for setting in _SETTINGS:
            server.execute(f"ALTER DATABASE {DATABASE} SET {setting}")

    def run(self, home: Path, where: Target, out: Path, only: Sequence[str]) -> Run:
        if where.version != VERSION:
            raise PartFailed(f"these are the tests of PostgreSQL {VERSION}: use --postgres {VERSION}")
        place = temporary_directory("regress")  # the server itself reads and writes files there
        try:
            return _run(home.parent / "pg_regress", where, place, out, only)
        finally:
            shutil.rmtree(place)


def _build(home: Path, release: str) -> None:
    """The tests, and the library of C functions that they use."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    apt = Apt(home)
    description = apt.source(f"postgresql-{VERSION}", release)
    headers = apt.package(f"postgresql-server-dev-{VERSION}", release) / "usr/include/postgresql"
    sources.run("dpkg-source", "--no-check", "-x", description, home / "unpacked")
    (home / "unpacked/src/test/regress").rename(home / "regress")
    shutil.rmtree(home / "unpacked")
    (home / "lib").mkdir()
    sources.run("gcc", "-shared", "-fPIC", "-O2", "-w", f"-I{headers}/{VERSION}/server",
                f"-I{headers}/internal", home / "regress/regress.c", "-o", home / "lib/regress.so")
    for contrib in ("autoinc", "refint"):
        shutil.copy(LIBRARIES / f"{contrib}.so", home / "lib")


def _run(shared: Path, where: Target, place: Path, out: Path, only: Sequence[str]) -> Run:
    account = unprivileged()
    for each in ("regress", "lib"):
        shutil.copytree(shared / each, place / each)
    results = place / "out"
    for directory in (results, results / "sql", results / "expected"):
        directory.mkdir()
    for path in (place, *place.rglob("*")):
        if account is not None:
            os.chown(path, account.uid, account.gid)
    as_whom: list[str] = []
    if account is not None:
        as_whom = ["setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups"]
    log = out / "pg_regress.log"
    command(
        [*as_whom, PROGRAM, "--use-existing", f"--bindir={LIBRARIES.parent / 'bin'}",
         f"--inputdir={place}/regress", f"--outputdir={results}", f"--dlpath={place}/lib",
         f"--host={where.host}", f"--port={where.port}", "--user=postgres", f"--dbname={DATABASE}",
         f"--max-concurrent-tests={AT_ONCE}", f"--schedule={place}/regress/parallel_schedule"],
        log, cwd=results, env={"PGPASSWORD": where.password}, seconds_max=SECONDS_MAX)
    differences = results / "regression.diffs"
    text = differences.read_text(errors="replace") if differences.exists() else ""
    (out / "regression.diffs").write_text(text)
    run = read_run(log.read_text(errors="replace"), text)
    if not run:
        raise PartFailed(f"pg_regress ran no test: {log}")
    return {test: outcome for test, outcome in run.items() if not only or test in only}


def read_run(said: str, differences: str) -> Run:
    """What pg_regress printed, and its regression.diffs."""
    details = dict(_by_test(differences))
    return {test: Outcome(_VERDICTS[verdict], _shortened(details.get(test, "")))
            for test, verdict in _LINE.findall(said)}


def _shortened(difference: str) -> str:
    """Its beginning, and as the last line what was first said otherwise: all behind may follow from it."""
    lines = [line for line in difference.splitlines() if line.startswith(("+", "-"))]
    return f"{difference[:DETAIL_LENGTH_MAX]}\n{''.join(lines[2:3])}" if lines else ""


def _by_test(differences: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^(?=diff )", differences, flags=re.MULTILINE):
        if part:
            yield Path(part.partition("\n")[0]).stem, part


PINNED: Final = PgRegress("pg_regress-pin", {**_ASKS, "pool": {"session_state": "pin", "max_pinned": 60}})
"""Shows which differences are those of state that `clean` undoes."""
ONCE: Final = PgRegress("pg_regress-once", {**_ASKS, "pool": {"server_lifetime": "0"}})
"""No session serves a second client: shows which differences come of that alone."""
