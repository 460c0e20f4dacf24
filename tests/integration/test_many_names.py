"""Clients that choose names freely leave nothing behind in a worker."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from pooler.demo.client import RawClient
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import http_get
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

USERS = int(os.environ.get("POOLER_USERS", "200"))  # the field report had 20,000
AT_ONCE = 4
GROWTH_MAX = 16 << 20
PERMITS, WARM = 6, 50
ANYBODY = {"type": "trust", "file": None}


def named_pools(fleet: RunningFleet, name: str) -> list[str]:
    """Lines of the metrics about users whose names begin so."""
    _, page = http_get(fleet.fleet.ports.worker_http, "/metrics", 10)
    return [line for line in page.splitlines() if f'user="{name}' in line]


def rss(pid: int) -> int:
    """Bytes, without what is shared with other processes."""
    resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def test_the_pools_of_users_that_no_list_names_are_forgotten(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=2, workers=1, more={
        "auth": ANYBODY,
        "pool": {"server_login_retry": "1s", "autodb_idle_timeout": "1s", "client_login_timeout": "2s",
                 "server_idle_timeout": "1s"}})
    for number in range(20):
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(fleet.dsn(user=f"nobody-{number}"))
    assert named_pools(fleet, "nobody-")
    wait_until(lambda: not named_pools(fleet, "nobody-"), "the pools are forgotten", 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_users_that_came_once_leave_neither_memory_nor_metrics(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """R73."""
    name, base = f"once_{secrets.token_hex(3)}", postgres_newest
    base.server.execute(
        f"do $$ begin for n in 1..{USERS} loop "
        f"execute format('create role %I login in role trusted', '{name}_' || n); end loop; end $$")
    fleet = make_fleet(base, etcd, permits=PERMITS, workers=1, more={
        "auth": ANYBODY, "pool": {
            "autodb_idle_timeout": "2s", "server_idle_timeout": "1s", "client_login_timeout": "5s"}})
    worker = fleet.fleet.worker_pids()[0]

    def come(number: int) -> None:
        with RawClient("127.0.0.1", fleet.port, 120) as client:
            client.login(f"{name}_{number}", "", base.dbname)
            assert client.query("select current_user") == [[f"{name}_{number}"]]

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(come, range(1, WARM + 1)))
        before = rss(worker)
        list(threads.map(come, range(WARM + 1, USERS + 1)))
    assert named_pools(fleet, name)
    wait_until(lambda: not named_pools(fleet, name), "the pools are forgotten", 60)
    print(f"{USERS} users, grown by {(rss(worker) - before) >> 10} KiB")  # noqa: T201
    assert rss(worker) < before + GROWTH_MAX
