"""SCRAM-SHA-256 in both roles, with and without channel binding, and the client key recovered from a proof.

Follows RFC 5802 and RFC 7677 and PostgreSQL's auth-scram.c: the user name inside the exchange is ignored,
a password that SASLprep refuses is used as it is, the one channel binding is tls-server-end-point (RFC 5929).
Pure: nonces and salts are arguments. `salted_password` is meant to be slow (about a millisecond per 4,096
rounds); callers run it in a thread. Keys and proofs are never part of an error or a repr.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import stringprep
import unicodedata
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field

from pooler.errors import LoginRefused, ProtocolViolation
from pooler.wire import sqlstate

MECHANISM = "SCRAM-SHA-256"
MECHANISM_PLUS = "SCRAM-SHA-256-PLUS"
BINDING_TYPE = "tls-server-end-point"
ITERATIONS_DEFAULT = 4_096
ITERATIONS_MAX = 10_000_000  # a peer must not make us work longer than some seconds
NONCE_BYTES_MAX = 1_024
KEY_BYTES = 32


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _is_iteration_count(digits: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,7}", digits) is not None and int(digits) <= ITERATIONS_MAX


def prepared(password: bytes) -> bytes:
    """SASLprep of a password (RFC 4013) as PostgreSQL does it: one that is not UTF-8 or is refused stays as
    it is."""
    if password.isascii():
        return password
    try:
        text = password.decode("utf-8")
    except UnicodeDecodeError:
        return password
    mapped = "".join(_mapped(text))
    if not mapped or any(is_refused(each) for each in mapped for is_refused in _REFUSED):
        return password
    if any(stringprep.in_table_d1(each) for each in mapped):  # right to left: all of it or nothing
        ends = stringprep.in_table_d1(mapped[0]) and stringprep.in_table_d1(mapped[-1])
        if not ends or any(stringprep.in_table_d2(each) for each in mapped):
            return password
    return unicodedata.normalize("NFKC", mapped).encode("utf-8")


_REFUSED = (
    stringprep.in_table_c12, stringprep.in_table_c21_c22, stringprep.in_table_c3, stringprep.in_table_c4,
    stringprep.in_table_c5, stringprep.in_table_c6, stringprep.in_table_c7, stringprep.in_table_c8,
    stringprep.in_table_c9, stringprep.in_table_a1)


def _mapped(text: str) -> Iterator[str]:
    for each in text:
        if stringprep.in_table_c12(each):
            yield " "
        elif not stringprep.in_table_b1(each):
            yield each


def salted_password(password: bytes, salt: bytes, iterations: int) -> bytes:
    """Hi() of the RFC. Slow by design."""
    return hashlib.pbkdf2_hmac("sha256", prepared(password), salt, iterations)


@dataclass(frozen=True, slots=True)
class Keys:
    """What logs in to a server without the password: usable wherever salt and iterations were the same."""

    client_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    @classmethod
    def from_salted(cls, salted: bytes) -> Keys:
        """The two keys of a salted password."""
        return cls(_hmac(salted, b"Client Key"), _hmac(salted, b"Server Key"))

    @classmethod
    def derive(cls, password: bytes, salt: bytes, iterations: int) -> Keys:
        """The keys of a password. Slow by design."""
        return cls.from_salted(salted_password(password, salt, iterations))

    @property
    def stored_key(self) -> bytes:
        """What a verifier has of the client's key."""
        return hashlib.sha256(self.client_key).digest()


@dataclass(frozen=True, slots=True)
class Verifier:
    """What a server stores of a password: it can check a proof and cannot make one."""

    salt: bytes = field(repr=False)
    iterations: int
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    @classmethod
    def parse(cls, secret: str) -> Verifier:
        """`SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>`. Raises ValueError without the text."""
        parts = secret.split("$")
        if len(parts) != 3 or parts[0] != MECHANISM:
            raise ValueError("not a SCRAM-SHA-256 secret")
        rounds, _, salt = parts[1].partition(":")
        stored, _, server = parts[2].partition(":")
        if not _is_iteration_count(rounds):
            raise ValueError("a SCRAM-SHA-256 secret with a bad iteration count")
        try:
            keys = [b64decode(value, validate=True) for value in (salt, stored, server)]
        except ValueError:
            raise ValueError("a SCRAM-SHA-256 secret that is not base64") from None
        if not keys[0] or len(keys[1]) != KEY_BYTES or len(keys[2]) != KEY_BYTES:
            raise ValueError("a SCRAM-SHA-256 secret with a key of the wrong length")
        return cls(keys[0], int(rounds), keys[1], keys[2])

    @classmethod
    def derive(cls, password: bytes, salt: bytes, iterations: int = ITERATIONS_DEFAULT) -> Verifier:
        """The verifier of a password. Slow by design."""
        keys = Keys.derive(password, salt, iterations)
        return cls(salt, iterations, keys.stored_key, keys.server_key)

    def secret(self) -> str:
        """The inverse of parse()."""
        salt, stored, server = (b64encode(v).decode() for v in (self.salt, self.stored_key, self.server_key))
        return f"{MECHANISM}${self.iterations}:{salt}${stored}:{server}"

    def matches(self, password: bytes) -> bool:
        """Whether a cleartext password is the one. Slow by design."""
        derived = self.derive(password, self.salt, self.iterations)
        return hmac.compare_digest(derived.stored_key, self.stored_key)


