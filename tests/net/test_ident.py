"""pg_ident.conf: who outside may be whom here, and what a faulty line is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pooler.errors import UsageFault
from pooler.net.hba_tokens import Files
from pooler.net.ident import IdentMaps, read_ident


def ident(content: str) -> IdentMaps:
    return read_ident(Path("ident"), files=Files(lambda _: content, lambda _: True, lambda _: []))


MAPS = ident(r"""
# MAP    SYSTEM                 USER
staff    alice                  ann
staff    alice                  reports
mail     /^(.*)@example\.com$   \1
mail     /^ops-                 operator
root     root                   all
wide     web                    "/^app_[a-z]+$"
"quoted" "Ann Miller"           "all"
dotted   /^([a-z]+)\.([a-z]+)$  x_\1
""")


@pytest.mark.parametrize(("name", "system", "user", "allowed"), [
    ("staff", "alice", "ann", True),
    ("staff", "alice", "reports", True),
    ("staff", "alice", "alice", False),
    ("staff", "Alice", "ann", False),
    ("mail", "bob@example.com", "bob", True),
    ("mail", "bob@example.com", "ann", False),
    ("mail", "bob@example.comx", "bob", False),
    ("mail", "ops-7", "operator", True),
    ("root", "root", "anybody", True),
    ("wide", "web", "app_x", True),
    ("wide", "web", "admin", False),
    ("quoted", "Ann Miller", "all", True),
    ("quoted", "Ann Miller", "ann", False),
    ("dotted", "ann.miller", "x_ann", True),
    ("nowhere", "alice", "alice", False),
    (None, "alice", "alice", True),
    (None, "alice", "ann", False),
])
def test_a_map_allows_what_one_of_its_lines_does(
    name: str | None, system: str, user: str, allowed: bool
) -> None:
    assert MAPS.allows(name, system, user) is allowed


@pytest.mark.parametrize(("line", "told"), [
    ("staff alice", "three names belong on a line"),
    ("staff alice,bob ann", "three names belong on a line"),
    ("staff /( ann", "not a regular expression"),
    (r"staff /^x$ \1", "there are none"),
    ("staff alice +admins", "membership of roles"),
])
def test_a_faulty_line_is_told_where_and_what_to_do(line: str, told: str) -> None:
    with pytest.raises(UsageFault) as refused:
        ident(f"# first\n{line}\n")
    assert str(refused.value).startswith("ident:2: ")
    assert told in str(refused.value)
