"""The files of a first fleet, from what a server says of itself. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pooler.errors import PoolerError

ADMIN_RESERVE_MAX = 10
INTERACTIVE_SHARE = 0.75
_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class ServerTooSmall(PoolerError):
    """The server has no room for a fleet: says the numbers."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was read from the server. `others` are its client sessions of now, ours left out."""

    hosts: Sequence[str]
    dbname: str
    user: str
    is_superuser: bool
    version: int  # server_version_num
    max_connections: int
    superuser_reserved: int
    reserved: int  # reserved_connections, from version 16
    others: int
    in_recovery: bool
    superuser: str = "postgres"  # one that may log in
    upstream: tuple[str, int] | None = None  # of a standby: where it streams from, if we may know
    reached: tuple[str, int] | None = None  # host and port of this connection, as libpq names them
    by_socket: bool = False  # the DSN came by a unix socket; `hosts` has what it listens on beside

    @property
    def ordinary(self) -> int:
        """Connections the server gives to ordinary roles."""
        return self.max_connections - self.superuser_reserved - self.reserved


@dataclass(frozen=True, slots=True)
class Login:
    """A role that init makes up or takes over; `verifier` is its SCRAM secret for CREATE ROLE."""

    name: str
    password: str
    verifier: str
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write, with its mode."""

    name: str
    text: str
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Budget:
    """How the server's ordinary connections are divided."""

    permits: int
    admin_reserve: int
    others: int


