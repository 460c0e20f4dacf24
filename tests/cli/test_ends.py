"""Whatever ends a command becomes a few lines and an exit code, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.main import get_command

from coordinator.link import LinkLost, LinkRefused
from coordinator.store.api import StoreUnavailable
from pooler.cli.ends import end_of, told
from pooler.cli.ledger import states_meant
from pooler.cli.main import app
from pooler.errors import FleetUnreachable, UsageFault
from tests.cli.conftest import Pooler


@pytest.mark.parametrize(
    ("fault", "text", "code"),
    [
        (UsageFault("wrong"), "wrong", 2),
        (FleetUnreachable("nobody"), "nobody", 1),
        (ExceptionGroup("", [ExceptionGroup("", [UsageFault("deep")])]), "deep", 2),
        (ExceptionGroup("", [LinkLost("x"), UsageFault("the cause")]), "the cause", 2),
        (StoreUnavailable("refused"), "etcd does not answer: refused", 1),
        (
            LinkLost("x"),
            "the fleet ended before it answered: what was asked may or may not have been done",
            1,
        ),
        (LinkRefused("busy", "it is busy"), "it is busy", 1),
        (FileNotFoundError(2, "No such file or directory", "/x"), "/x: No such file or directory", 1),
        (ZeroDivisionError("oh"), "internal error: ZeroDivisionError: oh (POOLER_DEBUG=1 shows where)", 1),
    ],
)
def test_every_fault_is_told_in_one_line_with_its_exit_code(fault: Exception, text: str, code: int) -> None:
    assert told(fault) == (text, code)


def test_ctrl_c_ends_with_130() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert end_of(interrupted) == 130


def commands() -> Iterator[tuple[str, ...]]:
    def walk(command: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, (*path, name))

    yield from walk(get_command(app), ())


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_has_help_with_an_example_that_fits_100_columns(
    path: tuple[str, ...], pooler: Pooler
) -> None:
    done = pooler(*path, "--help")
    assert done.code == 0
    assert f"Example: pooler {' '.join(path)}" in done.out
    assert max(len(line) for line in done.out.splitlines()) <= 100


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nope",), "No such command"),
        (("fleet", "status", "--nope"), "No such option"),
        (("ledger", "show"), "Missing argument"),
        (("fleet", "status"), "looked in: -c (not given), POOLER_CONFIG (not set), pooler.yaml, /etc/pooler"),
        (("fleet", "status", "-c", "none.yaml"), "no config file none.yaml"),
        (("ledger", "show", "d", "--etcd", "127.0.0.1:1"), "--etcd and --fleet belong together"),
        (("ledger", "show", "d", "--etcd", "x", "--fleet", "f"), '--etcd: "x" is not an address'),
        (("ledger", "resolve", "d", "--evidence", "x"), "one of PERMIT, --epoch, --backend, --owner, --host"),
        (("ledger", "resolve", "d", "main/1.2"), "--evidence: is required"),
        (("fleet", "restart"), "only a rolling restart"),
        (("fleet", "restart", "--rolling", "--timeout", "soon"), '--timeout: "soon" is not a duration'),
        (("init", "--dsn", "host"), "--dsn: "),
        (("ledger", "show", "d", "--etcd", "127.0.0.1:1", "--fleet", "no name"), "is no fleet's name"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_wrong(
    words: tuple[str, ...], told: str, pooler: Pooler
) -> None:
    done = pooler(*words)
    assert done.code == 2
    assert told in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 2


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom pooler.cli.main import run\nrun(['fleet', 'run', '--help'])\n"
        "heavy = ('trio', 'grpc', 'psycopg', 'structlog', 'yaml', 'pooler.settings')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_fleet_that_does_not_run_is_said_so(pooler: Pooler, config: object) -> None:
    for words in (
        ("fleet", "status"),
        ("fleet", "reload"),
        ("fleet", "stop"),
        ("fleet", "restart", "--rolling"),
    ):
        done = pooler(*words, "-c", str(config))
        assert done.code == 1
        assert done.err.startswith("pooler: no fleet answers at ")
        assert len(done.err.splitlines()) == 1


def test_the_target_of_a_drain_is_read_before_anything_is_reached(pooler: Pooler, config: object) -> None:
    for target in ("nonsense", "host:0", "host:99999"):
        done = pooler("drain", "orders", "--to", target, "-c", str(config))
        assert (done.code, "--to: " in done.err) == (2, True)


def test_an_etcd_that_was_never_started_or_does_not_answer_is_said_so(pooler: Pooler, config: object) -> None:
    never = pooler("ledger", "show", "orders", "-c", str(config))
    assert (never.code, "was never started" in never.err) == (1, True)
    silent = pooler("ledger", "show", "orders", "--etcd", "127.0.0.1:1", "--fleet", "f")
    assert silent.code == 1
    assert "127.0.0.1:1" in silent.err or "etcd" in silent.err
    assert len(silent.err.splitlines()) == 1


NOWHERE = ("--etcd", "127.0.0.1:1", "--fleet", "none")  # nobody is asked before the words are understood


@pytest.mark.parametrize(("words", "says"), [
    (("explain", "orders", "BOGUS"),
     'PERMIT: "BOGUS" is no permit: write it as ledger show does, KIND/SLOT.GENERATION (main/17.4711), where '
     "KIND is one of main, reserve, admin, replication"),
    (("resolve", "orders", "main/17", "--evidence", "x"), 'PERMIT: "main/17" is no permit: '),
    (("show", "orders", "--state", "BOGUS"),
     '--state: "BOGUS" is no state: one of SESSION_RESERVED, CONNECTING, CLOSING, SESSION_UNKNOWN, OPEN, '),
    (("show", "orders", "--state", "SESSION_UNKNWON"), "did you mean SESSION_UNKNOWN?"),
])
def test_a_word_that_names_nothing_is_told_in_one_line_with_the_known_ones(
    words: tuple[str, ...], says: str, pooler: Pooler
) -> None:
    done = pooler("ledger", *words, *NOWHERE)
    assert (done.code, done.out, says in done.err) == (2, "", True), done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(("wanted", "states"), [
    ("unknown", ["SESSION_UNKNOWN"]), ("SESSION_UNKNOWN", ["SESSION_UNKNOWN"]), ("open_idle", ["OPEN_IDLE"]),
    ("open", ["OPEN", "OPEN_BUSY", "OPEN_IDLE"]), ("reserved", ["SESSION_RESERVED"]),
    ("connecting", ["CONNECTING"]), ("busy", ["OPEN_BUSY"]),
])
def test_a_state_may_be_named_as_the_sum_line_does(wanted: str, states: list[str]) -> None:
    assert sorted(states_meant(wanted)) == states


def test_the_help_of_a_rolling_restart_tells_what_clients_that_stay_will_see(pooler: Pooler) -> None:
    said = " ".join(pooler("fleet", "restart", "--help").out.split())
    assert "57P01" in said
