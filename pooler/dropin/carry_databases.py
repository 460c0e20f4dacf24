"""The entries of [databases] as ours, each with a ledger and a policy of its own. Pure.

PgBouncer limits the sessions of a database by max_db_connections alone, which becomes the policy's number of
permits. Where it sets none, an import counts the pools there can be; a drop-in takes a number that no server
reaches.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

from pooler.dropin.fields import as_field, field_of
from pooler.dropin.notes import Notes
from pooler.dropin.reading import ANY_DATABASE, Bouncer, Part
from pooler.settings import DatabaseSettings

PORT: Final = 5432
UNLIMITED_PERMITS: Final = 10_000
REPLICATIONS: Final = 100
QUEUE_MAX: Final = 1_000_000
NEVER: Final = "8760h"
_OWN_WAY = frozenset({"host", "port", "user", "password", "min_pool_size", "max_db_connections",
                      "load_balance_hosts", "dbname"})
_NO_KEY: Final = {
    "client_encoding": "a client's own, else the server's, is used",
    "datestyle": "a client's own, else the server's, is used",
    "timezone": "a client's own, else the server's, is used",
    "application_name": "a client's own is used",
}


class Databases:
    """Carries them all. `users`: how many may log in; `unlimited`: without a limit of their own."""

    def __init__(self, bouncer: Bouncer, users: int, *, unlimited: bool) -> None:
        self._bouncer = bouncer
        self._users = max(1, users)
        self._unlimited = unlimited

    def carry(self, notes: Notes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """(the section `databases`, the policies by file name)."""
        entries: dict[str, Any] = {}
        policies: dict[str, dict[str, Any]] = {}
        for part in self._bouncer.databases.values():
            if self._bouncer.value("auth_type") == "any" and part.text("user") is None:
                notes.lost(part.place, part.name, "auth_type any needs user= here", grave=True)
                continue
            word = ledger_word(part.name)
            file = f"policies/{word}.yaml"
            entry = self._entry(part, notes)
            entries[part.name] = {"policy": file, **entry}
            permits = self._permits(part, notes)
            # other servers behind a name, or another limit, are another ledger: a reload may bring them
            place = f"-{_short_hash(' '.join([*entry['hosts'], str(permits)]))}" if self._unlimited else ""
            policies[file] = self._policy(part, f"{word}{place}/write", permits)
        return entries, policies

    def _entry(self, part: Part, notes: Notes) -> dict[str, Any]:
        entry: dict[str, Any] = {"hosts": self._hosts(part, notes)}
        dbname = part.text("dbname")
        if dbname is not None:
            entry["dbname"] = dbname
        user, password = part.text("user"), part.text("password")
        if user is not None:
            entry["user"] = user
            if password is not None and password.startswith(("env:", "file:")):
                notes.lost(part.place, f"{part.name}: password",
                           "one that begins with env: or file: means something else here", grave=True)
            elif password is not None:
                entry["password"] = password
        elif password is not None:
            notes.lost(part.place, f"{part.name}: password", "it is of no use without user=")
        for key, value in part.values.items():
            if key not in _OWN_WAY:
                self._take(entry, part, key, value, notes)
        least = part.whole("min_pool_size")
        if least is not None:
            entry["min_pool_size"] = min(least, self._size(part))
            if entry["min_pool_size"] != least:
                change = f"{least} becomes {self._size(part)}"
                notes.differs(part.place, f"{part.name}: min_pool_size", change)
        return entry

    def _take(self, entry: dict[str, Any], part: Part, key: str, value: Any, notes: Notes) -> None:
        field = field_of(DatabaseSettings, key)
        if field is None:
            notes.lost(part.place, f"{part.name}: {key}", _NO_KEY.get(key, "there is no such setting"))
            return
        if isinstance(value, int) and value < 0:
            return  # PgBouncer's way to say: as for the others
        entry[key], change = as_field(field, value)
        if change:
            notes.differs(part.place, f"{part.name}: {key}", change)

    def _hosts(self, part: Part, notes: Notes) -> list[str]:
        port = part.values.get("port", PORT)
        names = [name.strip() for name in (part.text("host") or "").split(",") if name.strip()]
        if len(names) > 1:
            notes.differs(part.place, f"{part.name}: host", "the hosts are those of one cluster: the first "
                                                            "that takes writes is used, not each in turn")
        hosts = []
        for name in names or [""]:
            folder = name or self._bouncer.text("unix_socket_dir")  # as PgBouncer: where its own socket is
            if name.startswith("@") or not (name or folder.startswith("/")):
                notes.differs(part.place, f"{part.name}: host", f"there is no directory of a socket: "
                                                                f"127.0.0.1:{port} is used instead")
                folder = "127.0.0.1"
            hosts.append(f"[{folder}]:{port}" if ":" in folder else f"{folder}:{port}")
        return list(dict.fromkeys(hosts))

    def _size(self, part: Part) -> int:
        return max(1, part.whole("pool_size") or self._bouncer.whole("default_pool_size"))

    def _permits(self, part: Part, notes: Notes) -> int:
        limit = part.whole("max_db_connections")
        limit = self._bouncer.whole("max_db_connections") if limit is None else limit
        if limit > 0:
            return min(limit, UNLIMITED_PERMITS)
        if self._unlimited:
            return UNLIMITED_PERMITS
        reserve = part.whole("reserve_pool_size")
        reserve = self._bouncer.whole("reserve_pool_size") if reserve is None else reserve
        users = 1 if part.text("user") is not None else self._users
        permits = min(UNLIMITED_PERMITS, (self._size(part) + reserve) * users)
        notes.differs(part.place, part.name, f"PgBouncer has no limit over all its users: its policy has "
                                             f"{permits} permits, which is each pool of {users} users full")
        return permits

    def _policy(self, part: Part, ledger: str, permits: int) -> dict[str, Any]:
        mode = part.text("pool_mode") or self._bouncer.text("pool_mode")
        return {
            "schema": "dbAdmissionPolicy.v1", "database": ledger, "generation": 1,
            "serverSessionPermits": permits, "adminReserve": 0,
            **({} if self._unlimited else {"poolMode": mode}),  # a reload may change it: it is the entry's
            "executionClasses": {"all": {
                "permits": permits, "maxQueue": QUEUE_MAX, "queueDeadline": NEVER, "maxWait": NEVER,
                "transactionLimit": NEVER}},
            "fairness": "weighted-deficit-v2",
            **({"replicationReserve": REPLICATIONS} if self._unlimited else {}),
        }


def ledger_word(name: str) -> str:
    """A word for the ledger and the policy's file that is a database's alone, whatever its name has."""
    plain = re.sub(r"[^a-z0-9-]+", "-", "any" if name == ANY_DATABASE else name).strip("-")[:40]
    return plain if plain == name else f"{plain}-{_short_hash(name)}".strip("-")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
