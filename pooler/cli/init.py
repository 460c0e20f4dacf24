"""`pooler init`: the files of a first fleet in front of a server that is there already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pooler.cli.options import JsonOption

if TYPE_CHECKING:
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
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
"""


def init(
    dsn: Annotated[str, typer.Option(
        "--dsn", metavar="DSN", help="The server, as libpq takes it; several hosts are kept.")],
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where the files go.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a server and write what a fleet in front of it needs; nothing on the server is changed.

    Writes pooler.yaml, a policy that fits max_connections, userlist.txt, monitor.secret, roles.sql (to be run
    by a superuser) and haproxy.cfg, and prints the next commands.

    Example: pooler init --dsn postgresql://app:secret@db1:5432/orders --dir /etc/pooler
    """
    from pooler.cli.first_files import first_files
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
    steps = next_steps(dsn, directory, facts)
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
        psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as fault:
        raise UsageFault(f"--dsn: {_one_line(fault)}") from None
    try:
        name = "pooler init"
        with psycopg.connect(dsn, connect_timeout=CONNECT_SECONDS_MAX, application_name=name) as server:
            row = server.execute(_FACTS_SQL).fetchone()
            assert row is not None  # a SELECT without FROM has one row
            facts = _facts(server, row)
            return facts, _logins(server, facts)
    except psycopg.Error as fault:
        raise FleetUnreachable(f"the server cannot be read: {_one_line(fault)}") from None


def _facts(server: psycopg.Connection[Any], row: tuple[Any, ...]) -> ServerFacts:
    from pooler.cli.first_files import ServerFacts

    version, most, superuser_reserved, reserved, others, in_recovery, dbname, user, is_superuser = row
    return ServerFacts(
        _hosts(server), dbname, user, is_superuser, version, most, superuser_reserved, reserved, others,
        in_recovery)


def _hosts(server: psycopg.Connection[Any]) -> list[str]:
    """host:port of each host of the DSN; one reached by a unix socket is named by loopback."""
    given = server.info.get_parameters()
    names, ports = given.get("host", "").split(","), given.get("port", "").split(",")
    found = []
    for number, name in enumerate(names):
        port = (ports[number] if number < len(ports) else ports[-1]) or str(server.info.port)
        host = "127.0.0.1" if not name or name.startswith(("/", "@")) else name
        found.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return found


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


def next_steps(dsn: str, directory: Path, facts: ServerFacts) -> list[str]:
    """The commands that follow, ready to paste; the password of the DSN is left out."""
    import shlex

    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    words: dict[str, Any] = {key: value for key, value in conninfo_to_dict(dsn).items() if key != "password"}
    shown = make_conninfo(**words)
    config = shlex.quote(str(directory / "pooler.yaml"))
    service = 5434 if facts.in_recovery else 5433
    return [
        f"psql {shlex.quote(shown)} -f {shlex.quote(str(directory / 'roles.sql'))}    # as a superuser",
        f"pooler config check {config}",
        f"pooler fleet run -c {config}",
        f"haproxy -f {shlex.quote(str(directory / 'haproxy.cfg'))}    # or clients come in by port 6432",
        f"psql -h 127.0.0.1 -p {service} -d {shlex.quote(facts.dbname)}    # users are those of userlist.txt",
    ]


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
