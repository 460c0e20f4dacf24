"""Reading the config file: where it is, and every fault in it at once.

A fault names its path (`databases.orders.pool_mode`), the value, and what is allowed; an unknown
key comes with the nearest known name. Checks across sections run on whatever sections are sound,
so one fault hides no other.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from coordinator.bounded_yaml import BoundedLoader, text_within, value_of
from coordinator.yaml_faults import plain, yaml_fault
from pooler.errors import UsageFault
from pooler.net.tls_context import certificate_warnings
from pooler.settings_checks import faults_across
from pooler.settings_host import host_name, machine_id
from pooler.settings_inert import inert_settings
from pooler.settings_models import Settings
from pooler.settings_pressure import pressure_warnings
from pooler.settings_roles import server_users
from pooler.settings_tls import ServerTlsSettings

CONFIG_PLACES = (Path("pooler.yaml"), Path("/etc/pooler/pooler.yaml"))
_NUMBER_LIMITS = {
    "greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than"),
}
_KINDS = {
    "string_type": "text (in quotes if it looks like a number)", "int_type": "a whole number",
    "int_from_float": "a whole number", "float_type": "a number", "bool_type": "true or false",
    "tuple_type": "a list", "list_type": "a list", "dict_type": "a mapping", "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `path` is where in the file, `text` what is wrong and what is allowed."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


class ConfigFaults(UsageFault):
    """Everything wrong with one config file."""

    def __init__(self, file: Path, faults: tuple[Fault, ...]) -> None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n".join([f"{file}: {count}", *(f"  {fault}" for fault in faults)]))
        self.file = file
        self.faults = faults


def find_config(option: str | Path | None = None) -> Path:
    """The config file: `option` (-c), else POOLER_CONFIG, ./pooler.yaml, /etc/pooler/pooler.yaml.

    Raises UsageFault listing the places looked in.
    """
    for given, source in ((option, "-c"), (os.environ.get("POOLER_CONFIG"), "POOLER_CONFIG")):
        if given:
            if not Path(given).is_file():
                raise UsageFault(f"there is no config file {given} (named by {source})")
            return Path(given)
    for place in CONFIG_PLACES:
        if place.is_file():
            return place
    places = ", ".join(str(place) for place in CONFIG_PLACES)
    looked = f"-c (not given), POOLER_CONFIG (not set), {places}"
    raise UsageFault(f"no config file found; looked in: {looked}\n`pooler init --dsn …` writes one")


def load(path: str | Path) -> Settings:
    """The settings in `path`. Raises ConfigFaults with every fault of the file."""
    file = Path(path)
    values, faults = _read(file)
    if values is None:
        raise ConfigFaults(file, tuple(faults))
    context = {"base": str(file.absolute().parent)}
    settings: Settings | None = None
    try:
        settings = Settings.model_validate(values, context=context)
    except ValidationError as error:
        faults += [_fault(details) for details in _without_echoes(error.errors(include_url=False))]
    sound = _sound_sections(values, context) if settings is None else settings.__dict__
    faults += [Fault(*found) for found in faults_across(sound)]
    if faults or settings is None:
        raise ConfigFaults(file, tuple(sorted(set(faults), key=lambda fault: fault.path)))
    return settings


def warnings_of(settings: Settings) -> list[str]:
    """What is allowed but will be regretted, each in one line."""
    found = [
        f"databases.{name}.monitor is not set: no look at the server can free the permit of a lost session "
        "(SESSION_UNKNOWN); `pooler init --dsn …` writes the role for it"
        for name, database in settings.databases.items() if database.monitor is None
    ]
    if not settings.http.listen.is_loopback() and settings.http.token is None:
        found.append(f"http.listen is {settings.http.listen} without http.token: anybody there can read it")
    if settings.auth.type == "trust":
        found.append("auth.type is trust: any client may log in as any user")
    now = datetime.now(UTC)
    found += [f"client_tls.{line}" for line in certificate_warnings(settings.client_tls, now)]
    found += [f"server_tls.{line}" for line in certificate_warnings(settings.server_tls, now)]
    return found + pressure_warnings(settings) + inert_settings(settings)


def coordinator_spec(settings: Settings) -> dict[str, Any]:
    """What the coordinator is told to be (CoordinatorSpec of docs/link.md); the supervisor sets `http_fd`."""
    fleet, etcd = settings.fleet, settings.etcd
    return {
        "fleet": fleet.name,
        "prefix": etcd.prefix,
        "host": fleet.host_name or host_name(),
        "machine_id": machine_id(),
        "run_dir": str(fleet.run_dir),
        "socket": str(settings.coordinator_socket),
        "lease_ttl_seconds": etcd.lease_ttl_seconds,
        "etcd": {
            "embedded": etcd.embedded,
            "endpoints": [str(endpoint) for endpoint in etcd.endpoints],
            "user": etcd.user,
            "password": etcd.password.get_secret_value() if etcd.password is not None else None,
            "ca": _text(etcd.tls.ca),
            "cert": _text(etcd.tls.cert),
            "key": _text(etcd.tls.key),
            "data_dir": str(etcd.data_dir or fleet.run_dir / "etcd"),
        },
        "http_fd": None,
        "databases": [_database_spec(settings, name) for name in settings.databases],
        "reconcile": settings.failover.reconcile,
        "unknown_terminate_after_seconds": settings.failover.unknown_terminate_after_seconds,
        "orphan_connect_grace_seconds": settings.failover.orphan_connect_grace_seconds,
        "node_identity": settings.failover.node_identity,
        "patroni": list(settings.failover.patroni) if settings.failover.detect == "patroni" else [],
        "fence_command": settings.failover.fence_command,
        "drain_timeout_seconds": settings.failover.drain_timeout_seconds,
        "log": {"format": settings.log.format, "level": settings.log.level},
    }


def _database_spec(settings: Settings, name: str) -> dict[str, Any]:
    database = settings.databases[name]
    monitor = database.monitor
    return {
        "db": database.ledger,
        "name": name,
        "dbname": database.dbname or name,
        "hosts": [str(host) for host in database.hosts],
        "role": database.role,
        "policy": database.policy.text,
        "max_replica_lag_seconds": database.max_replica_lag_seconds,
        "users": server_users(settings, name),
        "monitor": None if monitor is None else {
            "user": monitor.user,
            "password": monitor.password.get_secret_value() if monitor.password is not None else None,
            "tls": _libpq_tls(settings.server_tls),
        },
    }


def _libpq_tls(settings: ServerTlsSettings) -> dict[str, str]:
    """The same for sessions that libpq opens, in its words. Files are those of the config: it reads them
    itself. Where no certificate is looked at it gets no CA, with which `require` would mean more."""
    files = {"sslcert": settings.cert_file, "sslkey": settings.key_file}
    if settings.sslmode in ("verify-ca", "verify-full"):
        files["sslrootcert"] = settings.ca_file
    given = {word: str(file) for word, file in files.items() if file is not None}
    return {"sslmode": settings.sslmode, **given}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


class _Repeated(BoundedLoader):
    """A SafeLoader that notes keys written twice (YAML would silently keep the last)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                line = key.start_mark.line + 1
                self.repeated.append(f'line {line}: key "{plain(key.value)}" is written twice')
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> tuple[dict[Any, Any] | None, list[Fault]]:
    try:
        loader = _Repeated(text_within(file))
        values = value_of(loader)
    except OSError as fault:
        return None, [Fault("", f"cannot read it: {fault.strerror}")]
    except UnicodeDecodeError:
        return None, [Fault("", "it is not UTF-8 text")]
    except yaml.YAMLError as fault:
        return None, [Fault("", f"it is not YAML: {yaml_fault(fault)}")]
    if not isinstance(values, dict):
        return None, [Fault("", "it must be a mapping of sections: fleet, databases, …")]
    return values, [Fault("", text) for text in loader.repeated]


