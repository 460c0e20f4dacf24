"""Who asks: tenant, class, deadline and ticket of a client, as it started and as it has set them since.

What a rule of the config gives (`tenants:`) a client cannot choose otherwise. Not transactional: a value
holds from the moment it is set, whatever becomes of the transaction around.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pooler.wire.own_parameters import CLASS, DEADLINE, PREFIX, TENANT, TICKET, Own, OwnFault
from pooler.wire.own_parameters import checked, deadline_seconds, shown_deadline


class Asked(NamedTuple):
    """What a client started with. `fixed`: names that a rule of the config gives."""

    tenant: str = ""
    klass: str = ""
    deadline_seconds: float = math.inf
    ticket_id: str = ""
    fixed: frozenset[str] = frozenset()


class OwnNames:
    """A client's prepared statements and portals that are about these: no server has them."""

    __slots__ = ("portals", "statements")

    def __init__(self) -> None:
        self.statements: dict[bytes, Own] = {}
        self.portals: dict[bytes, Own] = {}


def known_classes() -> frozenset[str] | None:
    """The classes that there are; None: not known here, and every name is taken."""
    return None


class Asking:
    """A client as one who asks: read at each checkout."""

    __slots__ = ("asked", "deadline_seconds", "klass", "own", "tenant", "ticket_id")

    def __init__(self) -> None:
        self.own: OwnNames | None = None
        self.asks(Asked())

    def asks(self, asked: Asked) -> None:
        """Begin with this; `reset_asked` comes back to it."""
        self.asked = asked
        self.reset_asked()

    def reset_asked(self) -> None:
        """RESET ALL and DISCARD ALL: all as at the start."""
        self.tenant, self.klass, self.deadline_seconds, self.ticket_id, _ = self.asked

    def get_asked(self, name: str) -> str:
        """As SHOW has it."""
        if name == DEADLINE:
            return shown_deadline(self.deadline_seconds)
        return {TENANT: self.tenant, CLASS: self.klass, TICKET: self.ticket_id}[name]

    def set_asked(self, name: str, value: str | None) -> None:
        """None: as at the start. Raises OwnFault, and then nothing has changed."""
        if value is not None:
            value = checked(name, value)
            check_class(name, value)
        if name in self.asked.fixed and value not in (None, self.get_asked(name)):
            raise OwnFault(f'parameter "{PREFIX}{name}" cannot be set', "42501",
                           "A rule of `tenants` in the pooler's configuration gives it.")
        if name == DEADLINE:
            self.deadline_seconds = self.asked.deadline_seconds if value is None else deadline_seconds(value)
        elif name == TICKET:
            self.ticket_id = self.asked.ticket_id if value is None else value
        elif name == TENANT:
            self.tenant = self.asked.tenant if value is None else value
        else:
            self.klass = self.asked.klass if value is None else value


def check_class(name: str, value: str) -> None:
    """Raises OwnFault for a class that there is not."""
    known = known_classes()
    if name == CLASS and known is not None and value not in known:
        raise OwnFault(f'invalid value for parameter "{PREFIX}{CLASS}": "{value}"', "22023",
                       f"Available values: {', '.join(sorted(known))}.")
