"""PgBouncer's `auth_file`: lines of "user" "secret", read whole or not at all.

Source: PgBouncer's documentation, "Authentication file format". `;` begins a comment line, a double quote
inside a field is doubled, the rest of a line is ignored, a later line for the same user wins. A secret is
never part of a message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pooler.errors import UsageFault
from pooler.wire.auth import Method, Secret
from pooler.wire.messages import shown

FILE_BYTES_MAX = 64 * 1024 * 1024
_FIELD = re.compile(rb'"((?:[^"]|"")*+)"')


@dataclass(frozen=True)
class Userlist:
    """The users of a file. A user whose secret is empty exists and can log in by no password."""

    users: Mapping[str, Secret] = field(default_factory=dict, repr=False)

    def find(self, user: str) -> Secret | None:
        """The stored secret, or None for a user that is not in the file."""
        return self.users.get(user)

    @cached_property
    def usual_method(self) -> Method:
        """What most users are asked for under auth_type md5: users who do not exist are asked the same."""
        kinds = Counter(Method.SCRAM if s.scram is not None else Method.MD5 for s in self.users.values())
        return kinds.most_common(1)[0][0] if kinds else Method.SCRAM


def parse_userlist(content: bytes, name: str) -> Userlist:
    """Read the content of file `name`. Raises UsageFault naming every faulty line."""
    users: dict[str, Secret] = {}
    faults: list[str] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith(b";"):
            continue
        try:
            user, secret = _read_line(stripped)
        except ValueError as fault:
            faults.append(f"{name}:{number}: {fault}")
        else:
            users[user] = secret
    if faults:
        raise UsageFault("\n".join(faults))
    return Userlist(users)


def _read_line(line: bytes) -> tuple[str, Secret]:
    user = _FIELD.match(line)
    if user is None:
        raise ValueError('the user name is not in double quotes: write "user" "secret"')
    rest = line[user.end() :].lstrip()
    secret = _FIELD.match(rest)
    if secret is None:
        raise ValueError('no secret in double quotes after the user name: write "user" "secret"')
    name = _unquoted(user)
    if not name:
        raise ValueError("the user name is empty")
    return shown(name), Secret.parse(_unquoted(secret))


def _unquoted(found: re.Match[bytes]) -> bytes:
    return found.group(1).replace(b'""', b'"')


def read_userlist(path: Path) -> Userlist:
    """The users in a file. Raises UsageFault: it cannot be read, or naming every faulty line."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as fault:
        raise UsageFault(f"{path}: cannot be read: {fault.strerror}") from fault
    if len(content) > FILE_BYTES_MAX:
        raise UsageFault(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    return parse_userlist(content, str(path))