def mock_salt(mock_key: bytes, user: str) -> bytes:
    """The salt shown for a user without a verifier of its own: always the same for the same name."""
    return _hmac(mock_key, b"salt " + user.encode("utf-8", "surrogateescape"))[:16]


def mock_verifier(mock_key: bytes, user: str, iterations: int = ITERATIONS_DEFAULT) -> Verifier:
    """A verifier that nothing matches, for users that do not exist; `iterations`: what those who do have."""
    seed = user.encode("utf-8", "surrogateescape")
    return Verifier(mock_salt(mock_key, user), iterations,
                    _hmac(mock_key, b"stored " + seed), _hmac(mock_key, b"server " + seed))


def _attributes(message: bytes) -> list[tuple[str, str]]:
    try:
        parts = message.decode("utf-8").split(",")
    except UnicodeDecodeError:
        raise ProtocolViolation("malformed SCRAM message: not UTF-8") from None
    if any(len(part) < 2 or part[1] != "=" for part in parts):
        raise ProtocolViolation("malformed SCRAM message: attribute expected")
    return [(part[0], part[2:]) for part in parts]


def _checked_nonce(nonce: str) -> str:
    if not nonce or len(nonce) > NONCE_BYTES_MAX or not all(0x21 <= ord(c) <= 0x7E for c in nonce):
        raise ProtocolViolation("malformed SCRAM message: bad nonce")
    return nonce


def _decoded(value: str, size: int | None = None) -> bytes:
    try:
        raw = b64decode(value, validate=True)
    except ValueError:
        raise ProtocolViolation("malformed SCRAM message: not base64") from None
    if not raw or (size is not None and len(raw) != size):
        raise ProtocolViolation("malformed SCRAM message: value of the wrong length")
    return raw


class ServerExchange:
    """The server's half of one login: first(), then final().

    `nonce` is fresh printable text, at least 18 random bytes' worth. `end_point` is the data of the channel
    binding where the connection has one: then -PLUS was offered; `binds` says that the client chose it.
    """

    def __init__(
        self, *, nonce: str, salt: bytes, iterations: int, end_point: bytes = b"", binds: bool = False
    ) -> None:
        self._own_nonce = nonce
        self._salt = salt
        self._iterations = iterations
        self._end_point = end_point
        self._binds = binds
        self._binding = b""
        self._first_bare = b""
        self._first = b""
        self._nonce = ""

    def first(self, message: bytes) -> bytes:
        """client-first-message in, server-first-message out. Raises ProtocolViolation, LoginRefused."""
        flag, _, rest = message.partition(b",")
        identity, comma, bare = rest.partition(b",")
        self._check_flag(flag)
        if not comma:
            raise ProtocolViolation("malformed SCRAM message: header expected")
        if identity:
            raise LoginRefused("SCRAM authorization identities are not supported",
                               sqlstate.FEATURE_NOT_SUPPORTED)
        attributes = _attributes(bare)
        if [name for name, _ in attributes[:2]] != ["n", "r"]:  # m= (mandatory extension) ends here too
            raise ProtocolViolation("malformed SCRAM message: user and nonce expected")
        self._binding = b64encode(flag + b",," + (self._end_point if self._binds else b""))
        self._first_bare = bare
        self._nonce = _checked_nonce(attributes[1][1]) + self._own_nonce
        salt = b64encode(self._salt).decode()
        self._first = f"r={self._nonce},s={salt},i={self._iterations}".encode()
        return self._first

    def _check_flag(self, flag: bytes) -> None:
        """n: the client cannot bind; y: it could, and thinks that we cannot; p: it does."""
        if flag.startswith(b"p="):
            if not self._binds:
                raise ProtocolViolation("malformed SCRAM message: channel binding without -PLUS")
            if flag[2:] != BINDING_TYPE.encode():
                raise ProtocolViolation("unsupported SCRAM channel-binding type")
        elif flag not in (b"n", b"y"):
            raise ProtocolViolation("malformed SCRAM message: bad channel binding flag")
        elif self._binds:
            raise ProtocolViolation("malformed SCRAM message: -PLUS without channel binding data")
        elif flag == b"y" and self._end_point:  # somebody between us took our offer away
            raise LoginRefused("SCRAM channel binding negotiation error")

    def final(self, message: bytes, verifier: Verifier) -> tuple[bytes, Keys] | None:
        """client-final-message in; server-final-message and the client's keys out, or None when the proof
        does not fit. Raises ProtocolViolation for a malformed message, LoginRefused where the client is bound
        to another connection than this one."""
        attributes = _attributes(message)
        names = [name for name, _ in attributes]
        if names[:2] != ["c", "r"] or names[-1] != "p" or len(names) < 3:
            raise ProtocolViolation("malformed SCRAM message: binding, nonce and proof expected")
        if not hmac.compare_digest(attributes[0][1].encode(), self._binding):
            if self._binds:
                raise LoginRefused("SCRAM channel binding check failed")
            raise ProtocolViolation("malformed SCRAM message: unexpected channel binding")
        if not hmac.compare_digest(attributes[1][1].encode(), self._nonce.encode()):
            raise ProtocolViolation("malformed SCRAM message: nonce does not match")
        proof = _decoded(attributes[-1][1], KEY_BYTES)
        without_proof = message[: message.rindex(b",p=")]
        transcript = b",".join((self._first_bare, self._first, without_proof))
        client_key = _xor(proof, _hmac(verifier.stored_key, transcript))
        if not hmac.compare_digest(hashlib.sha256(client_key).digest(), verifier.stored_key):
            return None
        signature = b64encode(_hmac(verifier.server_key, transcript))
        return b"v=" + signature, Keys(client_key, verifier.server_key)


