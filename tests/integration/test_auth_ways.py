"""Ways to log in other than by an asked password, and a server's own refusals, each through a fleet."""

from __future__ import annotations

import os
import pwd
import secrets
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from pooler.demo.etcd import Etcd
from pooler.demo.postgres import Role
from pooler.wire.auth import md5_secret
from tests.support.certificates import TLS_VERSION, Authority, give_tls
from tests.support.fleet import MakeFleet, RunningFleet
from tests.support.postgres import Database, MakeServer, make_database

pytestmark = [pytest.mark.postgres, pytest.mark.etcd]

SERVER_HBA = ("hostssl all by_cert 127.0.0.1/32 trust", "hostssl all all 127.0.0.1/32 scram-sha-256")
HBA = """
hostssl all by_cert all cert map=certs
hostssl all all     all scram-sha-256
"""
ME = pwd.getpwuid(os.getuid()).pw_name


def refusal(dsn: str) -> str:
    with pytest.raises(psycopg.OperationalError) as refused:
        psycopg.connect(dsn)
    return str(refused.value)


def user_of(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("select current_user").fetchone()
        assert row is not None
        return str(row[0])


def change(fleet: RunningFleet, section: str, name: str, **values: Any) -> None:
    """Give an entry of a section of pooler.yaml other values."""
    config = yaml.safe_load(fleet.config.read_text())
    config[section].setdefault(name, {}).update(values)
    fleet.config.write_text(yaml.safe_dump(config, sort_keys=False))


def test_certificates_channel_binding_and_rules_that_change(
    make_fleet: MakeFleet, make_server: MakeServer, etcd: Etcd, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "tls")
    server = make_server(TLS_VERSION, hba=SERVER_HBA)
    give_tls(server, authority.host("127.0.0.1", file="server"), authority)
    database = make_database(server)
    server.create_role(Role("by_cert", "unused"))
    pair, ann, bob = authority.host("localhost", file="pooler"), authority.user("ann"), authority.user("bob")
    fleet = make_fleet(database, etcd, permits=4, workers=1, start=False, more={
        "client_tls": {"sslmode": "require", "cert_file": str(pair.cert), "key_file": str(pair.key),
                       "ca_file": str(authority.file)},
        "server_tls": {"sslmode": "verify-full", "ca_file": str(authority.file)},
        "auth": {"type": "hba", "hba_file": "hba.conf", "ident_file": "ident.conf", "file": "userlist.txt"}})
    hba = fleet.config.parent / "hba.conf"
    hba.write_text(HBA)
    (fleet.config.parent / "ident.conf").write_text("certs ann by_cert\n")
    with (fleet.config.parent / "userlist.txt").open("a") as userlist:
        userlist.write('"by_cert" ""\n')
    fleet.fleet.start()
    base: dict[str, Any] = {"host": "localhost", "hostaddr": "127.0.0.1", "sslmode": "verify-full",
                            "sslrootcert": str(authority.file)}
    password = fleet.dsn(**base, channel_binding="require")
    base |= {"user": "by_cert", "password": ""}
    with_ann = fleet.dsn(**base, sslcert=str(ann.cert), sslkey=str(ann.key))
    with_bob = fleet.dsn(**base, sslcert=str(bob.cert), sslkey=str(bob.key))
    without = fleet.dsn(**base)

    assert user_of(password) == database.user
    assert user_of(with_ann) == "by_cert"
    assert 'certificate authentication failed for user "by_cert"' in refusal(with_bob)
    assert "connection requires a valid client certificate" in refusal(without)

    hba.write_text("hostssl all all all gss\n")
    done = fleet.fleet.command("fleet", "reload")
    assert f'{hba}:1: method "gss" is not served' in done.stdout + done.stderr
    assert done.returncode != 0
    assert user_of(with_ann) == "by_cert"

    hba.write_text("hostssl all by_cert all reject\n" + HBA)
    assert fleet.fleet.command("fleet", "reload").returncode == 0
    assert "pg_hba.conf rejects connection" in refusal(with_ann)
    assert user_of(password) == database.user


def test_a_unix_user_comes_in_by_peer_and_nobody_by_tcp(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    fleet = make_fleet(postgres_newest, etcd, permits=4, workers=1, start=False)
    folder = fleet.config.parent
    config = yaml.safe_load(fleet.config.read_text())
    config["fleet"]["unix_socket_dir"] = str(folder)
    config["auth"] = {"type": "peer", "file": "userlist.txt", "ident_file": "ident.conf", "map": "unix"}
    fleet.config.write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "ident.conf").write_text(f"unix {ME} {postgres_newest.user}\n")
    fleet.fleet.start()
    assert user_of(fleet.dsn(host=str(folder), password="")) == postgres_newest.user
    assert 'Peer authentication failed for user "admin"' in refusal(fleet.dsn(host=str(folder), user="admin"))
    assert "peer authentication is for unix sockets only" in refusal(fleet.dsn())


def test_with_any_the_name_means_nothing_and_the_server_sees_the_forced_user(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    fleet = make_fleet(
        postgres_newest, etcd, permits=4, workers=1, start=False, more={"auth": {"type": "any"}})
    change(fleet, "databases", postgres_newest.dbname, user=postgres_newest.user,
           password=postgres_newest.password)
    fleet.fleet.start()
    assert user_of(fleet.dsn(user="whoever", password="")) == postgres_newest.user
    with psycopg.connect(fleet.dsn(user="whoever", password="", dbname="pooler"), autocommit=True) as console:
        assert console.execute("SHOW POOLS").fetchall()
        console.execute("RELOAD")  # as an administrator


def test_what_the_server_says_to_a_login_reaches_the_client_at_once(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    database = postgres_newest
    fleet = make_fleet(database, etcd, permits=4, workers=1, start=False)
    config = yaml.safe_load(fleet.config.read_text())
    config["databases"]["gone"] = {**config["databases"][database.dbname], "dbname": "gone_from_there"}
    fleet.config.write_text(yaml.safe_dump(config, sort_keys=False))
    outdated = f"outdated_{secrets.token_hex(4)}"
    database.server.create_role(Role(outdated, "new"))
    with (fleet.config.parent / "userlist.txt").open("a") as userlist:
        userlist.write(f'"{outdated}" "old"\n')
    fleet.fleet.start()
    began = time.monotonic()
    wrong = refusal(fleet.dsn(user=outdated, password="old"))
    assert f'FATAL:  password authentication failed for user "{outdated}"' in wrong
    missing = refusal(fleet.dsn(dbname="gone"))
    assert 'FATAL:  database "gone_from_there" does not exist' in missing
    assert time.monotonic() - began < 8
    users = fleet.config.parent / "userlist.txt"
    users.write_text(users.read_text().replace('"old"', '"new"'))
    assert fleet.fleet.command("fleet", "reload").returncode == 0
    assert user_of(fleet.dsn(user=outdated, password="new")) == outdated  # without the pause's end
    assert user_of(fleet.dsn()) == database.user


def test_a_login_by_trust_leaves_the_pool_the_password_that_another_login_has_shown(
    make_fleet: MakeFleet, postgres_newest: Database, etcd: Etcd
) -> None:
    """The userlist's md5 secret is no answer to a server that asks for SCRAM; the password itself is."""
    database, user = postgres_newest, f"hashed_{secrets.token_hex(4)}"
    database.server.create_role(Role(user, "right"))
    fleet = make_fleet(database, etcd, permits=4, workers=1, start=False, more={
        "pool": {"pool_mode": "session"},
        "auth": {"type": "hba", "hba_file": "hba.conf", "file": "userlist.txt"}})
    folder = fleet.config.parent
    config = yaml.safe_load(fleet.config.read_text())
    config["fleet"]["unix_socket_dir"] = str(folder)
    fleet.config.write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "hba.conf").write_text("local all all trust\nhost all all all password\n")
    with (folder / "userlist.txt").open("a") as userlist:
        userlist.write(f'"{user}" "{md5_secret(b"right", user).decode()}"\n')
    fleet.fleet.start()
    trusted = fleet.dsn(host=str(folder), user=user, password="")
    told = refusal(trusted)
    assert "SCRAM-SHA-256" in told
    assert "store its plain password instead" in told
    shown = fleet.dsn(user=user, password="right")
    with psycopg.connect(shown) as first:
        assert first.execute("select 1").fetchone() == (1,)
        with psycopg.connect(trusted) as second, psycopg.connect(trusted) as third:
            for each in (second, third):
                assert each.execute("select current_user").fetchone() == (user,)
