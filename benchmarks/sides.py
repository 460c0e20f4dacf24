"""The two sides of every comparison over one PostgreSQL: our fleet, and PgBouncer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme

from benchmarks.measure import Target, find_pgbench
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import Fleet, FleetPlan, import_path
from pooler.demo.pgbouncer import PgBouncer
from pooler.demo.postgres import MONITOR_GRANTS, Limits, Role, Server, newest, temporary_directory
from pooler.demo.process import PartFailed

DBNAME, USER, OTHER, MONITOR = "bench", "bench_app", "bench_batch", "bench_monitor"
PASSWORD = "bench-password"  # of a server on loopback that lives for a minute
POOL_SIZE = 20
SCALE = 5


@dataclass(slots=True)
class Sides:
    """What runs. `peers` by pool mode: PgBouncer 1.18 has no prepared statements in transaction pooling, so
    that mode is compared with its session pooling."""

    directory: Path
    server: Server
    etcd: Etcd
    fleet: Fleet
    peers: dict[str, PgBouncer]

    @property
    def ours(self) -> Target:
        return Target("pooler", self.fleet.ports.listen, USER, PASSWORD, DBNAME)

    def fleet_pids(self) -> set[int]:
        """Supervisor, coordinator with its HTTP, workers."""
        return self.fleet.processes()

    def peer(self, mode: str = "transaction") -> Target:
        return Target("pgbouncer", self.peers[mode].port, USER, PASSWORD, DBNAME)

    def peer_pids(self, mode: str = "transaction") -> set[int]:
        child = self.peers[mode].child
        return {child.pid} if child is not None else set()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate and its key, of RSA as most have it."""

    cert: Path
    key: Path

    @classmethod
    def issue(cls, directory: Path) -> TlsFiles:
        """For localhost, by an authority of its own. Both poolers may read it."""
        rsa = trustme.KeyType.RSA
        issued = trustme.CA(key_type=rsa).issue_cert("localhost", key_type=rsa)
        files = cls(directory / "localhost.crt", directory / "localhost.key")
        files.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        files.key.touch(mode=0o600)
        issued.private_key_pem.write_to_path(files.key)
        return files


@contextmanager
def both_sides(
    workers: int, *, encrypts: bool = False, pool_size: int = POOL_SIZE
) -> Iterator[Sides]:
    """Start both, stop both; `encrypts`: clients may use TLS. Raises PartFailed."""
    directory = temporary_directory("bench")
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        server = _server(directory, ends)
        (directory / "etcd").mkdir()
        etcd = Etcd(directory / "etcd")
        ends.callback(etcd.kill)
        etcd.start()
        tls = TlsFiles.issue(directory) if encrypts else None
        peers = {mode: _peer(directory, server, mode, ends, tls, pool_size)
                 for mode in ("transaction", "session")}
        own_tls = {} if tls is None else {"client_tls": {
            "sslmode": "prefer", "cert_file": str(tls.cert), "key_file": str(tls.key)}}
        fleet = Fleet(FleetPlan(
            directory / "fleet", (f"127.0.0.1:{server.port}",), DBNAME,
            {USER: PASSWORD, OTHER: PASSWORD}, tuple(etcd.endpoints), (MONITOR, PASSWORD), name="bench",
            workers=workers, permits=2 * pool_size, admin_reserve=2,
            more={"pool": {"default_pool_size": pool_size, "max_client_conn": 10_000}, **own_tls},
            tenants=({"match": {"user": "*_batch"}, "tenant": "batch", "class": "batch"},
                     {"match": {"user": "*"}, "tenant": "app", "class": "interactive"}),
            policy={"executionClasses": {"interactive": {"permits": pool_size, "maxQueue": 10_000},
                                         "batch": {"permits": pool_size, "maxQueue": 10_000}}}))
        fleet.write()
        ends.callback(fleet.stop)
        fleet.start()
        yield Sides(directory, server, etcd, fleet, peers)


@contextmanager
def idle_clients(target: Target, count: int) -> Iterator[None]:
    """So many idle clients, from a process of their own. Raises PartFailed if they are not let in."""
    environment = {**target.environment, "PYTHONPATH": import_path()}
    with subprocess.Popen([sys.executable, "-m", "benchmarks.idle", str(count)], env=environment,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdout is not None
        if clients.stdout.readline().strip() != str(count):
            raise PartFailed(f"{target.name} did not let {count} clients in")
        yield


def _server(directory: Path, ends: ExitStack) -> Server:
    server = Server.create(newest(), directory / "server", limits=Limits(160),
                           settings={"shared_buffers": "128MB"})
    ends.callback(server.stop, immediate=True)
    server.start()
    for role in (Role(USER, PASSWORD), Role(OTHER, PASSWORD), Role(MONITOR, PASSWORD, MONITOR_GRANTS)):
        server.create_role(role)
    server.create_database(DBNAME, USER)
    straight = Target("server", server.port, USER, PASSWORD, DBNAME)
    subprocess.run([find_pgbench(), "-i", "-q", "-s", str(SCALE)], env=straight.environment,
                   capture_output=True, check=True)
    return server


def _peer(
    directory: Path, server: Server, mode: str, ends: ExitStack, tls: TlsFiles | None, pool_size: int
) -> PgBouncer:
    own = directory / f"pgbouncer-{mode}"
    own.mkdir(mode=0o755)
    encrypts = {}
    if tls is not None:
        key = own / "server.key"
        shutil.copy(tls.key, key)
        key.chmod(0o644)  # it runs as another user, in a directory that is gone in a minute
        encrypts = {"client_tls_sslmode": "prefer", "client_tls_cert_file": str(tls.cert),
                    "client_tls_key_file": str(key)}
    peer = PgBouncer(own, DBNAME, f"host=127.0.0.1 port={server.port} dbname={DBNAME}",
                     {USER: PASSWORD, OTHER: PASSWORD},
                     {"pool_mode": mode, "default_pool_size": str(pool_size), **encrypts})
    ends.callback(peer.stop)
    peer.start()
    return peer
