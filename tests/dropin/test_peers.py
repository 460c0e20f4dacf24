"""Several drop-ins on one port: who is asked for a cancel passes it on to whom the client is with."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from pooler.demo.process import free_ports
from tests.dropin.rig import OURS, Played, settled
from tests.support.postgres import Database
from tests.support.wait import wait_until


def test_a_cancel_request_reaches_its_client_whichever_process_gets_it(server: Database) -> None:
    with ExitStack() as made:
        folders = [Path(tempfile.mkdtemp(prefix="dropin-")) for _ in range(2)]
        port, played = free_ports(), []
        for at, folder in enumerate(folders):
            made.callback(settled, folder)
            each = Played(
                OURS, folder, port=port, users={server.user: server.password},
                databases=f"app = host=127.0.0.1 port={server.port} dbname={server.dbname}",
                settings={"so_reuseport": "1", "peer_id": str(at + 1)},
                more=f"[peers]\n{2 - at} = host={folders[1 - at]} port={port}")
            made.callback(each.stop)
            each.write()
            each.launch()
            played.append(each)
        for each in played:
            each.wait_ready()
        assert [each.console("show peers").stdout for each in played] == [
            f"2|{folders[1]}|{port}|\n", f"1|{folders[0]}|{port}|\n"]
        # a request goes to either process, as the kernel likes: of ten some go to the other one
        with psycopg.connect(host="127.0.0.1", port=port, user=server.user, dbname="app",
                             autocommit=True) as client:
            for _ in range(10):
                client.pgconn.send_query(b"select pg_sleep(60)")

                def runs() -> bool:
                    return any(row.split("|")[4] == "active" for each in played for row in
                               each.console("show servers").stdout.splitlines())

                wait_until(runs, "the query runs", 20)
                client.cancel_safe(timeout=20)
                result = client.pgconn.get_result()
                assert result is not None
                assert result.error_field(psycopg.pq.DiagnosticField.SQLSTATE) == b"57014"
                while client.pgconn.get_result() is not None:
                    pass


def test_a_port_that_is_not_shared_is_one_process_alone(server: Database) -> None:
    from tests.dropin.conftest import playing

    with playing(server) as play:
        first = play()
        second = play(run=False)
        second.port = first.port
        second.write(unix_socket_dir=str(second.folder))
        ended = second.run("-q")
        assert ended.returncode
        assert "already in use" in ended.stderr + second.log


pytestmark = pytest.mark.timeout(180)
