"""What a drop-in says of its start is said of the ini, and ends with PgBouncer's exit code."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pooler.dropin.words import of_the_ini
from tests.cli.conftest import Pooler, pooler

__all__ = ["pooler"]  # a fixture

INI = "[databases]\napp = host=127.0.0.1\n[pgbouncer]\nlisten_addr = 127.0.0.1\nunix_socket_dir =\n"


@pytest.mark.parametrize(("ours", "theirs"), [
    ("/tmp/x/pooler.yaml: 1 fault\n  client_tls.key_file: cannot read k",
     "a.ini: 1 fault\n  client_tls_key_file: cannot read k"),
    ("fleet.listen 127.0.0.1:1: already in use", "listen_addr, listen_port 127.0.0.1:1: already in use"),
    ("fleet.listen_backlog: 0 must be more", "listen_backlog: 0 must be more"),
    ("databases.app.pool_mode: no; fleet.listening: no", "databases.app.pool_mode: no; fleet.listening: no"),
])
def test_settings_are_named_as_in_the_ini(ours: str, theirs: str) -> None:
    assert of_the_ini(ours, "a.ini") == theirs


def test_a_fault_names_the_ini_and_its_setting(pooler: Pooler, tmp_path: Path) -> None:
    files = "client_tls_cert_file = /nowhere.crt\nclient_tls_key_file = /nowhere.key\n"
    (tmp_path / "a.ini").write_text(f"{INI}client_tls_sslmode = require\n{files}")
    done = pooler("pgbouncer", "a.ini")
    assert (done.code, "pooler.yaml" in done.err) == (1, False)
    assert "a.ini: " in done.err
    assert "  client_tls_cert_file: cannot read /nowhere.crt: No such file or directory\n" in done.err


def test_a_port_in_use_is_told_by_the_inis_settings(pooler: Pooler, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "a.ini").write_text(f"{INI}listen_port = {port}\n")
        done = pooler("pgbouncer", "a.ini")
    told = f"pooler: listen_addr, listen_port 127.0.0.1:{port}: already in use by another process"
    assert (done.code, told in done.err) == (1, True)


@pytest.mark.parametrize("words", [("-x", "a.ini"), ("a.ini", "b.ini"), ("-u",), ()])
def test_wrong_usage_ends_with_1_as_pgbouncers_does(pooler: Pooler, words: tuple[str, ...]) -> None:
    assert pooler("pgbouncer", *words).code == 1
