"""`pooler fleet`: the processes of this host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pooler.cli.fence import fence, freeze, thaw
from pooler.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from coordinator.link import Link

STATUS_SECONDS_MAX = 10.0

app = typer.Typer(
    help="Run and steer the fleet on this host.", epilog="Example: pooler fleet status --json",
    no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


app.command("fence")(fence)
app.command("freeze")(freeze)
app.command("thaw")(thaw)


@app.command()
def run(config: ConfigOption = None) -> None:
    """Run the fleet in the foreground: supervisor, coordinator, workers.

    SIGHUP reloads the config, SIGTERM lets clients finish (fleet.drain_timeout) and stops, SIGINT stops;
    a second one ends at once. Tells systemd when it is ready.

    Example: pooler fleet run -c /etc/pooler/pooler.yaml
    """
    import structlog
    import trio

    from coordinator.logs import set_up_logging
    from pooler.cli.named_files import file_faults
    from pooler.settings import ConfigFaults, find_config, load, warnings_of
    from pooler.supervisor import Supervisor

    path = find_config(config).absolute()
    settings = load(path)
    faults = file_faults(settings)
    if faults:
        raise ConfigFaults(path, faults)
    set_up_logging(settings.log.format, settings.log.level, queries=settings.log.queries)
    for warning in warnings_of(settings):
        structlog.get_logger().warning("config_warning", text=warning)
    trio.run(Supervisor(path, settings).run)


@app.command()
def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show the processes of the running fleet. Exits 0 if all serve, 1 if one does not.

    Example: pooler fleet status --json
    """
    from pooler.cli.out import print_json

    found = status_of(config)
    if as_json:
        print_json(found)
    else:
        _print_status(found)
    serving = {row["name"] for row in found["processes"] if row["state"] == "ready"}
    if serving != {row["name"] for row in found["processes"]}:
        raise typer.Exit(1)


@app.command()
def reload(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Read the config again, as SIGHUP does; a bad one changes nothing. Tries again what stayed down.

    Exits 0 if all of it holds now, 1 if something waits for a restart, 2 if the config is refused. A policy
    file that is not what is in force is a warning only.

    Example: pooler fleet reload -c /etc/pooler/pooler.yaml
    """
    from pooler.cli.out import print_json

    answer = _ask(config, lambda link: link.call("reload"), None)
    if as_json:
        print_json(answer)
    else:
        for problem in answer["problems"]:
            print(problem, file=sys.stderr)
        for warning in answer.get("warnings", ()):
            print(f"warning: {warning}", file=sys.stderr)
        print("refused: the old config stays" if answer["refused"] else "reloaded")
    raise typer.Exit(2 if answer["refused"] else 1 if answer["problems"] else 0)


@app.command()
def stop(
    config: ConfigOption = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for clients.")] = False,
) -> None:
    """Stop the running fleet, once its clients have finished (at most fleet.drain_timeout).

    Example: pooler fleet stop --now
    """

    async def stop_it(link: Link) -> None:
        await link.call("stop", drain=not now)
        await link.lost.wait()

    _ask(config, stop_it, None)
    print("stopped")


@app.command()
def restart(
    rolling: Annotated[bool, typer.Option(
        "--rolling", help="One worker at a time; nobody who connects is refused.")] = False,
    timeout: Annotated[str, typer.Option(
        metavar="DURATION", help="For each worker's start and drain.")] = "60s",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace the workers one by one, each by one that is ready before the old one is drained.

    A client that stays connected loses its connection when its worker ends: between two transactions, with
    SQLSTATE 57P01, and it has to connect again. A transaction is waited for.

    Exits 0 when all are replaced, 4 when clients hold a worker past the time (who is told; that worker ends
    when they leave), 1 when a replacement does not come up.

    Example: pooler fleet restart --rolling --timeout 2m
    """
    import json

    from pooler.cli.options import seconds_of
    from pooler.errors import UsageFault

    if not rolling:
        raise UsageFault("only a rolling restart can be asked for: pooler fleet restart --rolling "
                         "(or `pooler fleet stop`, then `pooler fleet run`)")
    seconds = seconds_of("--timeout", timeout)

    def say(text: str) -> None:
        print(json.dumps({"progress": text}) if as_json else text, flush=True)

    answer = _ask(config, lambda link: link.call("restart_rolling", timeout_seconds=seconds), None, say)
    print(json.dumps(answer) if as_json else answer["text"], file=sys.stdout if as_json or not answer["code"]
          else sys.stderr)
    raise typer.Exit(answer["code"])


def _ask(
    config: Path | None, ask: Callable[[Link], Awaitable[Any]], timeout_seconds: float | None,
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """Ask the running fleet's supervisor over its control socket."""
    import math

    import trio

    from pooler.cli.options import settings_of
    from pooler.errors import FleetUnreachable
    from pooler.supervise.control import reach_fleet

    path = settings_of(config).control_socket

    async def asking() -> Any:
        with trio.move_on_after(timeout_seconds if timeout_seconds is not None else math.inf):
            async with reach_fleet(path, say) as link:
                return await ask(link)
        raise FleetUnreachable(f"the fleet at {path} did not answer in {timeout_seconds:g} s")

    return trio.run(asking)


def status_of(config: Path | None) -> Any:
    """What the running fleet's supervisor says of its processes. Raises FleetUnreachable, UsageFault."""
    return _ask(config, lambda link: link.call("status"), STATUS_SECONDS_MAX)


def _print_status(found: dict[str, Any]) -> None:
    from pooler.cli.out import duration, print_table

    print(f"fleet {found['fleet']}: {found['state']}, config {found['config']}")
    print_table(
        ("PROCESS", "STATE", "PID", "UP", "DEATHS", "LAST EXIT", "CLIENTS", "SAYS"),
        [(row["name"], row["state"], row["pid"], duration(row["uptime_seconds"]), row["deaths"],
          row["last_exit"], row["figures"].get("clients"), says(row)) for row in found["processes"]])
    if found["unreported_exits"]:
        print(f"{found['unreported_exits']} exits are not yet known to the ledger")
    for change in found["waiting_for_restart"]:
        print(change)
    for line in set_by_console(found["processes"]):
        print(line)


def says(row: Mapping[str, Any]) -> str:
    """What a process said last, and what a coordinator finds wrong with a ledger."""
    wrong = [f"{db}: {found[what]}" for db, found in sorted((row["figures"].get("ledgers") or {}).items())
             for what in ("backend", "no_room", "no_policy") if found.get(what)]
    return "; ".join(filter(None, (row["text"], *wrong)))


def set_by_console(processes: list[dict[str, Any]]) -> list[str]:
    """What is not as the config has it, each once with the processes in which it is so."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in processes:
        for key, value in (row["figures"].get("set") or {}).items():
            where.setdefault((key, value), []).append(row["name"])
    return [f"pool.{key} is {value} by SET on {', '.join(names)}, until the next reload"
            for (key, value), names in sorted(where.items())]
