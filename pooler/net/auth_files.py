"""The files that say who may come in and how: the userlist, the rules of pg_hba.conf, the maps of
pg_ident.conf. Read whole: with one faulty line in one of them none is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from pooler.errors import UsageFault
from pooler.net.hba import Hba, read_hba
from pooler.net.ident import IdentMaps, read_ident
from pooler.net.interfaces import own_interfaces
from pooler.net.userlist import Userlist, read_userlist
from pooler.settings import AuthSettings
from pooler.wire.auth import AuthType

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AuthFiles:
    """What stands in them; `userlist` is None without one."""

    userlist: Userlist | None = None
    hba: Hba = field(default_factory=Hba)
    ident: IdentMaps = field(default_factory=IdentMaps)

    @classmethod
    def read(cls, auth: AuthSettings) -> AuthFiles:
        """Raises UsageFault naming every faulty line of every file."""
        faults = list(faults_in(auth))
        if faults:
            raise UsageFault("\n".join(line for _, line in faults))
        return cls(
            _maybe(auth.file, read_userlist), _maybe(auth.hba_file, _read_rules) or Hba(),
            _maybe(auth.ident_file, read_ident) or IdentMaps())


def faults_in(auth: AuthSettings) -> Iterator[tuple[str, str]]:
    """(path in the config, what is wrong) for each faulty line of each file, and for what they need."""
    yield from _faults("auth.file", auth.file, read_userlist)
    yield from _faults("auth.ident_file", auth.ident_file, read_ident)
    yield from _faults("auth.hba_file", auth.hba_file, _read_rules)
    if AuthType(auth.type) is AuthType.PAM:
        yield from _without_pam("auth.type", "auth.type pam")


def _faults(path: str, file: Path | None, read: Callable[[Path], object]) -> Iterator[tuple[str, str]]:
    if file is None:
        return
    try:
        found = read(file)
    except UsageFault as refused:
        yield from ((path, line) for line in str(refused).splitlines())
        return
    if isinstance(found, Hba):
        for rule in found.rules:
            if rule.method is AuthType.PAM:
                yield from _without_pam(path, f"{rule.where}: method pam")


def _without_pam(path: str, what: str) -> Iterator[tuple[str, str]]:
    if find_spec("pam") is None:
        yield path, f"{what} needs the package python-pam, which is not installed: pip install python-pam"


def _read_rules(path: Path) -> Hba:
    return read_hba(path, own=own_interfaces)


def _maybe(path: Path | None, read: Callable[[Path], _T]) -> _T | None:
    return None if path is None else read(path)
