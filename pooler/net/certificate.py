"""What is read out of an X.509 certificate in DER: how it was signed, and until when it holds.

Source: RFC 5280 (4.1), ITU-T X.690; the channel binding hash as in RFC 5929, section 4.1. Pure.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

_SEQUENCE, _OBJECT, _UTC_TIME, _GENERALIZED_TIME, _EXPLICIT_0 = 0x30, 0x06, 0x17, 0x18, 0xA0
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----\s(.*?)-----END CERTIFICATE-----", re.DOTALL)
# signature algorithms by the hash they sign; MD5 and SHA-1 are taken for SHA-256 (RFC 5929)
_HASHES = {
    "1.2.840.113549.1.1.4": "sha256", "1.2.840.113549.1.1.5": "sha256", "1.2.840.10045.4.1": "sha256",
    "1.2.840.113549.1.1.11": "sha256", "1.2.840.10045.4.3.2": "sha256", "2.16.840.1.101.3.4.3.2": "sha256",
    "1.2.840.113549.1.1.12": "sha384", "1.2.840.10045.4.3.3": "sha384",
    "1.2.840.113549.1.1.13": "sha512", "1.2.840.10045.4.3.4": "sha512",
    "1.2.840.113549.1.1.14": "sha224", "1.2.840.10045.4.3.1": "sha224", "2.16.840.1.101.3.4.3.1": "sha224",
}
_RSA_PSS = "1.2.840.113549.1.1.10"
_DIGESTS = {
    "1.3.14.3.2.26": "sha256", "2.16.840.1.101.3.4.2.1": "sha256", "2.16.840.1.101.3.4.2.2": "sha384",
    "2.16.840.1.101.3.4.2.3": "sha512", "2.16.840.1.101.3.4.2.4": "sha224",
}


@dataclass(frozen=True, slots=True)
class Certificate:
    """`hash_name` is that of its signature, "" where the algorithm uses none (Ed25519) or is not known."""

    der: bytes
    hash_name: str
    not_before: datetime
    not_after: datetime

    @property
    def end_point(self) -> bytes:
        """The hash for `tls-server-end-point`; b"" where there is none to be had."""
        return hashlib.new(self.hash_name, self.der).digest() if self.hash_name else b""


def read_certificate(der: bytes) -> Certificate:
    """Raises ValueError for what is no certificate."""
    try:
        return _read(der)
    except (IndexError, StopIteration, UnicodeDecodeError) as fault:
        raise ValueError("not an X.509 certificate") from fault


def certificates_in(pem: str) -> list[bytes]:
    """The certificates of a PEM text, in DER. Raises ValueError for a block that is not base64."""
    return [b64decode("".join(body.split()), validate=True) for body in _PEM.findall(pem)]


def certificate_blocks(pem: str) -> str:
    """The PEM text without what is beside its certificates."""
    return "\n".join(match.group(0) for match in _PEM.finditer(pem))


def _read(der: bytes) -> Certificate:
    certificate = _items(_only(der, _SEQUENCE))
    tbs = _items(_content(next(certificate), _SEQUENCE))
    field = next(tbs)
    if field[0] == _EXPLICIT_0:  # the version; else this is the serial number
        next(tbs)
    next(tbs)  # the signature's algorithm, again
    next(tbs)  # the issuer
    begins, ends = (_time(*item) for item in _items(_content(next(tbs), _SEQUENCE)))
    return Certificate(der, _hash_name(_content(next(certificate), _SEQUENCE)), begins, ends)


def _hash_name(algorithm: bytes) -> str:
    items = _items(algorithm)
    name = _object_name(_content(next(items), _OBJECT))
    if name != _RSA_PSS:
        return _HASHES.get(name, "")
    for tag, value in _items(_content(next(items), _SEQUENCE)):
        if tag == _EXPLICIT_0:
            digest = next(_items(_only(value, _SEQUENCE)))
            return _DIGESTS.get(_object_name(_content(digest, _OBJECT)), "")
    return "sha256"  # the default is SHA-1


def _time(tag: int, value: bytes) -> datetime:
    form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}.get(tag)
    if form is None:
        raise ValueError("not an X.509 certificate")
    found = datetime.strptime(value.decode("ascii"), form).replace(tzinfo=UTC)
    # two digits mean 1950 to 2049 (RFC 5280, 4.1.2.5.1), which is not strptime's choice
    return found.replace(year=found.year - 100) if tag == _UTC_TIME and found.year >= 2050 else found


def _object_name(value: bytes) -> str:
    numbers = [min(value[0] // 40, 2)]
    numbers.append(value[0] - 40 * numbers[0])
    number = 0
    for byte in value[1:]:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    return ".".join(map(str, numbers))


def _items(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The (tag, content) pairs of a constructed value."""
    at = 0
    while at < len(content):
        tag, size = content[at], content[at + 1]
        at += 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(content[at : at + count], "big")
            at += count
        if at + size > len(content):
            raise ValueError("not an X.509 certificate")
        yield tag, content[at : at + size]
        at += size


def _content(item: tuple[int, bytes], tag: int) -> bytes:
    if item[0] != tag:
        raise ValueError("not an X.509 certificate")
    return item[1]


def _only(content: bytes, tag: int) -> bytes:
    return _content(next(_items(content)), tag)
