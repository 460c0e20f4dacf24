"""A PgBouncer ini as a pooler config: every setting that has a counterpart, and a note on each that has none.
Pure.

Defaults are written out, because ours are not always PgBouncer's. What a value cannot be with us is said with
the line it stands on; what must not be ignored (how clients log in, whether they are encrypted) is a note
that is `grave`, which an import tells and a drop-in refuses to start over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pooler.dropin.carry_databases import Databases
from pooler.dropin.fields import allowed_words, as_field, field_at
from pooler.dropin.notes import Note, Notes
from pooler.dropin.reading import Bouncer, Setting
from pooler.settings_inert import INERT
from pooler.wire.auth import LDAP_INSTEAD

_OWN_WAY = frozenset({  # built by hand below
    "listen_addr", "listen_port", "unix_socket_dir", "auth_type", "auth_file", "verbose", "min_pool_size",
    "conffile",
})  # fmt: skip
_MAY_BE_EMPTY = frozenset({"server_reset_query", "server_check_query"})
HONOURED = frozenset({  # what a drop-in does itself
    "job_name", "logfile", "pidfile", "syslog", "syslog_facility", "syslog_ident", "user",
})  # fmt: skip
_AUTH_WORDS = {"plain": ("password", "plain")}  # ours: the first that this version has
_UNENCRYPTED = ("disable", "allow", "prefer")
_TLS_HARMLESS = {"client_tls_sslmode": _UNENCRYPTED, "server_tls_sslmode": _UNENCRYPTED}


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What an ini does not say. `base`: the folder that relative paths begin at. `auth_file`: the userlist
    where the ini names none, or one that does not exist. `more` is merged into the sections of the config."""

    base: Path
    fleet: str
    auth_file: Path
    users: int = 1  # in the auth_file, for the number of permits
    as_pgbouncer: bool = False
    has_ipv6: bool = False
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Carried:
    """`config` is the content of pooler.yaml, `policies` are file names and contents; both may hold secrets
    and are never shown."""

    config: dict[str, Any] = field(repr=False)
    policies: dict[str, dict[str, Any]]
    notes: tuple[Note, ...]

    @property
    def grave(self) -> tuple[Note, ...]:
        """What must not be ignored."""
        return tuple(note for note in self.notes if note.grave)


def carry(bouncer: Bouncer, given: Circumstances) -> Carried:
    """The config that does what this ini does, as far as this version can."""
    notes = Notes()
    config: dict[str, Any] = {
        "fleet": {"name": given.fleet}, "etcd": {"embedded": True}, "databases": {}, "auth": {}, "pool": {},
        "admin": {}, "log": {},
    }
    by_caller = HONOURED if given.as_pgbouncer else frozenset()
    for setting in bouncer.settings.values():
        if setting.known.name not in _OWN_WAY | by_caller:
            _carry_setting(config, setting, given, notes)
    _listen(config["fleet"], bouncer, given, notes)
    _auth(config, bouncer, given, notes)
    _pools(config["pool"], bouncer, notes)
    config["log"]["level"] = "debug" if bouncer.whole("verbose") > 0 else "info"
    if given.as_pgbouncer:
        config["admin"]["as_pgbouncer"] = True
    databases = Databases(bouncer, given.users, unlimited=given.as_pgbouncer)
    config["databases"], policies = databases.carry(notes)
    _users(config, bouncer, notes)
    for peer in bouncer.peers.values() if not given.as_pgbouncer else ():
        notes.lost(peer.place, f"[peers] {peer.name}", "workers of one ledger find each other unaided: "
                                                       "let them share one etcd")
    for section, values in given.more.items():
        config.setdefault(section, {}).update(values)
    return Carried(config, policies, tuple(notes.found))


