"""What of a new config a running fleet can take. Pure."""

from __future__ import annotations

from pooler.settings import ServiceSettings, Settings

_FLEET_LIVE = frozenset({"drain_timeout_seconds", "drain_notice_seconds", "proxy_protocol_from"})


def merge_reload(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """The settings to go on with, and one line for each change that waits for a restart of the fleet.

    Sockets, the run directory, the number of workers and the place of the ledger belong to the running
    processes: they keep their values.
    """
    waiting: list[str] = []
    for name, field in type(old.fleet).model_fields.items():
        if name not in _FLEET_LIVE and getattr(old.fleet, name) != getattr(new.fleet, name):
            waiting.append(_waits(f"fleet.{field.alias or name}"))
    fleet = old.fleet.model_copy(update={name: getattr(new.fleet, name) for name in _FLEET_LIVE})
    services = _merge_services(old, new, waiting)
    for section in ("etcd", "http"):
        if getattr(old, section) != getattr(new, section):
            waiting.append(_waits(section))
    sections = {"fleet": fleet, "services": services, "etcd": old.etcd, "http": old.http}
    return new.model_copy(update=sections), waiting


def _merge_services(old: Settings, new: Settings, waiting: list[str]) -> dict[str, ServiceSettings]:
    if old.services.keys() != new.services.keys():
        waiting.append(_waits("services"))
        return old.services
    merged = {}
    for name, service in new.services.items():
        ports = old.services[name].worker_ports
        if service.worker_ports != ports:
            waiting.append(_waits(f"services.{name}.worker_ports"))
        merged[name] = service.model_copy(update={"worker_ports": ports})
    return merged


def _waits(path: str) -> str:
    return f"{path} changed: it keeps its old value until the fleet is restarted"
