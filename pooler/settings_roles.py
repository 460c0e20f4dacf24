"""Whose sessions at a server are the fleet's, as far as the config tells."""

from __future__ import annotations

from pooler.errors import UsageFault
from pooler.net.userlist import read_userlist
from pooler.settings_models import Settings


def server_users(settings: Settings, name: str) -> list[str]:
    """The roles that sessions of a `databases` entry log in as: the entry's own user, or else everybody of
    the userlist but the console's; those of an auth_query are not known beforehand.

    A userlist that cannot be read names nobody: who reads it for logins says what is wrong with it.
    """
    database, file = settings.databases[name], settings.auth.file
    if database.user is not None:
        return [database.user]
    if file is None:
        return []
    consoles = {*settings.admin.users, *settings.admin.stats_users}
    try:
        return sorted(set(read_userlist(file).users) - consoles)
    except (UsageFault, ValueError):
        return []