def _carry_setting(config: dict[str, Any], setting: Setting, given: Circumstances, notes: Notes) -> None:
    known = setting.known
    target = field_at(known.ours) if known.ours else None
    if target is None:
        _note_lost(setting, notes)
        return
    if setting.place is None and (known.name == "auth_query" or INERT.get(known.ours, "works") is None):
        return  # it is asked only where an auth_user is set, and ours is the same; or it does nothing
    if setting.value is None or (known.kind in ("file", "text") and setting.value == ""
                                 and known.name not in _MAY_BE_EMPTY):
        return
    value: Any = setting.value
    if known.kind == "file":
        value = str(given.base / Path(str(value)).expanduser())
    elif known.kind == "choice" and value not in allowed_words(target):
        _note_lost(setting, notes)
        return
    written, change = as_field(target, value)
    if change:
        notes.differs(setting.place, known.name, change)
    section, _, key = known.ours.partition(".")
    config.setdefault(section, {})[key] = written


def _note_lost(setting: Setting, notes: Notes) -> None:
    name, harmless = setting.known.name, _TLS_HARMLESS.get(setting.known.name)
    if setting.place is None:
        return
    grave = harmless is not None and setting.value not in harmless
    grave = grave or (name == "disable_pqexec" and bool(setting.value))
    notes.lost(setting.place, name, setting.known.why, grave=grave)


def _listen(fleet: dict[str, Any], bouncer: Bouncer, given: Circumstances, notes: Notes) -> None:
    port, listen = bouncer.whole("listen_port"), []
    for host in bouncer.words("listen_addr"):
        if host == "*":
            listen += [f"0.0.0.0:{port}", *([f"[::]:{port}"] if given.has_ipv6 else [])]
        else:
            listen.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    fleet["listen"] = list(dict.fromkeys(listen))
    folder = bouncer.settings["unix_socket_dir"]
    if folder.value and str(folder.value).startswith("@"):
        notes.lost(folder.place, "unix_socket_dir", "abstract sockets are not listened on: name a directory",
                   grave=not listen)
    elif folder.value:
        fleet["unix_socket_dir"] = str(given.base / Path(str(folder.value)).expanduser())
        if not listen:
            fleet["unix_socket_port"] = port


def _auth(config: dict[str, Any], bouncer: Bouncer, given: Circumstances, notes: Notes) -> None:
    auth, setting = config["auth"], bouncer.settings["auth_type"]
    wanted = str(setting.value)
    target = field_at("auth.type")
    assert target is not None  # a setting of ours
    words = [word for word in _AUTH_WORDS.get(wanted, (wanted,)) if word in allowed_words(target)]
    if not words:
        notes.lost(setting.place, "auth_type",
                   f"{wanted} is not served (an import writes scram-sha-256): {LDAP_INSTEAD}", grave=True)
    auth["type"] = words[0] if words else "scram-sha-256"
    named = bouncer.text("auth_file")
    auth["file"] = str(given.base / Path(named).expanduser() if named else given.auth_file)


def _pools(pool: dict[str, Any], bouncer: Bouncer, notes: Notes) -> None:
    least, size = bouncer.settings["min_pool_size"], pool["default_pool_size"]
    pool["min_pool_size"] = min(bouncer.whole("min_pool_size"), size)
    if pool["min_pool_size"] != least.value:
        notes.differs(least.place, "min_pool_size", f"{least.value} becomes {size}, the size of the pool")
    pool["session_state"] = "allow"  # PgBouncer's own way


def _users(config: dict[str, Any], bouncer: Bouncer, notes: Notes) -> None:
    for user in bouncer.users.values():
        own: dict[str, Any] = {}
        for key, value in user.values.items():
            target, about = field_at(f"users.*.{key}"), f"[users] {user.name}: {key}"
            if target is None:
                notes.lost(user.place, about, "this version has no such setting for one user")
            elif not isinstance(value, int) or value >= 0:
                own[key], change = as_field(target, value)
                if change:
                    notes.differs(user.place, about, change)
        config.setdefault("users", {})[user.name] = own
