"""The console where it stands for PgBouncer's: the columns, texts and codes scripts rely on. Pure.

Source: consoles of PgBouncer 1.18 and 1.25, asked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import Final

from pooler.console.commands import Act, Answer, Command, Nothing, Unknown, parse_commands
from pooler.console.desk import Refused
from pooler.console.manner import Manner
from pooler.console.tables import COLUMNS, Rows, columns_for
from pooler.errors import LoginRefused, NotServing, PoolerError, TooManyClients
from pooler.net.server_auth import NO_ANSWER
from pooler.wire.messages import Column

PGBOUNCER: Final = "1.25.2"  # the version whose answers these are
VERSION: Final = f"PgBouncer {PGBOUNCER} (pooler {version('pooler')})"
GREETED: Final = (
    ("server_version", f"{PGBOUNCER}/bouncer"), ("client_encoding", "UTF8"), ("server_encoding", "UTF8"),
    ("DateStyle", "ISO"), ("TimeZone", "GMT"), ("standard_conforming_strings", "on"), ("is_superuser", "on"),
)  # fmt: skip
PROTOCOL_VIOLATION: Final = "08P01"  # the code of all its refusals but one
CONFIG_FILE_ERROR: Final = "F0000"
_OURS: Final = frozenset({"tenant", "class", "service", "worker", "permit", "epoch", "source"})
_OWN_ITEMS: Final = frozenset({"ledger", "workers"})
_FIXED: Final = {  # what it says a session has, and that a SET of it is ignored
    "client_encoding": "UTF-8", "datestyle": "ISO", "default_transaction_isolation": "read committed",
    "standard_conforming_strings": "on", "timezone": "GMT",
}  # fmt: skip
_NEEDS_DATABASE: Final = re.compile(r"\s*(?:disable|enable)[\s;]*", re.IGNORECASE)
_SET_KEY: Final = re.compile(r"\s*set\s+(?:session\s+|local\s+)?(\w+)", re.IGNORECASE)
_HELP: Final = """\
Console usage

\tSHOW HELP|CONFIG|DATABASES|POOLS|CLIENTS|SERVERS|USERS|VERSION
\tSHOW PEERS|PEER_POOLS
\tSHOW FDS|SOCKETS|ACTIVE_SOCKETS|LISTS|MEM|STATE
\tSHOW DNS_HOSTS|DNS_ZONES
\tSHOW STATS|STATS_TOTALS|STATS_AVERAGES|TOTALS
\tSET key = arg
\tRELOAD
\tPAUSE [<db>]
\tRESUME [<db>]
\tDISABLE <db>
\tENABLE <db>
\tRECONNECT [<db>]
\tKILL [<db>]
\tKILL_CLIENT <client_id>
\tSUSPEND
\tSHUTDOWN
\tSHUTDOWN WAIT_FOR_SERVERS|WAIT_FOR_CLIENTS
\tWAIT_CLOSE [<db>]"""


def columns(item: str, rows: Rows) -> tuple[Column, ...]:
    """PgBouncer's own, whatever the rows have besides; our own items keep theirs."""
    if item in _OWN_ITEMS:
        return columns_for(item, rows)
    return tuple(column for column in COLUMNS[item] if column.name not in _OURS)


def parse(text: str) -> list[Command]:
    """What cannot be understood is refused in PgBouncer's words, with the whole text."""
    if _NEEDS_DATABASE.fullmatch(text):
        return [Unknown("a database is required", "", PROTOCOL_VIOLATION)]
    found = [_as_said(each, text) for each in parse_commands(text, version=VERSION)]
    return found or [Unknown(_invalid(text), "", PROTOCOL_VIOLATION)]


