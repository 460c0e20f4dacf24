"""What is wrong inside the files a config names: its policies and its userlist."""

from __future__ import annotations

from pooler.errors import UsageFault
from pooler.settings import Fault, Settings


def file_faults(settings: Settings) -> tuple[Fault, ...]:
    """Every fault of every policy and of the userlist, each at its path in the config."""
    return (*_policy_faults(settings), *_userlist_faults(settings))


def _policy_faults(settings: Settings) -> list[Fault]:
    from coordinator.policy import PolicyRefused, load_policy

    found: list[Fault] = []
    for name, database in settings.databases.items():
        try:
            load_policy(database.policy.text)
        except PolicyRefused as refused:
            path = f"databases.{name}.policy"
            found += [Fault(path, f"{database.policy.path}: {fault}") for fault in refused.faults]
    return found


def _userlist_faults(settings: Settings) -> list[Fault]:
    from pooler.net.userlist import parse_userlist

    file = settings.auth.file
    if file is None:
        return []
    try:
        parse_userlist(file.read_bytes(), str(file))
    except UsageFault as refused:
        return [Fault("auth.file", line) for line in str(refused).splitlines()]
    return []
