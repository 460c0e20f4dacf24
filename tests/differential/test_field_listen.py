"""Faults that were reported about poolers: notifications with session pooling, and readers who wait."""

from __future__ import annotations

import secrets

import pytest

from pooler.demo.client import Message, RawClient, query
from tests.differential.conftest import Rig

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]

NOTIFIED = 100


def heard(client: RawClient, count: int) -> list[Message]:
    """So many messages, none of them asked for; within a second each."""
    client.socket.settimeout(1)
    try:
        return [client.receive() for _ in range(count)]
    finally:
        client.socket.settimeout(20)


def payloads(said: list[Message]) -> list[str]:
    """Of the notifications among them."""
    return [each.body[4:].split(b"\0")[1].decode() for each in said if each.type == "A"]


def test_a_listener_of_session_pooling_hears_everything_at_once_and_never_inside_an_answer(rig: Rig) -> None:
    """R45. While it is idle, while its query runs, and what it says itself."""
    channel = f"ch_{secrets.token_hex(3)}"
    with rig.pooled("_session") as client, rig.straight() as other, rig.straight() as direct:
        for each in (client, direct):
            each.query(f"listen {channel}")
        for number in range(NOTIFIED):
            other.query(f"notify {channel}, '{number}'")
        wanted = [str(number) for number in range(NOTIFIED)]
        assert payloads(heard(client, NOTIFIED)) == wanted
        assert payloads(heard(direct, NOTIFIED)) == wanted
        for each in (client, direct):
            each.send(query("select n, pg_sleep(0.02) from generate_series(1, 20) n"))
        for number in range(10):
            other.query(f"notify {channel}, 'busy {number}'")
        transcripts = []
        for each in (client, direct):
            said = each.until_ready()
            late = 10 - len(payloads(said))
            transcripts.append([one.type for one in said if one.type != "A"])
            assert payloads(said + heard(each, late)) == [f"busy {number}" for number in range(10)]
        assert transcripts[0] == transcripts[1] == ["T", *"D" * 20, "C", "Z"]
        client.send(query(f"notify {channel}, 'own'"))
        assert [one.type for one in client.until_ready()] == ["C", "A", "Z"]
        assert payloads(heard(direct, 1)) == ["own"]


def test_what_nobody_asked_for_is_no_query_of_a_client(rig: Rig) -> None:
    """R45."""
    name = rig.database.dbname + "_session"
    with (RawClient("127.0.0.1", rig.fleet.ports.listen).login("admin", "console", "pooler") as console,
          rig.pooled("_session") as client, rig.straight() as other):

        def counted() -> tuple[str | None, str | None]:
            names, rows = console.table("show stats")
            row = next(row for row in rows if row[names.index("database")] == name)
            return row[names.index("total_query_count")], row[names.index("total_xact_count")]

        client.query("listen counted")
        before = counted()
        for _ in range(20):
            other.query("notify counted")
        heard(client, 20)
        assert counted() == before


def test_a_client_that_does_not_read_costs_bounded_memory_and_gets_everything(rig: Rig) -> None:
    """R42. How much is seen in tests/integration/test_bounded.py."""
    with rig.pooled("_one") as client, rig.pooled("") as other:
        client.send(query("select n, repeat('x', 1000) from generate_series(1, 20000) n"))
        assert client.receive().type == "T"
        for _ in range(50):
            assert other.query("select 1") == [["1"]]
        said = client.until_ready()
        assert [each.type for each in said[-2:]] == ["C", "Z"]
        assert len(said) == 20_002