def _as_said(command: Command, text: str) -> Command:
    if isinstance(command, Unknown):
        return Unknown(_invalid(text), "", PROTOCOL_VIOLATION)
    if isinstance(command, Answer) and command.column in _FIXED and command.tag == "SHOW":
        return Answer(command.column, _FIXED[command.column], command.tag)
    if command == Nothing("SET"):
        named = _SET_KEY.match(text)
        if named is not None and named[1].lower() in _FIXED:
            return Nothing("SET", notice="SET ignored")
    return command


def reworded(command: Command, error: PoolerError) -> PoolerError:
    """PgBouncer's text where it has one, and its code always."""
    name = command.name if isinstance(command, Act) else ""
    code = getattr(error, "code", error.sqlstate)
    if name == "reload" and code == CONFIG_FILE_ERROR:
        return Refused("RELOAD failed, see logs for additional details", code=CONFIG_FILE_ERROR)
    if code == "42501":
        return _refused("admin access needed")
    if name == "set":
        return _refused("SET failed")
    if name == "kill_client" and isinstance(command, Act):
        client = dict(command.arguments).get("client", "")
        return _refused("client not found" if client.isdecimal() else "invalid client pointer supplied")
    return _refused(str(error))


_LOGINS: Final = (  # ours, and PgBouncer's text for it
    (re.compile(r'database "(.+)" does not exist'), r"no such database: \1"),
    (re.compile(r'role ".*" does not exist'), '"trust" authentication failed'),
    (re.compile(r'user ".*" may not use the admin console'), "not allowed"),
    (re.compile(r"the (pooler is shutting down)"), r"\1"),
    (re.compile(r'unsupported switch .* in startup parameter "options": .*'),
     "unsupported options startup parameter: only '-c config=val' and '--config=val' are allowed"),
    (re.compile(r"-.+ requires a value"),
     "unsupported options startup parameter: only '-c config=val' and '--config=val' are allowed"),
    (re.compile(r"users cannot be looked up now: .*"), "bouncer config error"),
    (re.compile(r'(no such database: .*|database ".*" is disabled|no more connections allowed.*)'), r"\1"),
)


def reworded_login(error: PoolerError, auth_type: str) -> PoolerError:
    """What a client is told that is not let in: PgBouncer's text and code where it has one, else ours."""
    if NO_ANSWER in str(error) and not getattr(error, "server_error", b""):
        return LoginRefused("server login failed: wrong password type", PROTOCOL_VIOLATION)
    if not isinstance(error, LoginRefused | NotServing | TooManyClients):
        return error  # the server's own words
    if isinstance(error, LoginRefused) and str(error).startswith("password authentication failed for user"):
        asked = "SASL" if auth_type == "scram-sha-256" else "password"
        return LoginRefused(f"{asked} authentication failed", error.code)
    if auth_type != "hba" and str(error).startswith("no pg_hba.conf entry"):
        return LoginRefused("SSL required", PROTOCOL_VIOLATION)
    for ours, theirs in _LOGINS:
        found = ours.fullmatch(str(error))
        if found is not None:
            return LoginRefused(found.expand(theirs), PROTOCOL_VIOLATION)
    return error


def check_startup(start: Iterable[bytes], parameters: Iterable[str], kept: Collection[str]) -> None:
    """Raises LoginRefused for a setting that PgBouncer would not take to a server. `start`: those that a
    client begins with, of which `parameters` are no part of its `options`; `kept`: in lower case."""
    own = {name.lower() for name in parameters}
    for each in start:
        name = each.decode(errors="replace")
        if name.lower() not in kept:
            where = "" if name.lower() in own else " in options"
            raise LoginRefused(f"unsupported startup parameter{where}: {name}", PROTOCOL_VIOLATION)


def _invalid(text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:197]}..."
    return f"invalid command '{shown}', use SHOW HELP;"


def _refused(text: str) -> Refused:
    return Refused(text, code=PROTOCOL_VIOLATION)


def _help() -> str:
    return _HELP


AS_PGBOUNCER: Final = Manner(VERSION, GREETED, parse, columns, reworded, _help)
