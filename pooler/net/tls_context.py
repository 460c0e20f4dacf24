"""TLS settings made into OpenSSL contexts, for the side that clients see and for the side that servers see.

Decides what is offered and what is asked for; a fault in the files or words is a TlsFault with the setting's
path, never a context that is weaker than what was asked for. Sources: PgBouncer's documentation ("TLS
settings") for the words, PostgreSQL's be-secure-openssl.c for what both leave out (tickets, renegotiation,
compression).
"""

from __future__ import annotations

import os
import ssl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from pooler.net.certificate import Certificate, certificate_blocks, certificates_in, read_certificate
from pooler.net.tls import TlsSocket
from pooler.settings_tls import ClientTlsSettings, PemFile, ServerTlsSettings, SslMode

ALPN = "postgresql"
_VERSIONS = {"tlsv1.0": ssl.TLSVersion.TLSv1, "tlsv1.1": ssl.TLSVersion.TLSv1_1,
             "tlsv1.2": ssl.TLSVersion.TLSv1_2, "tlsv1.3": ssl.TLSVersion.TLSv1_3}
_PROTOCOLS = {"secure": ("tlsv1.2", "tlsv1.3"), "all": tuple(_VERSIONS), "legacy": tuple(_VERSIONS)}
_SYSTEM_CIPHERS = frozenset({"default", "secure", "fast", "normal"})
_CIPHERS = {"all": "ALL:!aNULL:!eNULL", "legacy": "HIGH:MEDIUM:!aNULL", "compat": "HIGH:!aNULL"}
_ENFORCED = ("require", "verify-ca", "verify-full")
_VERIFIED = ("verify-ca", "verify-full")
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
# ffdhe2048 (RFC 7919, A.1): a group that nobody here had to choose
_FFDHE2048 = """-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


class TlsFault(ValueError):
    """What is wrong, and with which setting of its section."""

    def __init__(self, setting: str, text: str) -> None:
        super().__init__(text)
        self.setting = setting


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How clients may encrypt. `is_required`: over TCP they must. `end_point`: hash of our certificate."""

    context: ssl.SSLContext = field(repr=False)
    is_required: bool
    end_point: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """How connections to servers are encrypted."""

    mode: SslMode
    context: ssl.SSLContext = field(repr=False)

    @property
    def is_required(self) -> bool:
        """Whether nothing is sent in clear."""
        return self.mode in _ENFORCED


def client_tls(settings: ClientTlsSettings) -> ClientTls | None:
    """None where clients are not offered any. Raises TlsFault."""
    if settings.sslmode == "disable":
        return None
    if settings.cert_file is None or settings.key_file is None:
        raise TlsFault("sslmode", f"{settings.sslmode} needs cert_file and key_file: what clients are shown")
    if settings.sslmode in _VERIFIED and settings.ca_file is None:
        raise TlsFault("sslmode", f"{settings.sslmode} needs ca_file: who may vouch for clients")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _set_common(context, settings)
    context.num_tickets = 0
    context.set_alpn_protocols([ALPN])
    if settings.ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED if settings.sslmode in _VERIFIED else ssl.CERT_OPTIONAL
    _set_key_exchange(context, settings)
    own = _certificates(settings.cert_file, "cert_file")[0]
    return ClientTls(context, settings.sslmode in _ENFORCED, own.end_point)


def server_tls(settings: ServerTlsSettings) -> ServerTls | None:
    """None where servers are not asked for any. Raises TlsFault."""
    if settings.sslmode == "disable":
        return None
    if settings.sslmode in _VERIFIED and settings.ca_file is None:
        raise TlsFault("sslmode", f"{settings.sslmode} needs ca_file: who may vouch for servers")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = settings.sslmode == "verify-full"
    context.verify_mode = ssl.CERT_REQUIRED if settings.sslmode in _VERIFIED else ssl.CERT_NONE
    context.set_alpn_protocols([ALPN])
    _set_common(context, settings)
    return ServerTls(settings.sslmode, context)


def certificate_warnings(settings: ClientTlsSettings | ServerTlsSettings, now: datetime) -> Iterator[str]:
    """"setting: text" for each certificate that does not hold now. Raises TlsFault."""
    for setting, file in (("ca_file", settings.ca_file), ("cert_file", settings.cert_file)):
        for found in _certificates(file, setting) if file is not None else ():
            if found.not_after < now:
                yield f"{setting}: {file}: a certificate expired at {found.not_after:%Y-%m-%d %H:%M:%S} UTC"
            elif found.not_before > now:
                yield f"{setting}: {file}: a certificate begins at {found.not_before:%Y-%m-%d %H:%M:%S} UTC"


