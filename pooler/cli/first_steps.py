"""What comes after `pooler init`: the commands, each ready to be pasted into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pooler.cli.first_files import ServerFacts

FLEET_PORT = 6432  # as first_files writes it
_SECRETS = frozenset({"password", "sslpassword"})
_SBIN = ("/usr/sbin", "/usr/local/sbin")


def next_steps(dsn: str, directory: Path, facts: ServerFacts, *, app: str, console: str) -> list[str]:
    """One command each; what is to be known about it follows as a comment. No password is among them."""
    from pooler.typed import pooler_command

    pooler, config = pooler_command(), _quoted(directory / "pooler.yaml")
    as_client = f"PGPASSFILE={_quoted(directory / 'pgpass')} psql -h 127.0.0.1"
    service = 5434 if facts.in_recovery else 5433
    return [
        f"psql -X -1 -v ON_ERROR_STOP=1 -f {_quoted(directory / 'roles.sql')} "
        f"{shlex.quote(superuser_dsn(dsn, facts))}    # {_about_roles(facts)}",
        f"{pooler} config check {config}",
        f"{pooler} fleet run -c {config}    # stays in the foreground: go on in another terminal",
        f"{as_client} -p {FLEET_PORT} -U {shlex.quote(app)} -d {shlex.quote(facts.dbname)}",
        f"{as_client} -p {FLEET_PORT} -U {shlex.quote(console)} -d pooler -c 'SHOW POOLS'",
        f"{_haproxy()} -f {_quoted(directory / 'haproxy.cfg')}    # if wanted; in the foreground, too",
        f"{as_client} -p {service} -U {shlex.quote(app)} -d {shlex.quote(facts.dbname)}    # through HAProxy",
    ]


def superuser_dsn(dsn: str, facts: ServerFacts) -> str:
    """The DSN for the primary as a superuser, its secrets left out: libpq asks for the password."""
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    given = conninfo_to_dict(dsn).items()
    words: dict[str, Any] = {key: value for key, value in given if key not in _SECRETS}
    words |= {"user": facts.superuser, "dbname": facts.dbname}
    if "," in str(words.get("host", "")):
        words["target_session_attrs"] = "read-write"
    elif facts.in_recovery:
        host, port = facts.upstream or ("PRIMARY", 5432)
        words |= {"host": host, "port": port}
        for of_the_standby in ("hostaddr", "target_session_attrs"):
            words.pop(of_the_standby, None)
    elif facts.reached is not None:  # in words: psql's own default, or the environment, may be another
        words["host"], words["port"] = facts.reached
    return make_conninfo(**words)


def _about_roles(facts: ServerFacts) -> str:
    who = "as a superuser" if facts.is_superuser else f"as a superuser, such as {facts.superuser}"
    if facts.in_recovery and facts.upstream is None:
        return f"{who}; put the primary's host for PRIMARY"
    return who


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _haproxy() -> str:
    """It stands where the PATH of an ordinary user may not look."""
    if shutil.which("haproxy"):
        return "haproxy"
    return shutil.which("haproxy", path=os.pathsep.join(_SBIN)) or "haproxy"
