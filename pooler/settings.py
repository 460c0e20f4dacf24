"""The config of a fleet, as everybody imports it: models, `load`, `find_config`, `coordinator_spec`."""

from __future__ import annotations

from pooler.settings_load import (
    ConfigFaults,
    Fault,
    coordinator_spec,
    find_config,
    load,
    warnings_of,
)
from pooler.settings_models import (
    AdminSettings,
    AuthSettings,
    DatabaseSettings,
    EtcdSettings,
    FailoverSettings,
    FleetSettings,
    HttpSettings,
    LogSettings,
    MonitorSettings,
    PoolMode,
    PoolSettings,
    Role,
    ServiceSettings,
    Settings,
    Strict,
    TlsSettings,
    UserSettings,
)
from pooler.settings_tenants import TenantMatch, TenantSettings
from pooler.settings_tls import ClientTlsSettings, PemFile, ServerTlsSettings
from pooler.settings_units import Address, PolicyFile

__all__ = [
    "Address",
    "AdminSettings",
    "AuthSettings",
    "ClientTlsSettings",
    "ConfigFaults",
    "DatabaseSettings",
    "EtcdSettings",
    "FailoverSettings",
    "Fault",
    "FleetSettings",
    "HttpSettings",
    "LogSettings",
    "MonitorSettings",
    "PemFile",
    "PolicyFile",
    "PoolMode",
    "PoolSettings",
    "Role",
    "ServerTlsSettings",
    "ServiceSettings",
    "Settings",
    "Strict",
    "TenantMatch",
    "TenantSettings",
    "TlsSettings",
    "UserSettings",
    "coordinator_spec",
    "find_config",
    "load",
    "warnings_of",
]
