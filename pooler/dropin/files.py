"""The ini read from disk, and what it became written to a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import yaml

from pooler.dropin.carry import Carried
from pooler.dropin.ini import parse_ini
from pooler.dropin.reading import Bouncer, read_bouncer
from pooler.errors import PoolerError, UsageFault
from pooler.net.userlist import read_userlist
from pooler.supervise.files import replace_file

CONFIG_NAME = "pooler.yaml"
_MODE = re.compile(r"^( *unix_socket_mode: )(\d+)$", re.MULTILINE)  # written as everybody writes it: in octal


class FileInTheWay(PoolerError):
    """A file that would be overwritten."""


def reader_from(base: Path) -> Callable[[str], str]:
    """Reads a path as written in an ini: relative to `base`, `~` as a shell has it."""
    return lambda name: (base / Path(name).expanduser()).read_text(encoding="utf-8")


def read_ini(file: str, base: Path) -> Bouncer:
    """The ini of that path. Raises IniRefused with every fault."""
    return read_bouncer(parse_ini(file, reader_from(base)))


def count_users(auth_file: Path) -> int:
    """How many users an auth_file has, 0 if it cannot be read."""
    try:
        return len(read_userlist(auth_file).users)
    except UsageFault:
        return 0


def write_config(folder: Path, carried: Carried, head: str, *, overwrite: bool) -> Path:
    """Write pooler.yaml and the policies, readable by their owner alone; the path of pooler.yaml.

    Raises FileInTheWay before anything is written, OSError.
    """
    texts = {folder / CONFIG_NAME: head + _yaml(carried.config)}
    texts |= {folder / name: _yaml(policy) for name, policy in carried.policies.items()}
    taken = [path for path in texts if path.exists()]
    if taken and not overwrite:
        raise FileInTheWay(f"{taken[0]} exists already: name another folder with -o, or remove it")
    for path, text in texts.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text.encode())
        os.chmod(path, 0o600)
    return folder / CONFIG_NAME


def _yaml(values: object) -> str:
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    return _MODE.sub(lambda found: f"{found[1]}{int(found[2]):04o}", text)