def _sound_sections(values: dict[Any, Any], context: dict[str, str]) -> dict[str, Any]:
    sound: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        if name not in values:
            sound[name] = None if field.is_required() else field.get_default(call_default_factory=True)
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
            sound[name] = adapter.validate_python(values[name], context=context)
        except ValidationError:
            sound[name] = None
    return sound


def _without_echoes(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Less "is too short" about a list whose items were refused one by one."""
    told = {details["loc"][:-1] for details in errors}
    return [details for details in errors if details["type"] != "too_short" or details["loc"] not in told]


def _fault(details: ErrorDetails) -> Fault:
    location = details["loc"]
    path = ".".join(plain(part) for part in location)
    kind, value = details["type"], details.get("input")
    if kind == "missing":
        return Fault(path, _required(location))
    if kind == "extra_forbidden":
        return Fault(path, _unknown(location))
    if kind == "value_error":
        return Fault(path, details["msg"].removeprefix("Value error, "))
    return Fault(path, _refused(kind, value, details))


def _required(location: tuple[int | str, ...]) -> str:
    hint = " (`pooler init --dsn …` writes a policy that fits a server)" if location[-1] == "policy" else ""
    return f"is required{hint}"


def _unknown(location: tuple[int | str, ...]) -> str:
    known = _known_keys(location[:-1])
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if near:
        return f'no such setting; did you mean "{near[0]}"?'
    return f"no such setting; known here: {', '.join(sorted(known))}"


def _refused(kind: str, value: object, details: ErrorDetails) -> str:
    context: dict[str, Any] = details.get("ctx", {})
    shown = _shown(value)
    if kind == "literal_error":
        allowed = str(context["expected"]).replace(" or ", ", ").replace("'", "").replace("True", "true")
        return f"{shown} is not one of {allowed.replace('False', 'false')}"
    if kind in _NUMBER_LIMITS:
        name, words = _NUMBER_LIMITS[kind]
        return f"{shown} must be {words} {context[name]:g}"
    if kind in _KINDS:
        # what stands in place of a mapping or list may hold secrets: it is not shown
        hidden = isinstance(value, str) and _KINDS[kind] in ("a mapping", "a list")
        scalar = isinstance(value, str | int | float) and not hidden
        return f"{shown if scalar else 'the value'} must be {_KINDS[kind]}"
    if kind == "string_pattern_mismatch":
        return f"{shown} must match {context['pattern']}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    return details["msg"]


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"' if value.isprintable() else repr(value)
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] | None = Settings
    named = False  # the last step led to a mapping whose keys are free names
    for part in location:
        if named or isinstance(part, int):
            named = False
            continue
        fields = {} if model is None else model.model_fields
        field = next((f for name, f in fields.items() if (f.alias or name) == part), None)
        inner = [] if field is None else list(_models_in(field.annotation))
        named = field is not None and "dict[" in str(field.annotation)
        model = inner[0] if inner else None
    return [] if model is None else [field.alias or name for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)