class ClientExchange:
    """The client's half of one login to a server: first(), challenge(), final(), finish().

    `nonce` as in ServerExchange. `end_point`: bind to the connection with this; the mechanism is then -PLUS.
    `could_bind`: the connection could be bound, but the server did not offer it.
    """

    def __init__(self, *, nonce: str, end_point: bytes = b"", could_bind: bool = False) -> None:
        header = f"p={BINDING_TYPE},," if end_point else "y,," if could_bind else "n,,"
        self._header = header.encode()
        self._end_point = end_point
        self._nonce = nonce
        self._first_bare = f"n=,r={nonce}".encode()
        self._server_first = b""
        self._transcript = b""
        self._keys: Keys | None = None
        self._full_nonce = ""

    def first(self) -> bytes:
        """client-first-message."""
        return self._header + self._first_bare

    def challenge(self, message: bytes) -> tuple[bytes, int]:
        """server-first-message in; salt and iterations for `salted_password` out. Raises
        ProtocolViolation."""
        attributes = _attributes(message)
        if [name for name, _ in attributes[:3]] != ["r", "s", "i"]:
            raise ProtocolViolation("malformed SCRAM message: nonce, salt and iterations expected")
        nonce, rounds = attributes[0][1], attributes[2][1]
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise ProtocolViolation("SCRAM nonce of the server does not continue ours")
        self._full_nonce = _checked_nonce(nonce)
        if not _is_iteration_count(rounds):
            raise ProtocolViolation("SCRAM iteration count of the server is out of range")
        self._server_first = message
        return _decoded(attributes[1][1]), int(rounds)

    def final(self, keys: Keys) -> bytes:
        """client-final-message, proving that we hold `keys`."""
        binding = b64encode(self._header + self._end_point)
        without_proof = b"c=" + binding + b",r=" + self._full_nonce.encode()
        self._transcript = b",".join((self._first_bare, self._server_first, without_proof))
        self._keys = keys
        signature = _hmac(hashlib.sha256(keys.client_key).digest(), self._transcript)
        return without_proof + b",p=" + b64encode(_xor(keys.client_key, signature))

    def finish(self, message: bytes) -> None:
        """server-final-message in. Raises ProtocolViolation if the server did not prove that it knows the
        verifier."""
        attributes = _attributes(message)
        expected = b"" if self._keys is None else _hmac(self._keys.server_key, self._transcript)
        if attributes[0][0] != "v" or not expected:
            raise ProtocolViolation("SCRAM: the server refused or skipped a step")
        if not hmac.compare_digest(_decoded(attributes[0][1]), expected):
            raise ProtocolViolation("SCRAM: the server's signature is wrong: it does not know the password")
