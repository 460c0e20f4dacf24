"""Debian's PgBouncer, as the peer of the benchmarks and for tests of what it does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pooler.demo.haproxy import find_program
from pooler.demo.process import Account, Child, PartFailed, accepts, free_ports


class PgBouncer:
    """One PgBouncer in front of one database. `settings` are lines of its [pgbouncer] section."""

    def __init__(
        self, directory: Path, database: str, target: str, users: Mapping[str, str],
        settings: Mapping[str, str] | None = None,
    ) -> None:
        binary = find_program("pgbouncer")
        if binary is None:
            raise PartFailed("no pgbouncer on PATH: install Debian's pgbouncer")
        self.binary = binary
        self.port = free_ports()
        self.directory = directory
        self.child: Child | None = None
        values = {
            "listen_addr": "127.0.0.1", "listen_port": str(self.port), "unix_socket_dir": "",
            "auth_type": "scram-sha-256", "auth_file": str(directory / "userlist.txt"),
            "pool_mode": "transaction", "max_client_conn": "20000", "default_pool_size": "20",
            "ignore_startup_parameters": "extra_float_digits", **(settings or {}),
        }
        lines = ["[databases]", f"{database} = {target}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in values.items()]
        self.file = directory / "pgbouncer.ini"
        self.file.write_text("\n".join(lines) + "\n")
        userlist = directory / "userlist.txt"
        userlist.write_text("".join(f'"{user}" "{password}"\n' for user, password in users.items()))
        for path in (self.file, userlist):
            path.chmod(0o644)

    @property
    def version(self) -> str:
        """As it names itself: `PgBouncer 1.18.0`."""
        said = subprocess.run([self.binary, "--version"], capture_output=True, text=True, check=True)
        return said.stdout.splitlines()[0]

    def start(self) -> None:
        """Raises PartFailed when it does not listen."""
        account = Account.named("nobody") if os.geteuid() == 0 else None  # it refuses root too
        self.child = Child([self.binary, self.file], self.directory / "pgbouncer.log", account=account)
        self.child.wait_until(lambda: accepts(self.port), "PgBouncer accepts")

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop(signal.SIGTERM)
