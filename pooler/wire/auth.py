"""Which proof of a password is asked for, and whether one given fits: clients' and our own to servers.

Meanings of `auth_type` are PgBouncer's: `md5` becomes SCRAM for a user whose stored secret is a SCRAM
verifier. Pure; salts are arguments. Secrets are in no repr and no error.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from pooler.wire.messages import text
from pooler.wire.scram import Keys, Verifier

_MD5_SECRET = re.compile(rb"md5[0-9a-f]{32}")


class AuthType(StrEnum):
    """What the configuration asks of clients."""

    TRUST = "trust"
    ANY = "any"
    PASSWORD = "password"
    MD5 = "md5"
    SCRAM = "scram-sha-256"
    CERT = "cert"
    PEER = "peer"
    PAM = "pam"
    HBA = "hba"  # one of the others, by the rules of a file
    REJECT = "reject"


LDAP_INSTEAD: Final = (
    "`pam` reaches a directory through the system's PAM (pam_ldap, sssd), and clients may bring a "
    "certificate (cert)")  # what to do where PgBouncer was asked to look in one itself


class Certificate(StrEnum):
    """What certificate a client must show besides its proof."""

    NONE = "none"
    SIGNED = "verify-ca"
    NAMED = "verify-full"


class Method(StrEnum):
    """What one client is asked for."""

    TRUST = "trust"
    CLEARTEXT = "cleartext"
    MD5 = "md5"
    SCRAM = "scram"


@dataclass(frozen=True, slots=True)
class Secret:
    """A stored secret: exactly one of a plain password, an md5 hash (`md5…`, as stored) or a verifier."""

    plain: bytes | None = field(default=None, repr=False)
    md5: bytes | None = field(default=None, repr=False)
    scram: Verifier | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, stored: bytes) -> Secret:
        """The three forms of a userlist or pg_authid. What looks like neither md5 nor SCRAM is plain. Raises
        ValueError for a broken SCRAM secret, without showing it."""
        if _MD5_SECRET.fullmatch(stored):
            return cls(md5=stored)
        if stored.startswith(b"SCRAM-SHA-256$"):
            return cls(scram=Verifier.parse(stored.decode("ascii", "replace")))
        return cls(plain=stored)


@dataclass(frozen=True, slots=True)
class ServerSecret:
    """What we hold to log in to a server as some user; all empty means nothing."""

    plain: bytes | None = field(default=None, repr=False)
    md5: bytes | None = field(default=None, repr=False)
    keys: Keys | None = field(default=None, repr=False)

    @classmethod
    def of(cls, secret: Secret | None) -> ServerSecret:
        """What a stored secret alone allows (a verifier: nothing, until its client has logged in)."""
        return cls() if secret is None else cls(plain=secret.plain, md5=secret.md5)

    def followed_by(self, newer: ServerSecret, user: str) -> ServerSecret:
        """What is held of `user` after a login that showed `newer`. One that shows less of the same password,
        or nothing, takes nothing away; another password takes the place of everything."""
        if not (newer.plain or newer.md5 or newer.keys):
            return newer if self == ServerSecret() else self
        if newer.plain is not None:
            return self if self.plain == newer.plain else newer
        if newer.md5 is not None:
            known = self.md5 if self.plain is None else md5_secret(self.plain, user)
            return replace(self, md5=newer.md5) if known in (None, newer.md5) else newer
        is_new = self.plain is None and self.keys is None
        return replace(self, keys=newer.keys) if is_new or self.keys == newer.keys else newer


def choose_method(auth_type: AuthType, secret: Secret | None, unknown: Method) -> Method:
    """The question for a client with this stored secret; `unknown` is the one that users who do not exist
    get under `md5`, and those whom no password lets in; it should be what most who exist get."""
    if auth_type is AuthType.TRUST:
        return Method.TRUST
    if auth_type is AuthType.PASSWORD:
        return Method.CLEARTEXT
    if auth_type is AuthType.SCRAM:
        return Method.SCRAM
    if secret is None or secret.plain == b"":
        return unknown
    return Method.SCRAM if secret.scram is not None else Method.MD5


def md5_secret(password: bytes, user: str) -> bytes:
    """The stored form: `md5` and md5(password + user)."""
    return b"md5" + _md5_hex(password + text(user))


def md5_answer(secret: bytes, salt: bytes) -> bytes:
    """What is sent for a challenge: `md5` and md5(stored hex + salt)."""
    return b"md5" + _md5_hex(secret[3:] + salt)


def _md5_hex(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).hexdigest().encode()


def check_md5(secret: Secret | None, user: str, salt: bytes, answer: bytes) -> bool:
    """Whether an MD5 answer fits. Same work for a user that does not exist."""
    stored = md5_secret(b"", user)
    usable = False
    if secret is not None and secret.md5 is not None:
        stored, usable = secret.md5, True
    elif secret is not None and secret.plain:
        stored, usable = md5_secret(secret.plain, user), True
    fits = hmac.compare_digest(md5_answer(stored, salt), answer)
    return fits and usable


def check_cleartext(secret: Secret | None, user: str, password: bytes) -> bool:
    """Whether a cleartext password fits a plain or md5 secret; a verifier has its own slow check. An empty
    password never fits."""
    if not password or secret is None:
        return False
    if secret.md5 is not None:
        return hmac.compare_digest(md5_secret(password, user), secret.md5)
    if secret.plain is not None:
        return hmac.compare_digest(password, secret.plain)
    return secret.scram is not None and secret.scram.matches(password)


def answer_md5(secret: ServerSecret, user: str, salt: bytes) -> bytes | None:
    """Our answer to a server's MD5 challenge, or None when we hold nothing that gives one."""
    if secret.plain is not None:
        return md5_answer(md5_secret(secret.plain, user), salt)
    return None if secret.md5 is None else md5_answer(secret.md5, salt)
