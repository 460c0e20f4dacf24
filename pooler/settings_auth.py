"""How clients log in, as a config names it, and what each `auth.type` needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from pooler.wire.auth import LDAP_INSTEAD

if TYPE_CHECKING:
    from pooler.settings_models import AuthSettings, DatabaseSettings
    from pooler.settings_tls import ClientTlsSettings

Found = tuple[str, str]
NEEDS_SECRETS = frozenset({"password", "md5", "scram-sha-256"})


def _auth_method(value: object) -> object:
    """PgBouncer's `plain` is our `password`."""
    if value == "ldap":
        raise ValueError(f"ldap is not served: {LDAP_INSTEAD}")
    return "password" if value == "plain" else value


AuthMethod = Annotated[
    Literal["trust", "any", "password", "md5", "scram-sha-256", "cert", "hba", "peer", "pam"],
    BeforeValidator(_auth_method)]


def auth_faults(
    auth: AuthSettings,
    databases: Mapping[str, DatabaseSettings] | None,
    client_tls: ClientTlsSettings | None = None,
    *,
    as_pgbouncer: bool = False,
) -> Iterator[Found]:
    """(path, what is wrong) of the `auth` section, and of `databases` and `client_tls` where they contradict
    it. `as_pgbouncer`: which query and place of it are asked is looked at when a client comes."""
    every = databases or {}
    asks = auth.user is not None or any(each.auth_user is not None for each in every.values())
    if auth.type in NEEDS_SECRETS and auth.file is None and not asks:
        yield ("auth.file", f"is required with auth.type {auth.type}: the file with users and their secrets "
                            "(or auth.user, who asks the server for them)")
    if auth.type == "hba" and auth.hba_file is None:
        yield "auth.hba_file", "is required with auth.type hba: the file with the rules"
    if auth.type == "cert" and client_tls is not None and client_tls.ca_file is None:
        yield "client_tls.ca_file", "is required with auth.type cert: who may sign clients' certificates"
    if auth.map is not None and auth.ident_file is None:
        yield "auth.map", "needs auth.ident_file: the file with the maps"
    if auth.password is not None and auth.user is None:
        yield "auth.password", "needs auth.user: it is the password of that user"
    if not as_pgbouncer:
        yield from _queries("auth.query", auth.query)
        yield from _places("auth.dbname", auth.dbname, every)
    for name, database in every.items():
        if not as_pgbouncer:
            yield from _queries(f"databases.{name}.auth_query", database.auth_query)
            yield from _places(f"databases.{name}.auth_dbname", database.auth_dbname, every)
        if auth.type == "any" and database.user is None:
            yield (f"databases.{name}.user", "is required with auth.type any: the names that clients give "
                                             "mean nothing then")


def _queries(path: str, query: str | None) -> Iterator[Found]:
    if query is not None and "$1" not in query:
        yield path, "must name the user as $1"


def _places(path: str, name: str | None, databases: Mapping[str, DatabaseSettings]) -> Iterator[Found]:
    if name is not None and databases and name not in databases and "*" not in databases:
        yield path, f'there is no "{name}" under databases'
