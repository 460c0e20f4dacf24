"""The unix socket of a fleet whose TCP port is behind a load balancer."""

from __future__ import annotations

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet
from tests.support.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]


def test_listen_proxy_asks_no_header_of_who_comes_by_the_unix_socket(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, start=False)
    folder = fleet.config.parent
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more={
        "fleet": {"listen_proxy": True, "unix_socket_dir": str(folder)}})
    with psycopg.connect(fleet.dsn(host=str(folder))) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    with pytest.raises(psycopg.OperationalError, match="PROXY header"):
        psycopg.connect(fleet.dsn())
