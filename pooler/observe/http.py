"""The HTTP side of a process: /healthz, /readyz, /readyz/<role> and /metrics. It only reads, GET only.

What is answered comes from plain callables, so that this knows nothing of a worker. A body of /readyz says in
one line why it is not ready.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from pooler.observe.metrics import CONTENT_TYPE

IDLE_SECONDS = 15.0
READ_SECONDS = 10
HEAD_BYTES_MAX = 16_384


@dataclass(frozen=True, slots=True)
class Parts:
    """What is answered. `ready(role)` gives the reason for not being ready, "" if ready; the role is "" for
    the whole. It raises KeyError for a role that is not served. `routes` are more pages; `token` is asked of
    everything but the health pages, whose reader (a load balancer) sends none."""

    ready: Callable[[str], str]
    metrics: Callable[[], bytes]
    routes: Sequence[BaseRoute] = ()
    token: str | None = field(default=None, repr=False)


def application(parts: Parts) -> Starlette:
    """The pages as an ASGI application."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(request: Request) -> Response:
        try:
            reason = parts.ready(request.path_params.get("role", ""))
        except KeyError:
            return PlainTextResponse("no such role\n", 404)
        return PlainTextResponse(f"{reason}\n", 503) if reason else PlainTextResponse("ready\n")

    async def metrics(request: Request) -> Response:
        if not _allowed(request, parts.token):
            return PlainTextResponse("a bearer token is needed\n", 401, {"www-authenticate": "Bearer"})
        return Response(parts.metrics(), media_type=CONTENT_TYPE)

    pages = [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/readyz/{role}", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    return Starlette(routes=[*pages, *parts.routes])


def _allowed(request: Request, token: str | None) -> bool:
    if token is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), token.encode())


async def serve_http(
    listening_fd: int,
    parts: Parts,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on an inherited listening socket until cancelled. Takes the descriptor over."""
    config = Config()
    config.bind = [f"fd://{listening_fd}"]
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.keep_alive_timeout = IDLE_SECONDS
    config.read_timeout = READ_SECONDS
    config.h11_max_incomplete_size = HEAD_BYTES_MAX
    config.graceful_timeout = 1.0
    async with trio.open_nursery() as nursery:
        await nursery.start(_serve, application(parts), config)
        task_status.started()


async def _serve(app: Starlette, config: Config, *, task_status: trio.TaskStatus[list[str]]) -> None:
    await serve(app, config, mode="asgi", task_status=task_status)  # type: ignore[arg-type]
