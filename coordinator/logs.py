"""Logging of every process of the fleet: structlog to stderr, one event a line, and no secrets.

Event names are those of `events`; context (worker, database, pool, permit, ticket, epoch) is bound, never
formatted into the text.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_SECRET_WORDS = ("password", "passwd", "secret", "token", "verifier", "_key", "credential")
_TEXT_NAMES = frozenset({"query", "sql", "statement_text"})
_USER_INFORMATION = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*):[^\s@/]*@")
_PASSWORD_WORD = re.compile(r"(\bpassword\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)", re.IGNORECASE)


def set_up_logging(
    form: Literal["json", "console"] = "json",
    level: str = "info",
    *,
    queries: bool = False,
    stream: TextIO | None = None,
) -> None:
    """Set structlog up for this process. `queries` lets the text of queries through. May be called again."""
    target = sys.stderr if stream is None else stream
    hide = _Hider(queries)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            hide,
            *_renderers(form, target),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(target),
        cache_logger_on_first_use=False,
    )


def _renderers(form: str, target: TextIO) -> list[Processor]:
    if form == "console":
        return [_one_line, structlog.dev.ConsoleRenderer(colors=target.isatty())]
    return [structlog.processors.JSONRenderer(default=str)]


def _one_line(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """A line break in a value is shown, not written; JSON does that by itself."""
    return {
        name: value.replace("\n", "\\n").replace("\r", "\\r") if isinstance(value, str) else value
        for name, value in event.items()
    }


class _Hider:
    """Takes out what must not be logged: by the name of its key, and passwords inside of texts."""

    def __init__(self, queries: bool) -> None:
        self._queries = queries

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return self._cleaned(event)

    def _cleaned(self, event: Mapping[Any, Any]) -> dict[Any, Any]:
        return {name: self._value(value) for name, value in event.items() if not self._forbidden(name)}

    def _forbidden(self, name: object) -> bool:
        lowered = str(name).lower()
        return (lowered in _TEXT_NAMES and not self._queries) or any(
            word in lowered for word in _SECRET_WORDS
        )

    def _value(self, value: object) -> object:
        if isinstance(value, Mapping):
            return self._cleaned(value)
        if isinstance(value, list | tuple):
            return [self._value(each) for each in value]
        return without_passwords(value) if isinstance(value, str) else value


def without_passwords(text: str) -> str:
    """The text with the password of each URL and of each `password=` hidden."""
    if "://" in text:
        text = _USER_INFORMATION.sub(r"\1:***@", text)
    return _PASSWORD_WORD.sub(r"\1***", text)