def _set_common(context: ssl.SSLContext, settings: ClientTlsSettings | ServerTlsSettings) -> None:
    context.sslsocket_class = TlsSocket
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    # else an alert would be sent to who has gone, and its reset would hide that it went in order
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    _set_versions(context, settings.protocols)
    _set_ciphers(context, settings)
    if settings.ca_file is not None:
        _certificates(settings.ca_file, "ca_file")
        try:
            context.load_verify_locations(cadata=certificate_blocks(settings.ca_file.text))
        except ssl.SSLError as fault:
            raise TlsFault("ca_file", f"{settings.ca_file}: {_reason(fault)}") from None
    if (settings.cert_file is None) != (settings.key_file is None):
        raise TlsFault("cert_file", "cert_file and key_file belong together: give both or none")
    if settings.cert_file is not None and settings.key_file is not None:
        _load_pair(context, settings.cert_file, settings.key_file)


def _load_pair(context: ssl.SSLContext, certificate: PemFile, key: PemFile) -> None:
    _certificates(certificate, "cert_file")
    if "PRIVATE KEY-----" not in key.text:
        raise TlsFault("key_file", f"{key}: there is no private key in it")
    with _as_file(certificate.text) as certificate_path, _as_file(key.text) as key_path:
        try:
            context.load_cert_chain(certificate_path, key_path, password=_no_passphrase)
        except _Encrypted:
            raise TlsFault("key_file", f"{key}: it is encrypted: give a key without a passphrase") from None
        except ssl.SSLError as fault:
            if fault.reason in _MISMATCHES:
                raise TlsFault("key_file", f"{key} is not the key of the certificate {certificate}") from None
            raise TlsFault("key_file", f"{key} with {certificate}: {_reason(fault)}") from None


class _Encrypted(Exception):
    """A key asks for a passphrase."""


def _no_passphrase() -> str:
    raise _Encrypted


def _certificates(file: PemFile, setting: str) -> list[Certificate]:
    try:
        found = [read_certificate(der) for der in certificates_in(file.text)]
    except ValueError:
        raise TlsFault(setting, f"{file}: a certificate in it is broken") from None
    if not found:
        raise TlsFault(setting, f"{file}: there is no certificate in it")
    return found


def _set_versions(context: ssl.SSLContext, words: str) -> None:
    asked = [word.strip().lower() for word in words.split(",")]
    names = [name for word in asked for name in _PROTOCOLS.get(word, (word,))]
    known = list(_VERSIONS)
    for name in names:
        if name not in _VERSIONS:
            raise TlsFault("protocols", f'"{name}" is not one of {", ".join(known)}, secure, all')
    places = sorted({known.index(name) for name in names})
    if places[-1] - places[0] >= len(places):
        raise TlsFault("protocols", f'"{words}" leaves out a version between two others')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # old versions are the operator's choice
        context.minimum_version = _VERSIONS[known[places[0]]]
        context.maximum_version = _VERSIONS[known[places[-1]]]


def _set_ciphers(context: ssl.SSLContext, settings: ClientTlsSettings | ServerTlsSettings) -> None:
    dropped = ""
    if isinstance(settings, ClientTlsSettings):
        dropped += ":!kECDHE" if settings.ecdhcurve == "none" else ""
        dropped += ":!kDHE" if settings.dheparams == "none" else ""
    asked = settings.ciphers
    words = _CIPHERS.get(asked, asked)
    if asked in _SYSTEM_CIPHERS:
        words = ":".join(each["name"] for each in context.get_ciphers() if each["protocol"] != "TLSv1.3")
    if asked not in _SYSTEM_CIPHERS or dropped:
        try:
            context.set_ciphers(words + dropped)
        except ssl.SSLError:
            raise TlsFault("ciphers", f'OpenSSL knows no cipher in "{asked}"') from None
    if settings.tls13_ciphers:
        _set_tls13_ciphers(context, settings.tls13_ciphers)


def _set_tls13_ciphers(context: ssl.SSLContext, words: str) -> None:
    choose = getattr(context, "set_ciphersuites", None)
    if choose is None:
        raise TlsFault("tls13_ciphers", "this Python cannot choose ciphers of TLS 1.3 (3.15 and later can): "
                       "leave it out, or limit protocols to tlsv1.2")
    try:
        choose(words)
    except ssl.SSLError:
        raise TlsFault("tls13_ciphers", f'OpenSSL knows no cipher in "{words}"') from None


def _set_key_exchange(context: ssl.SSLContext, settings: ClientTlsSettings) -> None:
    if settings.ecdhcurve not in ("auto", "none"):
        try:
            context.set_ecdh_curve(settings.ecdhcurve)
        except (ValueError, ssl.SSLError):
            raise TlsFault("ecdhcurve", f'OpenSSL knows no curve "{settings.ecdhcurve}"') from None
    if settings.dheparams not in ("auto", "legacy", "none"):
        raise TlsFault("dheparams", f'"{settings.dheparams}" is not one of auto, legacy, none')
    if settings.dheparams != "none":  # 1024 bits, once `legacy`, are refused by OpenSSL itself
        with _as_file(_FFDHE2048) as path:
            context.load_dh_params(path)


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A path from which OpenSSL reads what is in memory; nothing of it is on a disk."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.write(text)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _reason(fault: ssl.SSLError) -> str:
    return (fault.reason or str(fault)).replace("_", " ").lower()
