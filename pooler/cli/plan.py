"""`pooler plan`: the capacity worksheet, from numbers, a live server, a config's policies and a load test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pooler.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from pooler.capacity import FleetShare, Server
    from pooler.settings import Settings

EXIT_TOO_MANY = 1


def plan(
    config: ConfigOption = None,
    against: Annotated[str | None, typer.Option(
        "--against", metavar="DSN", help="Read the server's limits and its other sessions there.")] = None,
    max_connections: Annotated[int | None, typer.Option("--max-connections", min=1)] = None,
    superuser_reserved: Annotated[int, typer.Option("--superuser-reserved", min=0)] = 3,
    reserved: Annotated[int, typer.Option("--reserved", min=0, help="reserved_connections.")] = 0,
    other_clients: Annotated[int | None, typer.Option(
        "--other-clients", min=0, help="Sessions that others hold; default: otherClients of the config's "
        "policies, else all that --against sees now.")] = None,
    margin: Annotated[int | None, typer.Option(
        "--margin", min=0,
        help="Kept free for operators; default: adminReserve of the config's policies, else 0.")] = None,
    replicas: Annotated[int | None, typer.Option(
        "--replicas", min=1, help="Of an application that pools for itself, to compare with.")] = None,
    surge: Annotated[int, typer.Option(
        "--surge", min=0, help="Replicas more while a rollout is under way.")] = 0,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Of each replica.")] = 1,
    pools: Annotated[int, typer.Option("--pools", min=1, help="Of each process.")] = 1,
    pool_size: Annotated[int, typer.Option("--pool-size", min=0)] = 5,
    overflow: Annotated[int, typer.Option("--overflow", min=0, help="Sessions over a pool's size.")] = 10,
    measured: Annotated[Path | None, typer.Option(
        "--measured", metavar="FILE",
        help="A load test of one worker: a YAML or JSON list of {tps, p99, errors}.")] = None,
    forecast: Annotated[str | None, typer.Option(
        "--forecast", metavar="N", help="Transactions per second at the peak.")] = None,
    growth: Annotated[str, typer.Option("--growth", metavar="FACTOR", help="On top of the forecast.")] = "1",
    zones: Annotated[int, typer.Option("--zones", min=1)] = 3,
    lose: Annotated[int, typer.Option("--lose", min=0, help="Zones that may be lost.")] = 1,
    headroom: Annotated[str, typer.Option(
        "--headroom", metavar="RATIO", help="How far a worker is used, of what it was tested at.")] = "0.7",
    p99: Annotated[str, typer.Option("--p99", metavar="DURATION", help="Limit of the load test.")] = "300ms",
    errors: Annotated[str, typer.Option(
        "--errors", metavar="RATIO", help="Limit of the load test.")] = "0.001",
    workers_per_host: Annotated[int | None, typer.Option(
        "--workers-per-host", min=1, help="Default: the config's workers, else 2.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What a server has for ordinary sessions, what takes it, and how many workers are needed.

    Exits 1 if something takes more than there is.

    \b
    Example: pooler plan --against postgresql://app@db1/orders --margin 8

    Example: pooler plan --max-connections 100 --other-clients 24 --margin 8 --replicas 6 --surge 2

    Example: pooler plan --measured test.yaml --forecast 1600 --growth 1.25
    """
    from pooler.capacity import LocalPools
    from pooler.cli.out import print_json
    from pooler.cli.plan_zones import zone_plan
    from pooler.cli.worksheet import Worksheet
    from pooler.errors import UsageFault

    settings = _settings(config)
    shares = _shares(settings)
    if shares:
        if other_clients is None:
            other_clients = sum(share.other_clients for share in shares)
        if margin is None:
            margin = sum(share.admin for share in shares)
    server = _server(against, max_connections, superuser_reserved, reserved, other_clients, margin or 0)
    local = None if replicas is None else LocalPools(replicas, surge, processes, pools, pool_size, overflow)
    if workers_per_host is None:
        workers_per_host = 2 if settings is None else settings.fleet.workers
    zoned = zone_plan(measured, forecast, growth, zones, lose, headroom, p99, errors, workers_per_host)
    if server is None and (local is not None or zoned is None):
        raise UsageFault("which server? give --against DSN or --max-connections N"
                         + ("" if zoned else "; or --measured FILE and --forecast N, for workers alone"))
    sheet = Worksheet(server, shares, local, zoned)
    if as_json:
        print_json(sheet.as_json())
    else:
        print("\n".join(sheet.lines()))
    if not sheet.fits:
        raise typer.Exit(EXIT_TOO_MANY)


def _settings(config: Path | None) -> Settings | None:
    """A config is not needed; one that is named, or found, must be right. Raises UsageFault, ConfigFaults."""
    import os

    from pooler.cli.named_files import policy_faults
    from pooler.settings import ConfigFaults, find_config, load
    from pooler.settings_load import CONFIG_PLACES

    named = config is not None or os.environ.get("POOLER_CONFIG")
    if not named and not any(place.is_file() for place in CONFIG_PLACES):
        return None
    path = find_config(config)
    settings = load(path)
    if faults := policy_faults(settings):
        raise ConfigFaults(path, tuple(faults))
    return settings


def _server(
    against: str | None, max_connections: int | None, superuser_reserved: int, reserved: int,
    other_clients: int | None, margin: int,
) -> Server | None:
    from pooler.capacity import Server

    if against is not None:
        from pooler.cli.init import read_server

        facts, _ = read_server(against)
        most, seen = max_connections or facts.max_connections, facts.others
        return Server(most, facts.superuser_reserved, facts.reserved,
                      seen if other_clients is None else other_clients, margin)
    if max_connections is None:
        return None
    return Server(max_connections, superuser_reserved, reserved, other_clients or 0, margin)


def _shares(settings: Settings | None) -> list[FleetShare]:
    from coordinator.policy import load_policy
    from pooler.capacity import FleetShare

    if settings is None:
        return []
    policies = [load_policy(database.policy.text)[0] for database in settings.databases.values()]
    return [FleetShare(db, policy.server_session_permits, policy.reserve_permits, policy.admin_reserve,
                       policy.other_clients)
            for db, policy in {policy.database: policy for policy in policies}.items()]
