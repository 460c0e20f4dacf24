"""`pooler config`: is this file right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pooler.cli.import_pgbouncer import import_pgbouncer
from pooler.cli.options import JsonOption

app = typer.Typer(
    help="Check a config file, or make one of a PgBouncer ini.",
    epilog="Example: pooler config check pooler.yaml",
    no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


app.command("import-pgbouncer")(import_pgbouncer)


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(
        metavar="[FILE]", help="Default: as every command finds it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a config file and the policies it names; tell every fault at once.

    Where the fleet's etcd answers, it warns of a policy file that is not what is in force. Exits 0 if a fleet
    can start with it (warnings may be printed), 2 if not.

    Example: pooler config check config/pooler.yaml
    """
    import sys

    from pooler.cli.named_files import file_faults
    from pooler.cli.out import print_json
    from pooler.cli.policy_files import policy_warnings
    from pooler.settings import ConfigFaults, find_config, load, warnings_of

    path = find_config(file)
    try:
        settings = load(path)
        faults = file_faults(settings)
        if faults:
            raise ConfigFaults(path, faults)
    except ConfigFaults as refused:
        if not as_json:
            raise
        print_json({"file": str(path), "ok": False, "warnings": [],
                    "faults": [{"path": fault.path, "text": fault.text} for fault in refused.faults]})
        raise typer.Exit(2) from None
    warnings = [*warnings_of(settings), *policy_warnings(settings)]
    if as_json:
        print_json({"file": str(path), "ok": True, "warnings": warnings, "faults": []})
        return
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    names = ", ".join(settings.databases)
    print(f"{path}: fleet {settings.fleet.name}, {settings.fleet.workers} workers, databases {names}: ok")
