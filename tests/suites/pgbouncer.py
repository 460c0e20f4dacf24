"""`python -m tests.suites.pgbouncer`: PgBouncer's own tests, with `pooler pgbouncer` in its place.

The sources are Debian's, fetched into the cache outside of the repository; see
docs/migrating-from-pgbouncer.md, "PgBouncer's own tests", for what does not pass and why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from pooler.demo.fleet import import_path
from tests.suites.debian import Apt
from tests.suites.sources import cache, run, unpack

SUITE, VERSION = "trixie", "1.24.1-1+deb13u2"
NEEDS: Final = ("pytest<9", "pytest-asyncio<1", "pytest-timeout", "pytest-xdist", "psycopg[binary]==3.2.3",
                "filelock")
SERVER_PROGRAMS: Final = Path("/usr/lib/postgresql/15/bin")
TEST_SECONDS_MAX: Final = 120

KNOWN: Final[Mapping[str, str]] = {  # test: why it does not pass; each stands in the document
    "test_auth.py::test_hba_leak": "a rule that cannot be read refuses the file",
    "test_prepared.py::test_deallocate_all": "DEALLOCATE ALL as PostgreSQL's",
    "test_prepared.py::test_discard_all": "DISCARD ALL as PostgreSQL's",
    "test_prepared.py::test_evict_statement_cache": "statements are kept in another way",
    "test_prepared.py::test_describe_non_existent_prepared_statement": "an error, as PostgreSQL's",
    "test_prepared.py::test_statement_name_longer_than_pkt_buf": "a fault of the test",
    "test_prepared.py::test_prepared_statement_pipeline_error_delayed_sync": "it fails at PostgreSQL, too",
    "test_auth.py::test_auth_dbname_works_fine": "a console is no server",
    "test_replication.py::test_physical_rep*": "application_name is the permit's",
    "test_replication.py::test_*_rep_unprivileged": "application_name is the permit's",
    "test_replication.py::test_physcal_rep_unprivileged": "application_name is the permit's",
    "test_limits.py::test_max_user_connections": "a session gave way to one that was served by another",
    "test_admin.py::test_socket_id": "a pool's first login has a session of its own",
}
_AS_SERVER: Final = """\
#!/bin/bash
# a server refuses to be root: its folder, and the certificates beside it, are its user's
for word; do [ "$before" = --pgdata ] && folder=$word; before=$word; done
if [ {program} = initdb ] && [ -n "$folder" ]; then
  mkdir -p "$folder"
  beside=$(dirname "$folder")
  chown -R postgres "$folder" "$beside/certs"
  while [ "$beside" != / ]; do chmod a+x "$beside"; beside=$(dirname "$beside"); done
fi
exec setpriv --reuid=postgres --regid=postgres --init-groups {path}/{program} "$@"
"""


def prepare(home: Path) -> Path:
    """Fetched and made once; the folder of the tests."""
    tests = home / "source" / "test"
    if not (home / "complete").exists():
        home.mkdir(parents=True, exist_ok=True)
        Apt(home, (SUITE,)).source("pgbouncer", VERSION)
        (archive,) = home.glob("pgbouncer_*.orig.tar.gz")
        unpack(archive, home)
        run(sys.executable, "-m", "venv", home / "venv")
        run(home / "venv" / "bin" / "pip", "install", "--quiet", *NEEDS)
        (home / "complete").touch()
    _program(home / "source" / "pgbouncer", f'#!/bin/bash\nexport PYTHONPATH={import_path()}\n'
                                            f'exec {sys.executable} -m pooler.cli.main pgbouncer "$@"\n')
    (home / "source" / "config.mak").write_text("tls_support = yes\n")
    settings = home / "source" / "pyproject.toml"
    lines = settings.read_text().splitlines()
    settings.write_text("\n".join(
        f"timeout = {TEST_SECONDS_MAX}" if line.startswith("timeout") else line
        for line in lines if "--showlocals" not in line) + "\n")
    if os.geteuid() == 0:
        (home / "bin").mkdir(exist_ok=True)
        for name in ("initdb", "pg_ctl"):
            _program(home / "bin" / name, _AS_SERVER.format(program=name, path=SERVER_PROGRAMS))
    return tests


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def play(home: Path, tests: Path, words: Sequence[str], *, logs: bool) -> list[str]:
    """The lines of the plugin, one for each test."""
    results = home / "results.txt"
    results.write_text("")
    plugins = Path(__file__).parent / "plugin"
    subprocess.run(
        [home / "venv" / "bin" / "pytest", "-q", "-p", "no:cacheprovider", "-p", "pgbouncer_plugin",
         "--tb=native", f"--basetemp={home / 'run'}", *words],
        cwd=tests, check=False, stdout=(home / "output.txt").open("w"), stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{home / 'bin'}:{SERVER_PROGRAMS}:{os.environ['PATH']}",
             "PYTHONPATH": str(plugins), "RESULTS": str(results), "LOGS": "1" if logs else ""})
    return results.read_text().splitlines()


def main(words: Sequence[str] | None = None) -> int:
    """Exit 1 when a test fails for no known reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites.pgbouncer", description=__doc__)
    parser.add_argument("tests", nargs="*", help="files and names, as pytest takes them; default: all")
    parser.add_argument("--logs", action="store_true", help="the lines of PgBouncer's log are wanted, too")
    asked = parser.parse_args(words)
    home = cache() / "pgbouncer"
    lines = play(home, prepare(home), asked.tests, logs=asked.logs)
    failed = [line for line in lines if line.split()[1] == "failed"]
    unknown = [line for line in failed if not _known(line)]
    passed = sum(line.split()[:2] == ["call", "passed"] for line in lines)
    _say(f"{passed} passed, {len(failed)} failed, {len(unknown)} of them for no known reason; "
         f"output: {home / 'output.txt'}")
    for line in failed:
        _say(f"  {line} {_known(line)}")
    return 1 if unknown else 0


def _known(line: str) -> str:
    test = line.split()[2].removeprefix("test/")
    return next((f"[{why}]" for pattern, why in KNOWN.items() if fnmatchcase(test, pattern)), "")


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  this is its output


if __name__ == "__main__":
    sys.exit(main())
