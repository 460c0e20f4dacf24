"""What etcd says of itself is shown, and what an administrator should look at comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from coordinator.etcd_health import (
    FRESH_SECONDS,
    HISTORY_MAX,
    EtcdHealth,
    Health,
    Member,
    health_metrics,
    parse_metrics,
)
from coordinator.store.etcd import open_etcd
from coordinator.store.memory import Keyspace, MemoryStore
from pooler.demo.etcd import Etcd

PAGE = """
# TYPE etcd_server_has_leader gauge
etcd_server_has_leader 1
etcd_server_quota_backend_bytes 2.147483648e+09
etcd_mvcc_db_total_size_in_bytes 20480
etcd_debugging_mvcc_current_revision 100
etcd_debugging_mvcc_compact_revision -1
etcd_server_leader_changes_seen_total 2
etcd_disk_wal_fsync_duration_seconds_bucket{le="0.001"} 10
etcd_disk_wal_fsync_duration_seconds_bucket{le="0.016"} 98
etcd_disk_wal_fsync_duration_seconds_bucket{le="0.032"} 99
etcd_disk_wal_fsync_duration_seconds_bucket{le="8.192"} 100
etcd_disk_wal_fsync_duration_seconds_bucket{le="+Inf"} 100
etcd_disk_wal_fsync_duration_seconds_sum 1.5
something odd
"""
WELL = Member("e:2379", answers=True, has_leader=True, size_bytes=20480, quota_bytes=2 << 30, revision=100,
              compacted_revision=0, leader_changes=2, fsync_p99_seconds=0.032)


def test_a_members_page_is_read() -> None:
    assert parse_metrics("e:2379", PAGE) == WELL
    assert parse_metrics("e:2379", "") == Member("e:2379")


@pytest.mark.parametrize(("counts", "found"), [
    ([0, 0, 0], 0.0), ([5, 5, 5], 0.001), ([0, 5, 5], 0.002), ([0, 0, 5], 0.002)])
def test_the_slowest_of_a_hundred_writes_is_in_the_first_bucket_that_has_99(
    counts: list[int], found: float
) -> None:
    lines = [f'etcd_disk_wal_fsync_duration_seconds_bucket{{le="{end}"}} {count}'
             for end, count in zip(("0.001", "0.002", "+Inf"), counts, strict=True)]
    assert parse_metrics("e", "\n".join(lines)).fsync_p99_seconds == found


@pytest.mark.parametrize(("changes", "worry"), [
    ({"has_leader": False}, "no leader"),
    ({"size_bytes": 1_900 << 20}, "93% of its quota"),
    ({"revision": HISTORY_MAX + 1}, "not compacted"),
    ({"fsync_p99_seconds": 0.256}, "disk is slow"),
])
def test_what_an_administrator_should_look_at_comes_before_the_figures(
    changes: dict[str, float], worry: str
) -> None:
    assert WELL.worries() == []
    worried, figures = Health((replace(WELL, **changes),)).lines()  # type: ignore[arg-type]
    assert worry in worried
    assert "compacted at 0" in figures


def test_an_alarm_comes_first_and_a_member_that_does_not_answer_is_named() -> None:
    lines = Health((Member("a:1"), WELL), ("NOSPACE",)).lines()
    assert lines[0] == "etcd: alarm NOSPACE, it takes no writes but deletes"
    assert lines[1] == "etcd a:1: does not answer"
    shown = {sample.name: sample.value for family in health_metrics(Health((WELL,), ("NOSPACE",)))
             for sample in family.samples if sample.labels.get("alarm") != "CORRUPT"}
    assert shown["pooler_etcd_alarm"] == 1
    assert shown["pooler_etcd_quota_bytes"] == 2 << 30


async def test_a_store_without_members_tells_its_alarms() -> None:
    keyspace = Keyspace()
    keyspace.full = True
    assert await EtcdHealth(MemoryStore(keyspace), ()).read() == Health((), ("NOSPACE",))


@pytest.mark.etcd
async def test_a_real_etcd_tells_all_of_it_and_is_not_asked_again_at_once(etcd: Etcd) -> None:
    async with open_etcd(etcd.endpoints) as store:
        health = EtcdHealth(store, (*store.endpoints, "127.0.0.1:1"))
        found = await health.read()
        member, missing = found.members
        assert (missing.answers, found.alarms) == (False, ())
        assert (member.answers, member.has_leader) == (True, True)
        assert member.worries() == [] or member.fsync_p99_seconds > 0
        assert 0 < member.size_bytes < member.quota_bytes
        assert member.revision > 0
        assert member.leader_changes >= 1
        asked = store.requests["status"]
        assert asked >= 2
        assert trio.current_time() < health._read_at + FRESH_SECONDS
        assert await health.read() is found
        assert store.requests["status"] == asked
