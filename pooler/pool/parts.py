"""What all pools of one worker share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import TYPE_CHECKING

import trio

from coordinator.session_table import SessionTable
from pooler.admission.classes import Classes
from pooler.net.tls_context import ServerTls
from pooler.pool.cut_off import CutOff
from pooler.pool.gate import Gates
from pooler.pool.permits import Permits
from pooler.pool.places import UserPlaces
from pooler.pool.tollgate import TollGate
from pooler.relay.reactor import Reactor
from pooler.wire.parameters import ParameterSet
from pooler.wire.prepared import Statements
from pooler.wire.session_state import TextLook

if TYPE_CHECKING:
    from pooler.pool.pool import Pool
    from pooler.relay.client import ClientConn
    from pooler.relay.named import Names
    from pooler.relay.server import ServerConn


@dataclass
class Parts:
    """What all pools of a worker share."""

    nursery: trio.Nursery
    reactor: Reactor
    permits: Permits
    table: SessionTable | None
    random: Random
    statements: Statements
    look: TextLook
    parameters_of: Callable[[dict[bytes, bytes]], ParameterSet]
    client_closed: Callable[[ClientConn], None]
    server_tls: ServerTls | None = None
    as_pgbouncer: bool = False  # its texts, and no more
    next_number: Callable[[], int] = int
    by_seat: Callable[[str, str, str], Iterable[Pool]] = lambda *_: ()  # pools that share seats
    of_user: Callable[[str], Iterable[Pool]] = lambda *_: ()  # pools whose sessions are this user's
    gates: Gates = field(default_factory=Gates)
    cut_off: CutOff = field(default_factory=CutOff)
    places: UserPlaces = field(default_factory=UserPlaces)
    classes: Classes = field(init=False)
    tollgate: TollGate = field(init=False)
    names: Names = None  # type: ignore[assignment]  # serves clients that name their transactions
    tickets: int = 0
    servers: dict[ServerConn, int] = field(default_factory=dict)  # and its number in SHOW SERVERS
    server_forgotten: trio.Event = field(default_factory=trio.Event)  # a new one for each

    def __post_init__(self) -> None:
        """Who lacked room in his class is served behind the events that freed it."""
        self.tollgate = TollGate(self.nursery)
        self.classes = Classes(lambda: self.reactor.at_end(lambda: self.classes.settle(monotonic())))
