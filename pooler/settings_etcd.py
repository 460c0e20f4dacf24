"""The section `etcd` of the config: where the ledger is."""

from __future__ import annotations

from pydantic import Field

from pooler.settings_units import HostPorts, PathValue, ReadableFile, Seconds, Secret, Strict


class TlsSettings(Strict):
    """Files in PEM."""

    ca: ReadableFile | None = None
    cert: ReadableFile | None = None
    key: ReadableFile | None = None


class EtcdSettings(Strict):
    """Where the ledger is: endpoints, or one of our own with `etcd: embedded`."""

    embedded: bool = False
    endpoints: HostPorts = ()
    prefix: str = Field("pooler", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    lease_ttl_seconds: Seconds = Field(5.0, alias="lease_ttl", ge=1, le=600)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    user: str | None = None
    password: Secret | None = None
    data_dir: PathValue | None = None
