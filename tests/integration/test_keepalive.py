"""The tcp_* settings of a running fleet are those of its sockets, to clients and to servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pooler.demo.etcd import Etcd
from tests.support.fleet import MakeFleet
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

KEEPALIVE = "02"  # what the timer of a socket is for, in /proc/net/tcp (kernel: proc_net_tcp)


def probes() -> Iterator[tuple[int, int, float]]:
    """(own port, the peer's port, seconds until the first probe) of each connection that waits for one."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        ours, theirs = (int(words[column].rpartition(":")[2], 16) for column in (1, 2))
        kind, _, left = words[5].partition(":")
        if kind == KEEPALIVE:
            yield ours, theirs, int(left, 16) / os.sysconf("SC_CLK_TCK")


def test_clients_and_servers_are_probed_as_the_settings_say_before_and_after_a_reload(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    made = make_fleet(postgres_newest, etcd, workers=1, more={"pool": {"tcp_keepidle": "1000s"}})

    def both_after(seconds: int) -> bool:
        found = [(ours, theirs) for ours, theirs, left in probes() if seconds - 100 < left <= seconds]
        return any(ours == made.port for ours, _ in found) and any(
            theirs == postgres_newest.port for _, theirs in found)

    with psycopg.connect(made.dsn(), autocommit=True) as first:
        first.execute("SELECT 1")
        # a socket that waits for an acknowledgement has another timer for a moment
        wait_until(lambda: both_after(1000), "sockets of both sides are probed after 1000 s", 5)
        made.config.write_text(made.config.read_text().replace("1000s", "3000s"))
        assert made.fleet.command("fleet", "reload").returncode == 0
        with psycopg.connect(made.dsn(), autocommit=True) as second:
            first.execute("BEGIN")
            second.execute("SELECT 1")
            wait_until(lambda: both_after(3000), "sockets of both sides are probed after 3000 s", 5)
