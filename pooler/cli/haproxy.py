"""`pooler haproxy`: the load balancer's config."""

from __future__ import annotations

from typing import Annotated

import typer

from pooler.cli.options import ConfigOption

app = typer.Typer(
    help="The config of the HAProxy in front of the fleet.",
    epilog="Example: pooler haproxy render > haproxy.cfg",
    no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


@app.command()
def render(
    config: ConfigOption = None,
    bind: Annotated[str | None, typer.Option(
        metavar="ADDRESS", help="Where the services listen; default: as fleet.listen; * for all.")] = None,
    host: Annotated[list[str] | None, typer.Option(
        metavar="HOST", help="A host that runs this config; repeat it for a fleet of several hosts.")] = None,
) -> None:
    """Print a working haproxy.cfg: one service per entry of `services`, one server per worker.

    Example: pooler haproxy render -c pooler.yaml > haproxy.cfg && haproxy -c -f haproxy.cfg
    """
    from pooler.cli.options import settings_of
    from pooler.haproxy import render_haproxy

    wanted = "0.0.0.0" if bind == "*" else bind
    print(render_haproxy(settings_of(config), bind=wanted, hosts=host or ()), end="")
