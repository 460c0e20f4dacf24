"""Values of the config file: durations, sizes, addresses, networks, secrets, paths, policy files.

Each type takes what a person writes and yields one exact thing, or a ValueError that says what is allowed.
Relative paths and secrets are resolved here, against the folder in the validation context. With `resolved` in
the context (values that came over the link) nothing is read from disk or from the environment.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, SecretStr, ValidationInfo

from coordinator.bounded_yaml import TooMuch, read_yaml, text_within
from coordinator.yaml_faults import yaml_fault

_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "kib": 1 << 10, "mb": 1 << 20, "mib": 1 << 20, "gb": 1 << 30,
               "gib": 1 << 30}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_SECRET_BYTES_MAX = 65_536
UNIX_PATH_BYTES_MAX = 107  # sun_path of Linux less its closing zero


def parse_duration_seconds(value: object) -> float:
    """`250ms`, `5s`, `2m`, `1h`, or a plain number of seconds. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        found = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
        scale = _DURATION_UNITS.get(found[2] or "s") if found else None
        if found is None or scale is None:
            raise ValueError(f"{_quoted(value)} is not a duration: write 250ms, 5s, 2m, 1h or plain seconds")
        seconds = float(found[1]) * scale
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{_quoted(value)} must be a duration of zero or more")
    return seconds


NO_WAIT_SECONDS = -1.0  # `nowait`: 0 is PgBouncer's word for no limit


def parse_wait_seconds(value: object) -> float:
    """A duration, or `nowait`. Raises ValueError."""
    return NO_WAIT_SECONDS if value in ("nowait", NO_WAIT_SECONDS) else parse_duration_seconds(value)


