"""Every setting of PgBouncer 1.25: its kind, its default, if a reload takes it, what it is with us. Pure.

Source: PgBouncer 1.25's config page and the table of its main.c. `ours` is a path in pooler.yaml; where our
settings have no such path, `why` says what becomes of it. The importer, the drop-in and the documents read
this one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["text", "file", "whole", "time", "milliseconds", "flag", "words", "choice"]

CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "auth_type": ("any", "trust", "plain", "md5", "cert", "hba", "ldap", "pam", "scram-sha-256"),
    "pool_mode": ("session", "transaction", "statement"),
    "load_balance_hosts": ("disable", "round-robin"),
    "client_tls_sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "server_tls_sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
}
AUTH_QUERY: Final = (
    "SELECT rolname, CASE WHEN rolvaliduntil < now() THEN NULL ELSE rolpassword END "
    "FROM pg_authid WHERE rolname=$1 AND rolcanlogin"
)


@dataclass(frozen=True, slots=True)
class Known:
    """One setting. `default` None: unset. `ours`: a path in pooler.yaml, or empty; then `why` is the reason
    (a path that our settings do not have counts as empty, too)."""

    name: str
    kind: Kind
    default: str | None
    reloadable: bool = True
    ours: str = ""
    why: str = ""


def _pool(name: str, kind: Kind, default: str, why: str = "", *, reloadable: bool = True) -> Known:
    """One that has its name under `pool`, unless this version does not have it yet."""
    return Known(name, kind, default, reloadable, f"pool.{name}", why or "this version has no such limit yet")


_LOG = "every event is in the log at its level: choose with log.level"
_TLS13 = "Python chooses the ciphers of TLS 1.3 itself; the setting of protocols can leave that version out"
_DNS = "names are resolved by the system at every connect: nothing is cached"
_KERNEL = "left to the kernel"

SETTINGS: Final[tuple[Known, ...]] = (
    Known("admin_users", "words", "", ours="admin.users"),
    _pool("application_name_add_host", "flag", "0", "SHOW CLIENTS has the address"),
    Known("auth_dbname", "text", None, ours="auth.dbname"),
    Known("auth_file", "file", None, ours="auth.file"),
    Known("auth_hba_file", "file", "", ours="auth.hba_file"),
    Known("auth_ident_file", "file", None, ours="auth.ident_file"),
    Known("auth_ldap_options", "text", None, ours="auth.ldap_options",
          why="ldap is not asked: pam reaches a directory"),
    Known("auth_query", "text", AUTH_QUERY, ours="auth.query"),
    Known("auth_type", "choice", "md5", ours="auth.type"),
    Known("auth_user", "text", None, ours="auth.user"),
    _pool("autodb_idle_timeout", "time", "3600", "what the fallback database `*` made is kept"),
    _pool("cancel_wait_timeout", "time", "10"),
    _pool("client_idle_timeout", "time", "0"),
    _pool("client_login_timeout", "time", "60"),
    Known("client_tls13_ciphers", "text", None, why=_TLS13),
    Known("client_tls_ca_file", "file", "", ours="client_tls.ca_file"),
    Known("client_tls_cert_file", "file", "", ours="client_tls.cert_file"),
    Known("client_tls_ciphers", "text", "default", ours="client_tls.ciphers"),
    Known("client_tls_dheparams", "text", "auto", ours="client_tls.dheparams"),
    Known("client_tls_ecdhcurve", "text", "auto", ours="client_tls.ecdhcurve"),
    Known("client_tls_key_file", "file", "", ours="client_tls.key_file"),
    Known("client_tls_protocols", "text", "secure", ours="client_tls.protocols"),
    Known("client_tls_sslmode", "choice", "disable", ours="client_tls.sslmode"),
    Known("conffile", "file", None, why="it is the file that was given"),
    _pool("default_pool_size", "whole", "20"),
    _pool("disable_pqexec", "flag", "0", "several statements in one query are let through", reloadable=False),
    Known("dns_max_ttl", "time", "15", why=_DNS),
    Known("dns_nxdomain_ttl", "time", "15", why=_DNS),
    Known("dns_zone_check_period", "time", "0", why=_DNS),
    _pool("idle_transaction_timeout", "time", "0"),
    _pool("ignore_startup_parameters", "words", ""),
    Known("job_name", "text", "pgbouncer", reloadable=False, why="it names a service of another system"),
    Known("listen_addr", "words", "", reloadable=False, ours="fleet.listen"),
    Known("listen_backlog", "whole", "128", reloadable=False, ours="fleet.listen_backlog"),
    Known("listen_port", "whole", "6432", reloadable=False, ours="fleet.listen"),
    Known("log_connections", "flag", "1", why=_LOG),
    Known("log_disconnections", "flag", "1", why=_LOG),
    Known("log_pooler_errors", "flag", "1", why=_LOG),
    Known("log_stats", "flag", "1", why="figures are at /metrics and in SHOW STATS, not in the log"),
    Known("logfile", "file", "", why="the log goes to stderr: let the service manager keep it"),
    _pool("max_client_conn", "whole", "100"),
    _pool("max_db_client_connections", "whole", "0"),
    _pool("max_db_connections", "whole", "0",
          "the policy's serverSessionPermits limit a database: they are set to it"),
    _pool("max_packet_size", "whole", "2147483647", "messages pass in pieces and are not limited"),
    _pool("max_prepared_statements", "whole", "200"),
    _pool("max_user_client_connections", "whole", "0"),
    _pool("max_user_connections", "whole", "0"),
    _pool("min_pool_size", "whole", "0"),
    Known("peer_id", "whole", "0", ours="fleet.peer_id"),
    Known("pidfile", "file", "", reloadable=False, why="fleet.run_dir has the pid"),
    _pool("pkt_buf", "whole", "4096", reloadable=False),
    _pool("pool_mode", "choice", "session"),
    _pool("query_timeout", "time", "0"),
    _pool("query_wait_notify", "whole", "5", "a client that waits is not told so"),
    _pool("query_wait_timeout", "time", "120"),
    _pool("reserve_pool_size", "whole", "0"),
    _pool("reserve_pool_timeout", "time", "5"),
    Known("resolv_conf", "file", "", reloadable=False, why=_DNS),
    Known("sbuf_loopcnt", "whole", "5", why="a busy connection gives way by time, not by count"),
    Known("scram_iterations", "whole", "4096", ours="auth.scram_iterations", why="secrets stay as stored"),
    _pool("server_check_delay", "time", "30"),
    _pool("server_check_query", "text", "<empty>"),
    _pool("server_connect_timeout", "time", "15"),
    _pool("server_fast_close", "flag", "0", "a session is closed once its client has done with it"),
    _pool("server_idle_timeout", "time", "600"),
    _pool("server_lifetime", "time", "3600"),
    _pool("server_login_retry", "time", "15"),
    _pool("server_reset_query", "text", "DISCARD ALL"),
    _pool("server_reset_query_always", "flag", "0"),
    _pool("server_round_robin", "flag", "0", "the session used last is used next"),
    Known("server_tls13_ciphers", "text", None, why=_TLS13),
    Known("server_tls_ca_file", "file", "", ours="server_tls.ca_file"),
    Known("server_tls_cert_file", "file", "", ours="server_tls.cert_file"),
    Known("server_tls_ciphers", "text", "default", ours="server_tls.ciphers"),
    Known("server_tls_key_file", "file", "", ours="server_tls.key_file"),
    Known("server_tls_protocols", "text", "secure", ours="server_tls.protocols"),
    Known("server_tls_sslmode", "choice", "prefer", ours="server_tls.sslmode"),
    Known("so_reuseport", "flag", "0", reloadable=False, ours="fleet.reuse_port"),
    Known("stats_period", "whole", "60", why="averages are over 60 s"),
    Known("stats_users", "words", "", ours="admin.stats_users"),
    _pool("suspend_timeout", "time", "10", "SUSPEND has nothing to write first: it holds at once"),
    Known("syslog", "flag", "0", why="the log goes to stderr: let the service manager pass it on"),
    Known("syslog_facility", "text", "daemon", why="see syslog"),
    Known("syslog_ident", "text", "pgbouncer", why="see syslog"),
    Known("tcp_defer_accept", "whole", "1", why=_KERNEL),
    _pool("tcp_keepalive", "flag", "1"),
    _pool("tcp_keepcnt", "whole", "0"),
    _pool("tcp_keepidle", "whole", "0"),
    _pool("tcp_keepintvl", "whole", "0"),
    Known("tcp_socket_buffer", "whole", "0", why=_KERNEL),
    _pool("tcp_user_timeout", "milliseconds", "0", _KERNEL),
    _pool("track_extra_parameters", "words", "IntervalStyle", reloadable=False),
    _pool("transaction_timeout", "time", "0"),
    Known("unix_socket_dir", "file", "/tmp", reloadable=False, ours="fleet.unix_socket_dir"),
    Known("unix_socket_group", "text", "", reloadable=False, ours="fleet.unix_socket_group"),
    Known("unix_socket_mode", "whole", "0777", reloadable=False, ours="fleet.unix_socket_mode"),
    Known("user", "text", None, reloadable=False, why="let the service manager start it as that user"),
    Known("verbose", "whole", "0", ours="log.level"),
)
BY_NAME: Final = {known.name: known for known in SETTINGS}

# keys of connection strings: kind, and what is told where our settings have no such key
DATABASE_KEYS: Final[dict[str, Kind]] = {
    "dbname": "text", "host": "text", "port": "whole", "user": "text", "password": "text",
    "auth_user": "text", "auth_query": "text", "auth_dbname": "text", "pool_size": "whole",
    "min_pool_size": "whole", "reserve_pool_size": "whole", "reserve_pool": "whole",
    "connect_query": "text", "pool_mode": "choice", "load_balance_hosts": "choice",
    "max_db_connections": "whole", "max_db_client_connections": "whole", "server_lifetime": "time",
    "client_encoding": "text", "datestyle": "text", "timezone": "text", "application_name": "text",
    "query_wait_timeout": "time",
}
USER_KEYS: Final[dict[str, Kind]] = {
    "pool_size": "whole", "reserve_pool_size": "whole", "pool_mode": "choice",
    "max_user_connections": "whole", "max_user_client_connections": "whole", "query_timeout": "time",
    "idle_transaction_timeout": "time", "transaction_timeout": "time", "client_idle_timeout": "time",
    "query_wait_timeout": "time",
}
PEER_KEYS: Final[dict[str, Kind]] = {"host": "text", "port": "whole", "pool_size": "whole"}
ALIASES: Final = {"reserve_pool": "reserve_pool_size"}
# `query_wait_timeout` of entries, `login_notify_message` and `pool_idle_timeout` came after 1.25.2
LATER: Final = {
    "login_notify_message": Known("login_notify_message", "text", "", ours="pool.login_notify_message",
                                  why="nothing is said at login"),
    "pool_idle_timeout": _pool("pool_idle_timeout", "time", "0", "pools that are idle are kept"),
}
RUNTIME: Final = frozenset({  # what SET changes while running
    "admin_users", "auth_dbname", "auth_type", "auth_user", "cancel_wait_timeout", "client_idle_timeout",
    "client_tls13_ciphers", "client_tls_ca_file", "client_tls_cert_file", "client_tls_key_file",
    "client_tls_sslmode", "default_pool_size", "idle_transaction_timeout", "ignore_startup_parameters",
    "max_client_conn", "max_db_client_connections", "max_prepared_statements",
    "max_user_client_connections", "pool_idle_timeout", "pool_mode", "query_timeout", "query_wait_timeout",
    "reserve_pool_size", "reserve_pool_timeout", "server_check_delay", "server_connect_timeout",
    "server_fast_close", "server_idle_timeout", "server_lifetime", "server_login_retry",
    "server_tls_ca_file", "server_tls_cert_file", "server_tls_key_file", "server_tls_sslmode",
    "stats_users", "tcp_user_timeout", "transaction_timeout", "verbose",
})  # fmt: skip
