"""What may go wrong in an operation of a link becomes the refusal of that one call."""

from __future__ import annotations

import structlog

from coordinator.events import Event
from coordinator.ledger.rules import Code
from coordinator.link import Args, Handler, LinkLost, LinkRefused
from coordinator.registry import Unregistered
from coordinator.store.api import StoreUnavailable, StoreUnknown

_log = structlog.get_logger("coordinator.link")


def name_of(handler: Handler) -> str:
    """The operation that a method serves: its name."""
    name: str = getattr(handler, "__name__", "")
    return name


def guarded(handler: Handler) -> Handler:
    """The handler, with every outcome that is not an answer as a LinkRefused."""

    async def serve(args: Args) -> object:
        try:
            return await handler(args)
        except (StoreUnavailable, StoreUnknown) as why:
            raise LinkRefused(Code.LEDGER_UNAVAILABLE, str(why)) from None
        except Unregistered as why:
            raise LinkRefused("unregistered", str(why)) from None
        except LinkLost as why:
            raise LinkRefused("worker_gone", str(why)) from None
        except LinkRefused:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            _log.exception(Event.SOMETHING_FAILED, operation=name_of(handler))
            raise LinkRefused("bad_request", f"{type(fault).__name__}: {fault}") from None
        except Exception as fault:  # one faulty operation must not take the host's coordinator down
            _log.exception(Event.SOMETHING_FAILED, operation=name_of(handler))
            raise LinkRefused("failed", f"{type(fault).__name__}: {fault}") from fault

    return serve
