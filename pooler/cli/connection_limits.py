"""What PostgreSQL itself is to be told of a budget: CONNECTION LIMIT of each role and of each database. Pure.

It is the second lock on the same door: should the fleet ever open more than its permits, the server refuses.
Where sessions of several ledgers may meet, what they want there together is the limit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from coordinator.policy import Policy
from pooler.cli.first_files import sql_identifier
from pooler.settings_models import Settings
from pooler.settings_roles import server_users

MONITORS = 2  # sessions of the monitor role beside those of commands: the leader's, and that of its successor


def statements(settings: Settings, policies: Mapping[str, Policy]) -> list[str]:
    """One statement for each role and each database of the config's entries on these ledgers' servers.

    `policies` by ledger: those in force, and the one that is to be.
    """
    entries = {name: each for name, each in settings.databases.items() if each.ledger in policies}
    roles: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    databases: dict[str, set[str]] = defaultdict(set)
    monitors: dict[str, set[str]] = defaultdict(set)
    for name, entry in entries.items():
        databases[entry.dbname or name].add(entry.ledger)
        if entry.monitor is not None:
            monitors[entry.monitor.user].add(entry.ledger)
        for user in server_users(settings, name):
            whose = user if entry.user is None else ""
            reserve = settings.user(whose).reserve_pool_size or entry.reserve_pool_size
            wanted = settings.pool_size(name, whose) + (
                settings.pool.reserve_pool_size if reserve is None else reserve)
            roles[user][entry.ledger] += wanted
    limits = {role: sum(min(wanted, _of_clients(policies[db])) + policies[db].replication_reserve
                        for db, wanted in by_ledger.items()) for role, by_ledger in roles.items()}
    for role, ledgers in monitors.items():
        limits[role] = limits.get(role, 0) + sum(policies[db].admin_reserve for db in ledgers) + MONITORS
    return [
        *(f"ALTER ROLE {sql_identifier(role)} CONNECTION LIMIT {limit};"
          for role, limit in sorted(limits.items())),
        *(f"ALTER DATABASE {sql_identifier(dbname)} CONNECTION LIMIT "
          f"{_of_all(policies[db] for db in ledgers)};"
          for dbname, ledgers in sorted(databases.items())),
    ]


def _of_clients(policy: Policy) -> int:
    return policy.server_session_permits + policy.reserve_permits


def _of_all(policies: Iterable[Policy]) -> int:
    """Slots, reserves, declared others, and the leader's own session and its successor's."""
    return MONITORS + sum(
        _of_clients(policy) + policy.admin_reserve + policy.replication_reserve + policy.other_clients
        for policy in policies)
