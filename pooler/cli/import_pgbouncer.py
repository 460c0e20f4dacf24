"""`pooler config import-pgbouncer`: an ini in, a config of ours and a list of what differs out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pooler.cli.options import JsonOption

if TYPE_CHECKING:
    from pooler.dropin.notes import Note


def import_pgbouncer(
    ini: Annotated[Path, typer.Argument(metavar="INI", help="PgBouncer's file; what it includes is read.")],
    out: Annotated[Path, typer.Option(
        "--out", "-o", metavar="DIR", help="Where pooler.yaml and its policies are written.")] = Path("."),
    as_json: JsonOption = False,
) -> None:
    """Turn a PgBouncer ini and its userlist into a config; list what has no counterpart or another meaning.

    The ini and the userlist stay as they are; the config names the userlist. Relative paths in the ini begin
    at the folder this command runs in, as PgBouncer's do.

    Exits 0 if the config can be started with, 1 if something that must not be ignored was not carried over,
    2 if the result has faults or the ini is none.

    Example: pooler config import-pgbouncer /etc/pgbouncer/pgbouncer.ini -o /etc/pooler
    """
    import sys

    from pooler.cli.named_files import file_faults
    from pooler.cli.out import print_json
    from pooler.dropin.carry import Circumstances, carry
    from pooler.dropin.files import count_users, read_ini, write_config
    from pooler.dropin.ini import IniRefused
    from pooler.errors import UsageFault
    from pooler.settings import ConfigFaults, load, warnings_of

    base, folder = Path.cwd(), out.absolute()
    try:
        bouncer = read_ini(str(ini), base)
    except IniRefused as refused:
        raise UsageFault(str(refused)) from None
    named = bouncer.text("auth_file")
    auth_file = base / Path(named).expanduser() if named else folder / "userlist.txt"
    carried = carry(bouncer, Circumstances(base=base, fleet="pooler", auth_file=auth_file,
                                           users=count_users(auth_file)))
    path = write_config(folder, carried, f"# Made by `pooler config import-pgbouncer` from {ini}.\n",
                        overwrite=False)
    if not named:
        _write_empty(auth_file)
    settings = load(path)
    faults = file_faults(settings)
    if faults:
        raise ConfigFaults(path, faults)
    warnings = warnings_of(settings)
    if as_json:
        print_json({"file": str(path), "notes": [_row(note) for note in carried.notes], "warnings": warnings})
    else:
        for note in carried.notes:
            print(f"{'must not be ignored: ' if note.grave else ''}{note}")
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(f"{path}: {len(settings.databases)} databases, {len(carried.notes)} notes. "
              f"Next: pooler config check {path}")
    raise typer.Exit(1 if carried.grave else 0)


def _write_empty(path: Path) -> None:
    if not path.exists():
        path.touch(mode=0o600)


def _row(note: Note) -> dict[str, Any]:
    place = note.place
    return {"file": place.file if place else None, "line": place.line if place else None,
            "about": note.about, "text": note.text, "grave": note.grave}
