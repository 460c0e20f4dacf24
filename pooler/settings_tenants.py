"""The `tenants` of the config: rules that say which tenant and class a client is of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TenantMatch(BaseModel):
    """All that is given must match; patterns as of a shell. `pooler_tenant`, `pooler_class`: what the client
    says at its start."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)

    user: str | None = None
    database: str | None = None
    application_name: str | None = None
    client_address: str | None = None
    pooler_tenant: str | None = None
    pooler_class: str | None = None


class TenantSettings(BaseModel):
    """First match wins."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)

    match: TenantMatch
    tenant: str | None = Field(None, min_length=1)
    class_name: str | None = Field(None, alias="class", min_length=1)
    client_may_choose: bool | None = Field(
        None, description="true: also what this rule gives; false: nothing; default: the rest")
