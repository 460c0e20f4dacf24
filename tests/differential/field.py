"""What the tests of field reports share."""

from __future__ import annotations

from contextlib import suppress

from pooler.demo.client import (
    Disconnected,
    Message,
    RawClient,
)
from tests.support.fleet import RunningFleet
from tests.support.wait import wait_until


def heard_until_end(client: RawClient) -> list[Message]:
    """Everything, to the end of the connection."""
    heard = []
    with suppress(Disconnected, ConnectionResetError):
        while True:
            heard.append(client.receive())
    return heard


# ---- through relays: one fleet, whose server leg goes through one


def login(fleet: RunningFleet, port: int | None = None) -> RawClient:
    base = fleet.database
    return RawClient("127.0.0.1", port or fleet.port, 15).login(base.user, base.password, base.dbname)


def fresh_session(fleet: RunningFleet) -> None:
    """The next client gets a session that logs in then."""
    base = fleet.database
    with RawClient(str(base.server.directory), base.port, 15).login("postgres", "", base.dbname) as owner:
        ours = f"from pg_stat_activity where usename = '{base.user}'"
        owner.query(f"select pg_terminate_backend(pid) {ours}")
        wait_until(lambda: owner.query(f"select count(*) {ours}") == [["0"]], "they are gone", 10)
