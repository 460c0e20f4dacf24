"""How this very command is typed in a shell, so that what is printed can be pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def pooler_command() -> str:
    """`pooler` where the shell would find the one of this environment; else its path, as short as it works
    from the present directory; else the interpreter with the module."""
    script = Path(sys.executable).parent / "pooler"
    if not script.is_file():
        return shlex.join([sys.executable, "-m", "pooler.cli.main"])
    found = shutil.which("pooler")
    if found is not None and Path(found).absolute() == script.absolute():
        return "pooler"
    return shlex.quote(short_path(script))


def psql_command(program: Path | None = None) -> str:
    """`psql` if the shell finds one, else this `program`."""
    return "psql" if program is None or shutil.which("psql") else shlex.quote(str(program))


def short_path(path: Path) -> str:
    """The path from the present directory if it is below that, else whole."""
    whole, here = Path(os.path.abspath(path)), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
