"""Who asks: tenant, class, deadline and ticket of a client, as it started and as it has set them since.

What a rule of the config gives (`tenants:`) a client cannot choose otherwise. Not transactional: a value
holds from the moment it is set, whatever becomes of the transaction around.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from coordinator.session_table import encode_who
from pooler.wire.own_parameters import (
    CLASS,
    DEADLINE,
    PREFIX,
    TENANT,
    TICKET,
    Own,
    OwnFault,
    checked,
    deadline_seconds,
    shown_deadline,
)

if TYPE_CHECKING:
    from pooler.admission.ticket import Ticket
    from pooler.pool.pool import Pool
    from pooler.relay.named import Named


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


class Asking:
    """A client as one who asks: read at each checkout."""

    pool: Pool
    ticket: Ticket
    __slots__ = (
        "address", "asked", "deadline_seconds", "klass", "named", "own", "tenant", "ticket_id", "who")

    def __init__(self, address: str, asked: Asked) -> None:
        self.address, self.asked = address, asked
        self.own: OwnNames | None = None
        self.named: Named | None = None  # its use of the name that it gave: see named.py
        self.reset_asked()

    def reset_asked(self) -> None:
        """RESET ALL and DISCARD ALL: all as at the start."""
        self.tenant, self.klass, self.deadline_seconds, self.ticket_id, _ = self.asked
        self.identify()

    def name_is_used(self) -> None:
        """What it named has run: neither it nor a RESET names anything so again."""
        self.ticket_id = ""
        self.asked = self.asked._replace(ticket_id="")
        self.identify()

    def identify(self) -> None:
        """Whose its transactions are from the next one on, and what the session table says of them."""
        self.who = encode_who(self.tenant, self.klass, self.address, self.ticket_id)
        self.ticket.charge(self.pool.book.account(self.tenant, self.klass))

    def known_classes(self) -> Collection[str] | None:
        """Those of the policy that is in force; None: that is not known."""
        return self.pool.book.known()

    def get_asked(self, name: str) -> str:
        """As SHOW has it."""
        if name == DEADLINE:
            return shown_deadline(self.deadline_seconds)
        return {TENANT: self.tenant, CLASS: self.klass, TICKET: self.ticket_id}[name]

    def set_asked(self, name: str, value: str | None) -> None:
        """None: as at the start. Raises OwnFault, and then nothing has changed."""
        if value is not None:
            value = checked(name, value)
            check_class(name, value, self.known_classes())
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
        self.identify()


def check_class(name: str, value: str, known: Collection[str] | None) -> None:
    """Raises OwnFault for a class that there is not. None: which there are is not known, and any is taken."""
    if name == CLASS and known is not None and value not in known:
        raise OwnFault(f'invalid value for parameter "{PREFIX}{CLASS}": "{value}"', "22023",
                       f"Available values: {', '.join(sorted(known))}.")