def parse_size_bytes(value: object) -> int:
    """`4096`, `64kB`, `256MB` (powers of 1024, as PostgreSQL). Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    scale = _SIZE_UNITS.get(found[2].lower()) if found else None
    if found is None or scale is None:
        raise ValueError(f"{_quoted(value)} is not a size: write 4096, 64kB, 256MB")
    return int(float(found[1]) * scale)


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port. `str()` gives it back as written, IPv6 in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, value: object) -> Address:
        """`host:port`, `[::1]:port`, `*:port`. Raises ValueError."""
        if isinstance(value, Address):
            return value
        host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not (colon and host and port.isascii() and port.isdigit()) or re.search(r"[\s,/\[\]]", host):
            raise ValueError(f"{_quoted(value)} is not an address: write host:port, such as 127.0.0.1:6432")
        if not 1 <= int(port) <= 65535:
            raise ValueError(f"{_quoted(value)}: the port must be from 1 to 65535")
        return cls("0.0.0.0" if host == "*" else host, int(port))

    @classmethod
    def parse_server(cls, value: object) -> Address:
        """As parse, and `/directory:port` for a server's unix socket there. Raises ValueError."""
        if not (isinstance(value, str) and value.startswith("/")):
            return cls.parse(value)
        folder, colon, port = value.rpartition(":")
        if not (colon and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
            raise ValueError(f"{_quoted(value)} is no server's socket: write /directory:port, such as "
                             "/run/postgresql:5432")
        return cls(folder, int(port))

    def is_wildcard(self) -> bool:
        return self.host in ("0.0.0.0", "::")

    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def overlaps(self, other: Address) -> bool:
        """Whether both cannot be listened on at once."""
        same_host = _canonical_host(self.host) == _canonical_host(other.host)
        return self.port == other.port and (same_host or self._covers(other) or other._covers(self))

    def _covers(self, other: Address) -> bool:
        """Every address of one family; a name may have addresses of both."""
        return self.is_wildcard() and (other.host[:1].isalpha() or (":" in self.host) == (":" in other.host))


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """An admission policy as read at load: `database` is the name of its ledger."""

    path: Path
    text: str
    database: str


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _canonical_host(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def _base(info: ValidationInfo) -> Path:
    return Path(info.context["base"]) if info.context and "base" in info.context else Path.cwd()


def is_resolved(info: ValidationInfo) -> bool:
    """Whether the values came over the link: nothing is read then."""
    return bool(info.context and info.context.get("resolved"))


def path_in(value: object, info: ValidationInfo) -> Path:
    """A path, against the folder of the config. Raises ValueError."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{_quoted(value)} is not a path")
    return (_base(info) / Path(value).expanduser()).absolute()


def _readable_file(value: object, info: ValidationInfo) -> Path:
    path = path_in(value, info)
    if not is_resolved(info):
        text_of(path)
    return path


def text_of(path: Path) -> str:
    """Raises ValueError for what cannot be read."""
    try:
        return text_within(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except TooMuch as fault:
        raise ValueError(f"{path}: {fault}") from None
    except OSError as fault:
        raise ValueError(f"cannot read {path}: {fault.strerror}") from None


def _secret(value: object, info: ValidationInfo) -> SecretStr:
    """Never puts the value itself into an error."""
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str):
        raise ValueError("a secret must be text: put it in quotes, or write env:NAME or file:PATH")
    if is_resolved(info):
        return SecretStr(value)
    if value.startswith("env:"):
        found = os.environ.get(value[4:])
        if found is None:
            raise ValueError(f"the environment has no variable {value[4:]}")
        return SecretStr(found)
    if value.startswith("file:"):
        text = text_of((_base(info) / Path(value[5:]).expanduser()).absolute()).rstrip("\r\n")
        if not text or len(text.encode()) > _SECRET_BYTES_MAX or "\n" in text:
            raise ValueError(f"{value[5:]} must hold one line of 1 to {_SECRET_BYTES_MAX} bytes")
        return SecretStr(text)
    return SecretStr(value)


def _policy_file(value: object, info: ValidationInfo) -> PolicyFile:
    if isinstance(value, PolicyFile):
        return value
    if isinstance(value, dict) and is_resolved(info):
        return PolicyFile(Path(value["path"]), value["text"], value["database"])
    path = path_in(value, info)
    if not path.exists():
        raise ValueError(f"there is no file {path} (`pooler init --dsn …` writes one that fits a server)")
    text = text_of(path)
    try:
        policy = read_yaml(text)
    except yaml.YAMLError as fault:
        raise ValueError(f"{path} is not YAML: {yaml_fault(fault)}") from None
    database = policy.get("database") if isinstance(policy, dict) else None
    if not isinstance(database, str) or not database:
        raise ValueError(f"{path} is not an admission policy: it has no `database: name/role`")
    return PolicyFile(path, text, database)


def _network(value: object) -> str:
    try:
        return str(ipaddress.ip_network(str(value), strict=False))
    except ValueError:
        raise ValueError(f"{_quoted(value)} is not an IP address or a network such as 10.0.0.0/8") from None


def one_or_more(value: object) -> Any:
    """A YAML list as a tuple; a single value as a tuple of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def as_tuple(value: object) -> Any:
    """A YAML list as a tuple; anything else is left to be refused."""
    return tuple(value) if isinstance(value, list) else value


def _rows(value: object) -> object:
    """A YAML list of lists as tuples."""
    return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value


Rows = Annotated[tuple[tuple[str | int | None, ...], ...], BeforeValidator(_rows)]
Seconds = Annotated[float, BeforeValidator(parse_duration_seconds)]
WaitSeconds = Annotated[float, BeforeValidator(parse_wait_seconds)]
Bytes = Annotated[int, BeforeValidator(parse_size_bytes)]
HostPort = Annotated[Address, BeforeValidator(Address.parse)]
ServerPorts = Annotated[
    tuple[Annotated[Address, BeforeValidator(Address.parse_server)], ...], BeforeValidator(one_or_more)]
HostPorts = Annotated[tuple[HostPort, ...], BeforeValidator(one_or_more)]
Network = Annotated[str, BeforeValidator(_network)]
Networks = Annotated[tuple[Network, ...], BeforeValidator(as_tuple)]
Strings = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
PathValue = Annotated[Path, BeforeValidator(path_in)]
ReadableFile = Annotated[Path, BeforeValidator(_readable_file)]
Secret = Annotated[SecretStr, BeforeValidator(_secret)]
PolicyValue = Annotated[PolicyFile, BeforeValidator(_policy_file)]
