"""`pooler init`: the files of a first fleet in front of a server that is there already."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pooler.cli.options import JsonOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psycopg

    from pooler.cli.first_files import Login, NewFile, ServerFacts

CONNECT_SECONDS_MAX = 10
_FACTS_SQL = """
SELECT current_setting('server_version_num')::int, current_setting('max_connections')::int,
       current_setting('superuser_reserved_connections')::int,
       coalesce(current_setting('reserved_connections', true), '0')::int,
       (SELECT count(*)::int FROM pg_stat_activity
         WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()),
       pg_is_in_recovery(), current_database(), current_user,
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
       (SELECT rolname::text FROM pg_roles WHERE rolsuper AND rolcanlogin ORDER BY oid LIMIT 1),
       (SELECT sender_host FROM pg_stat_wal_receiver), (SELECT sender_port FROM pg_stat_wal_receiver),
       current_setting('listen_addresses'), current_setting('port')::int
"""


def init(
    dsn: Annotated[str, typer.Option(
        "--dsn", metavar="DSN", help="The server, as libpq takes it; several hosts are kept: the role is "
        "write if one of them is a primary.")],
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where the files go.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a server and write what a fleet in front of it needs; nothing on the server is changed.

    Writes pooler.yaml, a policy that fits max_connections, userlist.txt, monitor.secret, roles.sql (to be run
    by a superuser), pgpass (passwords for psql) and haproxy.cfg, and prints the next commands to paste.

    Example: pooler init --dsn postgresql://app:secret@db1:5432/orders --dir /etc/pooler
    """
    from pooler.cli.first_files import first_files
    from pooler.cli.first_steps import next_steps
    from pooler.cli.out import print_json
    from pooler.haproxy import render_haproxy
    from pooler.settings import load

    facts, logins = read_server(dsn)
    files = first_files(facts, *logins)
    _refuse_overwriting(directory, [*(file.name for file in files), "haproxy.cfg"], force)
    for file in files:
        _write(directory, file)
    rendered = render_haproxy(load(directory / "pooler.yaml"))
    (directory / "haproxy.cfg").write_text(rendered, encoding="utf-8")
    written = [str(directory / name) for name in (*(file.name for file in files), "haproxy.cfg")]
    steps = next_steps(dsn, directory, facts, app=logins[0].name, console=logins[2].name)
    if as_json:
        print_json({"written": written, "next": steps})
        return
    print("wrote " + ", ".join(written))
    print("next:\n" + "\n".join(f"  {step}" for step in steps))


def read_server(dsn: str) -> tuple[ServerFacts, tuple[Login, Login, Login]]:
    """What the server says, and the logins of the application, the monitor and the console.

    Raises UsageFault for a bad DSN, FleetUnreachable when the server refuses.
    """
    import psycopg

    from pooler.errors import FleetUnreachable, UsageFault

    try:
        given = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as fault:
        raise UsageFault(f"--dsn: {_one_line(fault)}") from None
    try:
        with _connected(dsn, given) as server:
            row = server.execute(_FACTS_SQL).fetchone()
            assert row is not None  # a SELECT without FROM has one row
            facts = _facts(server, given, row)
            return facts, _logins(server, facts)
    except psycopg.Error as fault:
        raise FleetUnreachable(f"the server cannot be read: {_one_line(fault)}") from None


def _connected(dsn: str, given: Mapping[str, Any]) -> psycopg.Connection[Any]:
    """Of several hosts the primary, unless the DSN says which it wants, or there is none. Raises
    psycopg.Error."""
    from functools import partial

    import psycopg

    connect = partial(
        psycopg.connect, dsn, connect_timeout=CONNECT_SECONDS_MAX, application_name="pooler init")
    if "," in str(given.get("host", "")) and "target_session_attrs" not in given:
        with suppress(psycopg.OperationalError):
            return connect(target_session_attrs="primary")
    return connect()


