"""Whether the policy files of a config are what is in force, as far as the fleet's etcd can be asked."""

from __future__ import annotations

import trio

from coordinator.ledger.keys import FleetKeys
from coordinator.opening import open_store
from coordinator.policy_difference import active_policies, policy_differences
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import StoreUnavailable, StoreUnknown
from pooler.cli.reach import spec_of
from pooler.errors import FleetUnreachable
from pooler.settings import Settings

ANSWER_SECONDS_MAX = 2.0


def policy_warnings(settings: Settings) -> list[str]:
    """One line for each policy file that differs; none where there is no ledger yet, or an etcd of our own
    that does not run; one line where etcd could not be asked."""
    try:
        spec = spec_of(settings)
    except FleetUnreachable:
        return []
    try:
        return trio.run(_compare, spec)
    except* (StoreUnavailable, StoreUnknown, trio.TooSlowError):
        pass
    if settings.etcd.embedded:
        return []
    return ["whether the policy files are what is in force is not known: etcd at "
            f"{', '.join(spec.etcd.endpoints)} did not answer"]


async def _compare(spec: CoordinatorSpec) -> list[str]:
    keys = FleetKeys(spec.prefix, spec.fleet)
    with trio.fail_after(ANSWER_SECONDS_MAX):
        async with open_store(spec) as store:
            active = await active_policies(store, keys, (each.db for each in spec.databases))
    return policy_differences(spec.databases, active)
