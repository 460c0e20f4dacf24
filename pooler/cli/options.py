"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pooler.settings import Settings

ConfigOption = Annotated[Path | None, typer.Option(
    "--config", "-c", metavar="FILE",
    help="The fleet's config; else POOLER_CONFIG, ./pooler.yaml, /etc/pooler/pooler.yaml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, with stable keys.")]
EtcdOption = Annotated[str | None, typer.Option(
    "--etcd", metavar="HOST:PORT,…", help="Instead of a config, with --fleet: where the ledger is.")]
FleetOption = Annotated[str | None, typer.Option(
    "--fleet", metavar="NAME", help="The fleet's name, with --etcd.")]
PrefixOption = Annotated[str, typer.Option("--prefix", help="The prefix of its keys, with --etcd.")]
DbArgument = Annotated[str, typer.Argument(
    metavar="DB", help="A policy's database (orders-primary/write) or a config database that points to it.")]


def settings_of(config: Path | None) -> Settings:
    """The settings of the config a command means. Raises UsageFault, ConfigFaults."""
    from pooler.settings import find_config, load

    return load(find_config(config))


def seconds_of(option: str, text: str) -> float:
    """A duration given to an option. Raises UsageFault."""
    from pooler.errors import UsageFault
    from pooler.settings_units import parse_duration_seconds

    try:
        return parse_duration_seconds(text)
    except ValueError as fault:
        raise UsageFault(f"{option}: {fault}") from None
