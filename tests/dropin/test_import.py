"""`pooler config import-pgbouncer`, as anybody types it."""

from __future__ import annotations

import json
from pathlib import Path

from pooler.settings import load
from tests.cli.conftest import Pooler, pooler

__all__ = ["pooler"]  # a fixture

INI = """\
[databases]
app = host=10.0.0.1 user=app password=hunter2
[pgbouncer]
listen_addr = 127.0.0.1
auth_type = md5
auth_file = users.txt
dns_max_ttl = 7
"""


def write(folder: Path, text: str = INI) -> Path:
    (folder / "users.txt").write_text('"app" "hunter2"\n')
    ini = folder / "pgbouncer.ini"
    ini.write_text(text)
    return ini


def test_the_result_passes_the_check_and_what_is_missing_is_told_with_its_line(
    pooler: Pooler, tmp_path: Path
) -> None:
    write(tmp_path)
    done = pooler("config", "import-pgbouncer", "pgbouncer.ini", "-o", "out")
    assert (done.code, "hunter2" in done.out + done.err) == (0, False)
    assert "pgbouncer.ini:7: dns_max_ttl: not carried over: " in done.out
    assert pooler("config", "check", tmp_path / "out" / "pooler.yaml").code == 0
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*.yaml")} == {0o600}


def test_json_has_stable_keys(pooler: Pooler, tmp_path: Path) -> None:
    write(tmp_path)
    answer = json.loads(pooler("config", "import-pgbouncer", "pgbouncer.ini", "-o", "out", "--json").out)
    assert answer.keys() == {"file", "notes", "warnings"}
    assert {"file": "pgbouncer.ini", "line": 7, "about": "dns_max_ttl", "grave": False}.items() <= next(
        note for note in answer["notes"] if note["line"] == 7).items()


def test_every_fault_of_the_ini_is_told_and_nothing_is_written(pooler: Pooler, tmp_path: Path) -> None:
    write(tmp_path, INI + "max_clients = 7\npool_mode = all\n")
    done = pooler("config", "import-pgbouncer", "pgbouncer.ini", "-o", "out")
    assert done.code == 2
    assert done.err.splitlines()[0].startswith("pooler: pgbouncer.ini:8: unknown parameter max_clients")
    assert done.err.splitlines()[1].startswith("pgbouncer.ini:9: pool_mode: ")
    assert not (tmp_path / "out").exists()


def test_no_file_is_overwritten(pooler: Pooler, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "pooler.yaml").write_text("mine")
    done = pooler("config", "import-pgbouncer", "pgbouncer.ini")
    assert (done.code, (tmp_path / "pooler.yaml").read_text()) == (1, "mine")
    assert "pooler.yaml exists already" in done.err


def test_what_must_not_be_ignored_exits_1(pooler: Pooler, tmp_path: Path) -> None:
    write(tmp_path, INI + "auth_type = ldap\n")
    done = pooler("config", "import-pgbouncer", "pgbouncer.ini", "-o", "out")
    assert done.code == 1
    assert "must not be ignored: pgbouncer.ini:8: auth_type: " in done.out


def test_a_mode_is_written_in_octal_and_what_has_no_effect_only_if_the_ini_sets_it(
    pooler: Pooler, tmp_path: Path
) -> None:
    write(tmp_path, INI + "unix_socket_mode = 0770\n")
    pooler("config", "import-pgbouncer", "pgbouncer.ini", "-o", "out")
    file = tmp_path / "out" / "pooler.yaml"
    assert "  unix_socket_mode: 0770\n" in file.read_text()
    assert load(file).fleet.unix_socket_mode == 0o770
    assert "no effect" not in pooler("config", "check", file).err
    write(tmp_path, INI + "pkt_buf = 8192\n")
    pooler("config", "import-pgbouncer", "pgbouncer.ini", "-o", "set")
    assert "pool.pkt_buf has no effect" in pooler("config", "check", tmp_path / "set" / "pooler.yaml").err
