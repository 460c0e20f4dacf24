"""Certificates for tests: authorities, certificates of hosts and of users, as files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from pooler.demo.postgres import Server
from tests.support.wait import wait_until

TLS_VERSION = 15  # of PostgreSQL: the wheel's newer one is built without OpenSSL


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key; the key is readable by its owner only, as libpq and PostgreSQL want it."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority with a folder for what it issues."""

    def __init__(self, folder: Path, key_type: trustme.KeyType = trustme.KeyType.ECDSA) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._key_type = folder, key_type
        self._authority = trustme.CA(key_type=key_type)
        self.file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.file)

    def host(self, *names: str, file: str = "host", days: float = 30) -> Pair:
        """For a server that is known by these names and addresses."""
        return self._write(file, *names, days=days)

    def user(self, name: str, file: str | None = None) -> Pair:
        """For a client, by its common name."""
        return self._write(file or name, f"{name}.users.test", common_name=name)

    def _write(self, file: str, *names: str, common_name: str | None = None, days: float = 30) -> Pair:
        now = datetime.now(UTC)
        issued = self._authority.issue_cert(
            *names, common_name=common_name, key_type=self._key_type, not_before=now - timedelta(days=60),
            not_after=now + timedelta(days=days))
        pair = Pair(self._folder / f"{file}.crt", self._folder / f"{file}.key")
        pair.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        pair.key.touch(mode=0o600)
        issued.private_key_pem.write_to_path(pair.key)
        return pair


def give_tls(server: Server, pair: Pair, authority: Authority) -> None:
    """Let a running server encrypt, with this certificate; it trusts clients' certificates of `authority`."""
    owner = server.data.stat()
    files = ((pair.cert, "server.crt", 0o644), (pair.key, "server.key", 0o600),
             (authority.file, "root.crt", 0o644))
    for source, name, mode in files:
        beside = server.data / f"{name}.new"
        beside.write_bytes(source.read_bytes())
        beside.chmod(mode)
        os.chown(beside, owner.st_uid, owner.st_gid)
        beside.rename(server.data / name)
    server.execute("ALTER SYSTEM SET ssl = on")
    server.execute("ALTER SYSTEM SET ssl_ca_file = 'root.crt'")
    server.execute("SELECT pg_reload_conf()")
    wait_until(lambda: server.execute("SHOW ssl") == [("on",)], "the server encrypts", 10)
