"""pg_hba.conf: which proof is asked of whom, coming from where.

Reads the syntax of PostgreSQL 16 and later and gives the first rule that fits a client, as PostgreSQL and
PgBouncer do. What cannot be served here (membership of roles, host names, GSSAPI …) is refused when the file
is read, never passed over. Regular expressions are Python's, which read those of PostgreSQL's documentation
alike. Source: PostgreSQL documentation, "The pg_hba.conf File"; hba.c. Pure but for reading files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path
from typing import Any

from pooler.errors import UsageFault
from pooler.net.hba_tokens import DISK, Field, Files, HbaFault, Line, Word, lines_of, resolved
from pooler.wire.auth import LDAP_INSTEAD, AuthType, Certificate

Network = IPv4Network | IPv6Network
Interface = IPv4Interface | IPv6Interface

KINDS = ("local", "host", "hostssl", "hostnossl", "hostgssenc", "hostnogssenc")
METHODS = {
    "trust": AuthType.TRUST, "reject": AuthType.REJECT, "password": AuthType.PASSWORD, "md5": AuthType.MD5,
    "scram-sha-256": AuthType.SCRAM, "peer": AuthType.PEER, "cert": AuthType.CERT, "pam": AuthType.PAM,
}
CERTIFICATES = {
    "verify-ca": Certificate.SIGNED, "verify-full": Certificate.NAMED, "no-verify": Certificate.NONE,
    "0": Certificate.NONE, "1": Certificate.SIGNED,
}
_OPTION = re.compile(r"([a-z0-9_]+)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Visitor:
    """A client as far as rules look at it. `address` is None over a unix socket; `is_replication`: a physical
    replication connection, which has no database."""

    user: str
    database: str
    address: IPv4Address | IPv6Address | None
    is_tls: bool = False
    is_replication: bool = False

    @classmethod
    def of(cls, user: str, database: str, host: str, *, is_tls: bool, is_replication: bool) -> Visitor:
        """From a peer's address as text, `unix` for a unix socket. IPv4 mapped into IPv6 is IPv4."""
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return cls(user, database, None, is_tls, is_replication)
        return cls(user, database, getattr(address, "ipv4_mapped", None) or address, is_tls, is_replication)


@dataclass(frozen=True, slots=True)
class Names:
    """The databases or users of a rule: names, patterns, and words with a meaning."""

    words: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def fits(self, name: str) -> bool:
        """Whether a name is among them (`sameuser` and `replication` are for the caller)."""
        return "all" in self.words or name in self.names or any(p.search(name) for p in self.patterns)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line. `ident_map` is for peer and cert; `certificate` is what a client must show besides."""

    where: str
    kind: str
    databases: Names
    users: Names
    networks: tuple[Network, ...] | str  # or: all, samehost, samenet
    method: AuthType
    ident_map: str | None = None
    certificate: Certificate = Certificate.NONE
    by_distinguished_name: bool = False

    @classmethod
    def plain(cls, method: AuthType, ident_map: str | None = None) -> Rule:
        """A rule for everybody: what an `auth.type` other than hba is."""
        return cls("auth.type", "", Names(), Names(), "all", method, ident_map)

    def fits(self, visitor: Visitor, own: Callable[[], Sequence[Interface]]) -> bool:
        """Whether this line is about that client. `own` gives this host's addresses with their networks."""
        return (self._fits_way(visitor) and self._fits_address(visitor.address, own)
                and self._fits_database(visitor) and self.users.fits(visitor.user))

    def _fits_way(self, visitor: Visitor) -> bool:
        if (self.kind == "local") != (visitor.address is None):
            return False
        return {"hostssl": visitor.is_tls, "hostnossl": not visitor.is_tls,
                "hostgssenc": False}.get(self.kind, True)

    def _fits_address(
        self, address: IPv4Address | IPv6Address | None, own: Callable[[], Sequence[Interface]]
    ) -> bool:
        if address is None or self.networks == "all":
            return True
        if self.networks == "samehost":
            return any(address == each.ip for each in own())
        if self.networks == "samenet":
            return any(address in each.network for each in own())
        return any(address in network for network in self.networks if not isinstance(network, str))

    def _fits_database(self, visitor: Visitor) -> bool:
        if visitor.is_replication:
            return "replication" in self.databases.words
        return self.databases.fits(visitor.database) or (
            "sameuser" in self.databases.words and visitor.user == visitor.database)


@dataclass(frozen=True, slots=True)
class Hba:
    """The rules of a file, in order."""

    rules: tuple[Rule, ...] = ()
    own: Callable[[], Sequence[Interface]] = field(default=tuple, repr=False)

    def rule_for(self, visitor: Visitor) -> Rule | None:
        """The first rule that fits; None: there is none, and the client is refused."""
        return next((rule for rule in self.rules if rule.fits(visitor, self.own)), None)


def read_hba(
    path: Path, *, own: Callable[[], Sequence[Interface]] = tuple, files: Files = DISK
) -> Hba:
    """The rules in a file and what it includes. Raises UsageFault naming every faulty line."""
    faults: list[str] = []
    rules: list[Rule] = []
    for line in lines_of(path, files, faults):
        try:
            rules.append(_read_rule(line, files))
        except UsageFault as fault:
            faults.append(str(fault))
    if not rules and not faults:
        faults.append(f"{path}: has no rule: nobody could log in; write such as `host all all all md5`")
    if faults:
        raise UsageFault("\n".join(faults))
    return Hba(tuple(rules), own)


