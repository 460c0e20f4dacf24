"""What is printed to be pasted names a command that the shell finds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pooler.typed import pooler_command, psql_command, short_path


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present directory, with an environment in `.venv` that is not on PATH."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    script = tmp_path / ".venv/bin/pooler"
    script.write_text("#!/bin/sh\necho ours\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path


def said(command: str) -> str:
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True).stdout


def test_off_the_path_it_is_named_by_where_it_is(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pooler_command() == ".venv/bin/pooler"
    assert said(pooler_command()) == "ours\n"
    (environment / "elsewhere").mkdir()
    monkeypatch.chdir(environment / "elsewhere")
    assert pooler_command() == str(environment / ".venv/bin/pooler")
    assert said(pooler_command()) == "ours\n"


def test_on_the_path_it_is_its_name_unless_another_comes_first(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{environment / '.venv/bin'}:/usr/bin:/bin")
    assert pooler_command() == "pooler"
    other = environment / "other"
    other.mkdir()
    (other / "pooler").write_text("#!/bin/sh\necho another\n")
    (other / "pooler").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:{environment / '.venv/bin'}:/usr/bin:/bin")
    assert said(pooler_command()) == "ours\n"


def test_where_the_command_is_not_installed_the_module_is_run(environment: Path) -> None:
    (environment / ".venv/bin/pooler").unlink()
    assert pooler_command() == f"{environment}/.venv/bin/python -m pooler.cli.main"


def test_a_path_is_short_only_below_the_present_directory(environment: Path) -> None:
    assert short_path(environment / "a/b") == "a/b"
    assert short_path(environment.parent / "c") == str(environment.parent / "c")


def test_psql_is_named_by_its_place_where_the_shell_finds_none(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(environment))
    assert psql_command(Path("/opt/my pg/psql")) == "'/opt/my pg/psql'"
    (environment / "psql").write_text("#!/bin/sh\n")
    (environment / "psql").chmod(0o755)
    assert psql_command(Path("/opt/my pg/psql")) == "psql"
