"""How a process of the fleet logs: one event per line on stderr."""

from __future__ import annotations

import logging
import sys

import structlog

from pooler.settings_models import LogSettings


def configure_logs(log: LogSettings) -> None:
    """Set structlog up for this process: JSON, or for people."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if log.format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log.level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