def _read_rule(line: Line, files: Files) -> Rule:
    base = Path(line.where.rpartition(":")[0]).parent
    fields = list(line.fields)
    kind = _one(line, fields.pop(0), "the type")
    if kind not in KINDS:
        raise HbaFault(line.where, f'"{kind}" is not one of {", ".join(KINDS)}')
    least = 3 if kind == "local" else 4
    if len(fields) < least:
        address = "" if kind == "local" else " ADDRESS"
        raise HbaFault(line.where, f"too few fields: write {kind} DATABASE USER{address} METHOD")
    databases = _names(line, resolved(fields.pop(0), line.where, base, files), _DATABASE_WORDS)
    users = _names(line, resolved(fields.pop(0), line.where, base, files), _USER_WORDS)
    networks = "all" if kind == "local" else _networks(line, fields)
    if not fields:
        raise HbaFault(line.where, f"has no method: write one of {', '.join(METHODS)} at its end")
    method = _method(line, kind, _one(line, fields.pop(0), "the method"))
    options = _options(line, kind, method, fields)
    return Rule(line.where, kind, databases, users, networks, method, **options)


_DATABASE_WORDS = frozenset({"all", "sameuser", "replication"})
_USER_WORDS = frozenset({"all"})


def _one(line: Line, words: Field, what: str) -> str:
    if len(words) != 1:
        raise HbaFault(line.where, f"{what} is one word, not a list")
    return words[0].text


def _names(line: Line, words: Iterator[Word], known: frozenset[str]) -> Names:
    meant, names, patterns = set(), set(), []
    for word in words:
        if word.is_keyword(*known):
            meant.add(word.text)
        elif word.is_keyword("samerole", "samegroup") or (not word.quoted and word.text.startswith("+")):
            raise HbaFault(line.where, f"{word.text}: membership of roles is not known here: "
                                       "list the users, or name a file of them as @FILE")
        elif word.text.startswith("/"):
            patterns.append(pattern_of(line.where, word.text))
        else:
            names.add(word.text)
    return Names(frozenset(meant), frozenset(names), tuple(patterns))


def pattern_of(where: str, text: str) -> re.Pattern[str]:
    """The regular expression after the slash. Raises HbaFault."""
    try:
        return re.compile(text[1:])
    except re.error as fault:
        raise HbaFault(where, f"{text}: not a regular expression: {fault}") from None


def _networks(line: Line, fields: list[Field]) -> tuple[Network, ...] | str:
    """The address, of one or two fields, taken off the front."""
    words = fields.pop(0)
    address = _one(line, words, "the address")
    if words[0].is_keyword("all", "samehost", "samenet"):
        return address
    if "/" not in address:
        try:
            ip_address(address)
        except ValueError:
            raise HbaFault(line.where, f'"{address}" is not an address: host names are not looked up; write '
                                       "a network such as 10.0.0.0/8, all, samehost or samenet") from None
        if not fields:
            raise HbaFault(line.where, f"{address} has no mask: write {address}/32, or a mask after it")
        address = f"{address}/{_one(line, fields.pop(0), 'the mask')}"
    try:
        return (_network(address),)
    except ValueError as fault:
        raise HbaFault(line.where, f"{fault}: write a network such as 10.0.0.0/8 or ::1/128") from None


def _network(text: str) -> Network:
    address, _, mask = text.partition("/")
    if ":" in mask:  # a mask of IPv6 written out
        bits = f"{int(IPv6Address(mask)):0128b}"
        if "01" in bits:
            raise ValueError(f"{mask!r} is not a mask")
        mask = str(bits.count("1"))
    return ip_network(f"{address}/{mask}", strict=False)


def _method(line: Line, kind: str, word: str) -> AuthType:
    if word == "ident" and kind == "local":
        word = "peer"  # as PostgreSQL
    if word not in METHODS:
        instead = LDAP_INSTEAD if word == "ldap" else f"write one of {', '.join(METHODS)}"
        raise HbaFault(line.where, f'method "{word}" is not served: {instead}')
    method = METHODS[word]
    if method is AuthType.PEER and kind != "local":
        raise HbaFault(line.where, "peer is for unix sockets: write local at the beginning of the line")
    if method is AuthType.CERT and kind != "hostssl":
        raise HbaFault(line.where, "cert needs TLS: write hostssl at the beginning of the line")
    return method


def _options(line: Line, kind: str, method: AuthType, fields: list[Field]) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for words in fields:
        text = ",".join(word.text for word in words)
        found = _OPTION.fullmatch(text)
        if found is None:
            raise HbaFault(line.where, f'"{text}" is not an option: write name=value after the method')
        name, value = found.groups()
        if name == "map" and method in (AuthType.PEER, AuthType.CERT):
            taken["ident_map"] = value
        elif name == "clientcert" and kind == "hostssl" and value in CERTIFICATES:
            taken["certificate"] = CERTIFICATES[value]
        elif name == "clientname" and kind == "hostssl" and value in ("CN", "DN"):
            taken["by_distinguished_name"] = value == "DN"
        else:
            raise HbaFault(line.where, f"option {text} is not served with {line.fields[0][0].text} … "
                                       f"{method}: known are map=NAME (peer, cert), clientcert=verify-ca or "
                                       "verify-full and clientname=CN or DN (hostssl)")
    return taken
