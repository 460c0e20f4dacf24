"""What is wrong inside the files a config names: its policies and those about logins."""

from __future__ import annotations

from pooler.settings import Fault, Settings


def file_faults(settings: Settings) -> tuple[Fault, ...]:
    """Every fault of every policy, userlist, hba and ident file, each at its path in the config."""
    return (*policy_faults(settings), *_auth_faults(settings))


def policy_faults(settings: Settings) -> list[Fault]:
    """Every fault of every policy."""
    from coordinator.policy import PolicyRefused, load_policy

    found: list[Fault] = []
    for name, database in settings.databases.items():
        try:
            load_policy(database.policy.text)
        except PolicyRefused as refused:
            path = f"databases.{name}.policy"
            found += [Fault(path, f"{database.policy.path}: {fault}") for fault in refused.faults]
    return found


def _auth_faults(settings: Settings) -> list[Fault]:
    from pooler.net.auth_files import faults_in

    return [Fault(path, line) for path, line in faults_in(settings.auth)]
