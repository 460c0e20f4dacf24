"""Faults planted on purpose, to show that the judge sees them. The product has no hook for them: the
demonstration starts the fleet with a `sitecustomize` of its own that puts a broken function in place.

* skip-compare: a reservation is written without its compares, and where no slot is free to one that is held.
* leak: a worker forgets an idle session: neither closed nor in its pool, its permit stays OPEN.
* lost-ack: an acknowledged row is deleted on the new primary (done by the demonstration itself).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

FAULTS = ("skip-compare", "leak", "lost-ack")
ENVIRONMENT = "POOLER_DEMO_FAULT"

_SITE = """\
import os
if os.environ.get({name!r}):
    from pooler.demo.faults import plant
    plant(os.environ[{name!r}])
"""


def environment(fault: str | None, directory: Path) -> dict[str, str]:
    """What to start the fleet with, so that each of its processes plants the fault in itself."""
    if fault in (None, "lost-ack"):
        return {}
    (directory / "sitecustomize.py").write_text(_SITE.format(name=ENVIRONMENT))
    places = [str(directory), str(Path(__file__).parent.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {ENVIRONMENT: str(fault), "PYTHONPATH": os.pathsep.join(place for place in places if place)}


def plant(fault: str) -> None:
    """Put the fault into this process. Raises AttributeError when the product has no such part any more."""
    {"skip-compare": _skip_compare, "leak": _leak}[fault]()


def _skip_compare() -> None:
    reservation = importlib.import_module("coordinator.ledger.reservation")
    sound: Callable[..., Any] = reservation.plan_reservation

    def broken(ask: Any, grounds: Any, *arguments: Any, **options: Any) -> Any:
        plan = sound(ask, grounds, *arguments, **options)
        if not hasattr(plan, "txn"):  # refused: as if every slot were free
            free = replace(grounds, held=frozenset(), seats=frozenset(), beyond=False)
            plan = sound(ask, free, *arguments, **options)
        return replace(plan, txn=replace(plan.txn, compares=())) if hasattr(plan, "txn") else plan

    _replace("coordinator.ledger", "plan_reservation", sound, broken)


def _leak() -> None:
    core = importlib.import_module("pooler.pool.core").PoolCore
    sound = core.give
    forgotten: list[Any] = []

    def broken(self: Any, session: Any, now: float) -> Any:
        if forgotten or self.count_waiting():
            return sound(self, session, now)
        self.active.discard(session)  # and nowhere else: as if its return had been lost
        forgotten.append(session)
        return True

    core.give = broken


def _replace(package: str, name: str, sound: Callable[..., Any], broken: Callable[..., Any]) -> None:
    """Everywhere in the package where the function was imported by name."""
    root = importlib.import_module(package)
    for path in sorted(Path(str(root.__path__[0])).glob("*.py")):
        module = importlib.import_module(f"{package}.{path.stem}")
        if getattr(module, name, None) is sound:
            setattr(module, name, broken)