def divide(facts: ServerFacts) -> Budget:
    """Leave what others use now and a reserve for commands; the rest is the fleet's.

    Raises ServerTooSmall.
    """
    admin = max(1, min(ADMIN_RESERVE_MAX, facts.ordinary // 20))
    permits = facts.ordinary - admin - facts.others
    if permits < 2:
        raise ServerTooSmall(
            f"the server gives {facts.ordinary} ordinary connections, others use {facts.others} now and "
            f"commands need {admin}: nothing is left (raise max_connections, or end those sessions)")
    return Budget(permits, admin, facts.others)


def first_files(facts: ServerFacts, app: Login, monitor: Login, console: Login) -> list[NewFile]:
    """pooler.yaml, its policy, the userlist, the monitor's secret, roles.sql, and a libpq password file."""
    budget = divide(facts)
    word = _word(facts.dbname)
    return [
        NewFile("pooler.yaml", _config(facts, word, budget, monitor)),
        NewFile(f"policies/{word}.yaml", _policy(facts, word, budget)),
        NewFile("userlist.txt", _userlist(app, console), 0o600),
        NewFile("monitor.secret", monitor.password + "\n", 0o600),
        NewFile("pgpass", _pgpass(app, console), 0o600),
        NewFile("roles.sql", _roles(facts, budget, app, monitor), 0o600),
    ]


def _word(name: str) -> str:
    """A fleet's or file's name out of a database's."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:24] or "fleet"


def _role_of(facts: ServerFacts) -> str:
    return "read" if facts.in_recovery else "write"


def _ledger(facts: ServerFacts, word: str) -> str:
    return f"{word}-replica/read" if facts.in_recovery else f"{word}-primary/write"


def _config(facts: ServerFacts, word: str, budget: Budget, monitor: Login) -> str:
    service = "replica" if facts.in_recovery else "primary"
    note = "\n# The DSN came by a unix socket: other hosts need an address of this server that they reach." \
        if facts.by_socket else ""
    hosts = ", ".join(_yaml(host) for host in facts.hosts)
    return f"""\
# Written by `pooler init` for the server at {', '.join(facts.hosts)}. `pooler config check` checks it.{note}
fleet:
  name: {_yaml(word)}
  listen: 127.0.0.1:6432              # shared by all workers: databases by name
  proxy_protocol_from: [127.0.0.1]    # where HAProxy connects from

# Worker i listens on worker_ports + i of each service; HAProxy (haproxy.cfg) stands in front.
services:
  {service}: {{worker_ports: 6440, database_role: {_role_of(facts)}, pool_mode: transaction}}
  default: {{worker_ports: 6480, database_role: {_role_of(facts)}, pool_mode: session}}

# An etcd of its own is enough for one host. A fleet of several hosts names the etcd they share:
# etcd: {{endpoints: ["10.0.0.21:2379", "10.0.0.22:2379", "10.0.0.23:2379"]}}
etcd: embedded

databases:
  {_yaml(facts.dbname)}:
    hosts: [{hosts}]
    role: {_role_of(facts)}
    policy: policies/{word}.yaml
    monitor: {{user: {_yaml(monitor.name)}, password: "file:monitor.secret"}}

auth: {{type: scram-sha-256, file: userlist.txt}}

pool:
  default_pool_size: {min(20, budget.permits)}   # for each (database, user), over the whole fleet
  query_wait_timeout: 120s
  max_client_conn: 1000

admin: {{users: [admin]}}

http: {{listen: 127.0.0.1:9180, worker_ports: 9600, agent_ports: 9700}}

log: {{format: json, level: info}}
"""


def _policy(facts: ServerFacts, word: str, budget: Budget) -> str:
    interactive = max(1, int(budget.permits * INTERACTIVE_SHARE))
    batch = budget.permits - interactive
    reserved = f", reserved_connections {facts.reserved}" if facts.reserved else ""
    return f"""\
# The server has max_connections {facts.max_connections}, superuser_reserved_connections \
{facts.superuser_reserved}{reserved};
# {facts.others} other sessions were connected when this was written.
schema: dbAdmissionPolicy.v1
database: {_ledger(facts, word)}
generation: 1
serverSessionPermits: {budget.permits}
adminReserve: {budget.admin_reserve}
otherClients: {budget.others}
executionClasses:
  interactive: {{permits: {interactive}, maxQueue: 800}}
  batch: {{permits: {batch}, maxQueue: 100}}
fairness: weighted-deficit-v2
"""


def _userlist(app: Login, console: Login) -> str:
    lines = ["; who may log in to the fleet; the same secret logs the user in to the server"]
    lines += [f'"{_doubled(login.name)}" "{_doubled(login.password)}"' for login in (app, console)]
    return "\n".join(lines) + "\n"


def _pgpass(app: Login, console: Login) -> str:
    """libpq's password file (PGPASSFILE) for clients of the fleet on this host."""
    lines = [(_escaped(login.name), _escaped(login.password)) for login in (app, console)]
    return "".join(f"127.0.0.1:*:*:{name}:{password}\n" for name, password in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")


def _roles(facts: ServerFacts, budget: Budget, app: Login, monitor: Login) -> str:
    database = sql_identifier(facts.dbname)
    lines = [
        "-- Written by `pooler init`: run it once on the primary, as a superuser.",
        "-- It may be run again. What it has of passwords are SCRAM verifiers.",
        *_role(monitor, connection_limit=budget.admin_reserve + 2),
        f"GRANT pg_monitor TO {sql_identifier(monitor.name)};",
        f"GRANT CONNECT ON DATABASE {database} TO {sql_identifier(monitor.name)};",
    ]
    lines += ["-- Only with `failover: {reconcile: terminate}`, or to use `pooler fleet fence`:",
              f"-- GRANT pg_signal_backend TO {sql_identifier(monitor.name)};"]
    if facts.version >= 160000:
        lines.append(f"GRANT pg_use_reserved_connections TO {sql_identifier(monitor.name)};")
    if app.is_new:
        lines += [*_role(app, connection_limit=budget.permits),
                  f"GRANT CONNECT ON DATABASE {database} TO {sql_identifier(app.name)};"]
    else:
        lines.append(f"ALTER ROLE {sql_identifier(app.name)} CONNECTION LIMIT {budget.permits};")
    return "\n".join(lines) + "\n"


def _role(login: Login, connection_limit: int) -> list[str]:
    name = sql_identifier(login.name)
    return [
        "DO $$ BEGIN",
        f"  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {_literal(login.name)}) THEN",
        f"    CREATE ROLE {name};",
        "  END IF;",
        "END $$;",
        f"ALTER ROLE {name} LOGIN CONNECTION LIMIT {connection_limit} PASSWORD {_literal(login.verifier)};",
    ]


def sql_identifier(name: str) -> str:
    """A name as SQL has it, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _doubled(text: str) -> str:
    return text.replace('"', '""')


def _yaml(text: str) -> str:
    """A YAML scalar, in double quotes unless it is a plain word."""
    plain = re.fullmatch(r"[a-z][a-z0-9_-]*", text) and text not in _YAML_WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)
