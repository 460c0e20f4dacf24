"""How etcd itself is: alarms, size beside its quota, compaction, changes of its leader, what its disk takes.

Each member is asked for its own metrics (https://etcd.io/docs/latest/metrics/), only when somebody looks, and
what was read is shown again for a few seconds: load balancers look often. None of it decides anything.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from coordinator.store.api import Store, StoreUnavailable, StoreUnknown

FRESH_SECONDS = 5.0
ASK_SECONDS = 1.0
ANSWER_BYTES_MAX = 4 << 20
SIZE_SHARE_MAX = 0.8  # of the quota, after which an administrator should look
FSYNC_SECONDS_MAX = 0.1  # at the 99th percentile: etcd's own advice is 10 ms
HISTORY_MAX = 2_000_000  # revisions since the last compaction
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """One member, as it says of itself. `answers` False: nothing else is known. Counts are since it was
    started; `fsync_p99_seconds` is the upper end of the bucket that has it."""

    endpoint: str
    answers: bool = False
    has_leader: bool = False
    size_bytes: int = 0
    quota_bytes: int = 0
    revision: int = 0
    compacted_revision: int = 0
    leader_changes: int = 0
    fsync_p99_seconds: float = 0.0

    def line(self) -> str:
        """In one line, for people."""
        if not self.answers:
            return f"etcd {self.endpoint}: does not answer"
        return (f"etcd {self.endpoint}: {self.size_bytes / MIB:.1f} of {self.quota_bytes / MIB:.0f} MiB, "
                f"revision {self.revision}, compacted at {self.compacted_revision}, "
                f"{self.leader_changes} changes of leader, fsync p99 {1000 * self.fsync_p99_seconds:g} ms")

    def worries(self) -> list[str]:
        """What an administrator should look at."""
        if not self.answers:
            return []
        found = []
        if not self.has_leader:
            found.append("it has no leader")
        if self.quota_bytes and self.size_bytes > SIZE_SHARE_MAX * self.quota_bytes:
            share = self.size_bytes / self.quota_bytes
            found.append(f"{share:.0%} of its quota are used: compact, and defragment")
        if self.revision - self.compacted_revision > HISTORY_MAX:
            found.append("its history is not compacted")
        if self.fsync_p99_seconds > FSYNC_SECONDS_MAX:
            found.append("its disk is slow")
        return [f"etcd {self.endpoint}: {each}" for each in found]


@dataclass(frozen=True, slots=True)
class Health:
    """All members; alarms are the cluster's."""

    members: tuple[Member, ...] = ()
    alarms: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What there is to be said, worries first."""
        alarms = [f"etcd: alarm {each}" + (", it takes no writes but deletes" if each == "NOSPACE" else "")
                  for each in self.alarms]
        return [*alarms, *(line for each in self.members for line in each.worries()),
                *(each.line() for each in self.members)]


def parse_metrics(endpoint: str, text: str) -> Member:
    """A member out of its metrics page; what is not there is 0."""
    values: dict[str, float] = {}
    buckets: list[tuple[float, float]] = []
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("#") or not name:
            continue
        try:
            if name.startswith('etcd_disk_wal_fsync_duration_seconds_bucket{le="'):
                buckets.append((float(name.split('"')[1]), float(value)))
            elif "{" not in name:
                values[name] = float(value)
        except ValueError:
            continue
    return Member(
        endpoint, answers=bool(values), has_leader=values.get("etcd_server_has_leader") == 1,
        size_bytes=int(values.get("etcd_mvcc_db_total_size_in_bytes", 0)),
        quota_bytes=int(values.get("etcd_server_quota_backend_bytes", 0)),
        revision=int(values.get("etcd_debugging_mvcc_current_revision", 0)),
        compacted_revision=max(0, int(values.get("etcd_debugging_mvcc_compact_revision", 0))),
        leader_changes=int(values.get("etcd_server_leader_changes_seen_total", 0)),
        fsync_p99_seconds=_quantile(sorted(buckets), 0.99))


def _quantile(buckets: Sequence[tuple[float, float]], part: float) -> float:
    """The upper end of the first bucket that has so many; for the last, which has none, that before it."""
    most = buckets[-1][1] if buckets else 0.0
    ends = [end for end, count in buckets if count >= part * most]
    finite = [end for end, _ in buckets if end != float("inf")]
    if not most or not finite:
        return 0.0
    return min(ends[0], finite[-1])


def health_metrics(health: Health) -> Iterable[Metric]:
    """For a scrape."""
    answering = [each for each in health.members if each.answers]
    yield _gauge("pooler_etcd_up", "1 while a member of etcd answers for itself",
                 {each.endpoint: int(each.answers) for each in health.members})
    yield _gauge("pooler_etcd_size_bytes", "Size of a member's database",
                 {each.endpoint: each.size_bytes for each in answering})
    yield _gauge("pooler_etcd_quota_bytes", "Its quota",
                 {each.endpoint: each.quota_bytes for each in answering})
    yield _gauge("pooler_etcd_revision", "Its revision",
                 {each.endpoint: each.revision for each in answering})
    yield _gauge("pooler_etcd_compacted_revision", "Revision of its last compaction since it was started",
                 {each.endpoint: each.compacted_revision for each in answering})
    yield _gauge("pooler_etcd_fsync_p99_seconds", "What a write of its log to disk takes, 99 of 100",
                 {each.endpoint: each.fsync_p99_seconds for each in answering})
    changes = CounterMetricFamily(
        "pooler_etcd_leader_changes_total", "Leaders it saw come", labels=["member"])
    for each in answering:
        changes.add_metric([each.endpoint], each.leader_changes)
    yield changes
    alarms = GaugeMetricFamily("pooler_etcd_alarm", "1 while etcd raises an alarm", labels=["alarm"])
    for alarm in sorted({"NOSPACE", "CORRUPT", *health.alarms}):
        alarms.add_metric([alarm], int(alarm in health.alarms))
    yield alarms


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["member"])
    for endpoint, value in values.items():
        family.add_metric([endpoint], value)
    return family


class EtcdHealth:
    """Asks the members of `store` when `read` is called; over TLS where there is a `context`."""

    def __init__(self, store: Store, endpoints: Sequence[str], context: ssl.SSLContext | None = None) -> None:
        self._store = store
        self._endpoints = endpoints
        self._context = context
        self._one_at_a_time = trio.Lock()
        self._read_at = -float("inf")
        self._found = Health()

    async def read(self) -> Health:
        """Within a second or so; what was found a moment ago is found again."""
        async with self._one_at_a_time:
            if trio.current_time() - self._read_at >= FRESH_SECONDS:
                self._found = await self._ask_all()
                self._read_at = trio.current_time()
        return self._found

    async def _ask_all(self) -> Health:
        members = {endpoint: Member(endpoint) for endpoint in self._endpoints}
        alarms: list[str] = []

        async def ask(endpoint: str) -> None:
            text = await self._page(endpoint)
            if text:
                members[endpoint] = parse_metrics(endpoint, text)

        async def ask_alarms() -> None:
            try:
                alarms.extend((await self._store.status()).alarms)
            except (StoreUnavailable, StoreUnknown):
                return  # its members do not answer either

        with trio.move_on_after(ASK_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_alarms)
                for endpoint in self._endpoints:
                    nursery.start_soon(ask, endpoint)
        return Health(tuple(members.values()), tuple(alarms))

    async def _page(self, endpoint: str) -> str:
        """A member's /metrics; empty if it does not answer so."""
        host, _, port = endpoint.rpartition(":")
        host = host.strip("[]")
        try:
            stream: trio.abc.Stream = await trio.open_tcp_stream(host, int(port))
            if self._context is not None:
                stream = trio.SSLStream(stream, self._context, server_hostname=host, https_compatible=True)
            async with stream:
                await stream.send_all(f"GET /metrics HTTP/1.0\r\nHost: {endpoint}\r\n\r\n".encode())
                answer = bytearray()
                while (data := await stream.receive_some()) and len(answer) < ANSWER_BYTES_MAX:
                    answer += data
        except (OSError, trio.BrokenResourceError, ValueError):
            return ""
        head, _, body = bytes(answer).partition(b"\r\n\r\n")
        return body.decode(errors="replace") if b" 200 " in head.partition(b"\r\n")[0] + b" " else ""
