"""How commands end: one family of errors to one line on stderr and an exit code, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

from pooler.errors import PoolerError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def end_of(run: Callable[[], object]) -> int:
    """Run a command; its exit code. Whatever it raises is told on stderr in as few lines as it needs."""
    try:
        code = run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has seen enough; without this the interpreter complains at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as fault:
        if os.environ.get("POOLER_DEBUG"):
            raise
        text, code = told(fault)
        print(f"pooler: {text}", file=sys.stderr)
        return code
    return code if isinstance(code, int) else 0


def told(fault: BaseException) -> tuple[str, int]:
    """(what to say, exit code) of whatever ended a command."""
    for cause in _leaves(fault):
        if isinstance(cause, PoolerError):
            return str(cause), cause.exit_code
    first = next(_leaves(fault))
    name = type(first).__name__
    if name in ("StoreUnavailable", "StoreUnknown", "StoreFull"):
        return f"etcd does not answer: {first}", EXIT_FAILED
    if name == "LinkLost":
        return "the fleet ended before it answered: what was asked may or may not have been done", EXIT_FAILED
    if name == "LinkRefused":
        return str(first), EXIT_FAILED
    if isinstance(first, OSError):
        place = f"{first.filename}: " if first.filename else ""
        return f"{place}{first.strerror or first}", EXIT_FAILED
    return f"internal error: {name}: {first} (POOLER_DEBUG=1 shows where)", EXIT_FAILED


def _leaves(fault: BaseException) -> Iterator[BaseException]:
    if isinstance(fault, BaseExceptionGroup):
        for each in fault.exceptions:
            yield from _leaves(each)
    else:
        yield fault
