"""The TLS settings of the config: PgBouncer's `client_tls_…` and `server_tls_…`, a section each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo

from pooler.settings_units import is_resolved, path_in, text_of

SslMode = Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]


@dataclass(frozen=True, slots=True)
class PemFile:
    """A PEM file as read at load: who gets it needs no file of its own, and a worker that starts later has
    what the others have."""

    path: Path
    text: str = field(repr=False)

    def __str__(self) -> str:
        return str(self.path)


def _pem_file(value: object, info: ValidationInfo) -> PemFile:
    if isinstance(value, PemFile):
        return value
    if isinstance(value, dict) and is_resolved(info):
        return PemFile(Path(value["path"]), value["text"])
    path = path_in(value, info)
    text = text_of(path)
    if "-----BEGIN " not in text:
        raise ValueError(f"{path} is not a PEM file: it has no line -----BEGIN …-----")
    return PemFile(path, text)


def plain_pem(file: PemFile) -> dict[str, Any]:
    """For the link."""
    return {"path": str(file.path), "text": file.text}


PemValue = Annotated[PemFile, BeforeValidator(_pem_file)]


class _TlsSection(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)

    ca_file: PemValue | None = None
    cert_file: PemValue | None = None
    key_file: PemValue | None = None
    protocols: str = "secure"
    ciphers: str = "default"
    tls13_ciphers: str | None = None


class ClientTlsSettings(_TlsSection):
    """TLS of clients. `allow` and `prefer` leave the choice to the client; from `require` on it must encrypt
    (unix sockets apart), from `verify-ca` on with a certificate that `ca_file` vouches for."""

    sslmode: SslMode = "disable"
    ecdhcurve: str = "auto"
    dheparams: str = "auto"


class ServerTlsSettings(_TlsSection):
    """TLS to servers, with libpq's meaning of the modes; `require` does not look at the certificate."""

    sslmode: SslMode = "prefer"