def _facts(
    server: psycopg.Connection[Any], given: Mapping[str, Any], row: tuple[Any, ...]
) -> ServerFacts:
    from pooler.cli.first_files import ServerFacts

    (version, most, superuser_reserved, reserved, others, in_recovery, dbname, user, is_superuser, superuser,
     sender_host, sender_port, listens_on, port) = row
    named = named_hosts(given, server.info.host, server.info.port)
    by_socket = any(_is_socket(host) for host, _ in named)
    hosts = dict.fromkeys(
        _tcp_address(listens_on, port) if _is_socket(host) else (host, own) for host, own in named)
    return ServerFacts(
        [f"[{host}]:{own}" if ":" in host else f"{host}:{own}" for host, own in hosts], dbname, user,
        is_superuser, version, most, superuser_reserved, reserved, others, in_recovery,
        superuser=user if is_superuser else superuser or "postgres",
        upstream=(sender_host, sender_port) if sender_host else None,
        reached=(server.info.host, server.info.port), by_socket=by_socket)


def named_hosts(given: Mapping[str, Any], reached: str, reached_port: int) -> list[tuple[str, int]]:
    """(host, port) of each host of a DSN, `given` as its words; the directory of a unix socket is a host,
    too. What is not named is as the connection that was `reached` has it."""
    names, ports = str(given.get("host") or "").split(","), str(given.get("port") or "").split(",")
    found = []
    for number, name in enumerate(names):
        port = (ports[number] if number < len(ports) else ports[-1]) or reached_port
        found.append((name or reached, int(port)))
    return found


def _is_socket(host: str) -> bool:
    return host.startswith(("/", "@"))


def _tcp_address(listens_on: str, port: int) -> tuple[str, int]:
    """Where a server that we reached by a unix socket answers over TCP, too. Raises UsageFault."""
    from psycopg import pq

    from pooler.errors import UsageFault

    own = {"*": ("127.0.0.1", "::1"), "localhost": ("127.0.0.1", "::1"), "0.0.0.0": ("127.0.0.1",),
           "::": ("::1",)}
    for address in filter(None, (each.strip() for each in listens_on.split(","))):
        for host in own.get(address, (address,)):
            asked = f"host={host} port={port} connect_timeout={CONNECT_SECONDS_MAX}"
            if pq.PGconn.ping(asked.encode()) == pq.Ping.OK:
                return host, port
    raise UsageFault(
        "--dsn: the fleet reaches its servers over TCP, and this one, reached by a unix socket, answers on "
        f"no TCP address (listen_addresses is '{listens_on}', port {port}): set listen_addresses")


def _logins(server: psycopg.Connection[Any], facts: ServerFacts) -> tuple[Login, Login, Login]:
    import secrets

    from pooler.cli.first_files import Login

    def made(name: str, password: str = "", *, is_new: bool = True) -> Login:
        word = password or secrets.token_urlsafe(18)
        verifier = server.pgconn.encrypt_password(word.encode(), name.encode(), b"scram-sha-256").decode()
        return Login(name, word, verifier, is_new)

    # a role of its own, unless the DSN has the password of an ordinary one
    if facts.is_superuser or not server.info.password:
        app = made(f"{facts.dbname}_app")
    else:
        app = made(facts.user, server.info.password, is_new=False)
    return app, made("pooler_monitor"), made("admin")


def _refuse_overwriting(directory: Path, names: list[str], force: bool) -> None:
    from pooler.errors import UsageFault

    there = [str(directory / name) for name in names if (directory / name).exists()]
    if there and not force:
        raise UsageFault(f"{', '.join(there)}: already there; nothing was written (--force overwrites)")


def _write(directory: Path, file: NewFile) -> None:
    """With its mode from the first byte on: secrets are never readable by others."""
    import os

    path = directory / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file.mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(file.text)


def _one_line(fault: Exception) -> str:
    return " ".join(str(fault).split())
