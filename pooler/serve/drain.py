"""How a worker's clients end: at a transaction's boundary when it drains, at once when it stops.

An idle client is told 57P01 and closed; to its driver that is a server that went away between transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

import trio

from pooler.pool.pool import Pool
from pooler.relay.client import ClientConn
from pooler.relay.reactor import Reactor
from pooler.serve.registry import Registry

LOOK_SECONDS = 0.05
ADMINISTRATOR = "terminating connection due to administrator command"
FIRST_WORD_SECONDS = 1.0  # a client whose login was under way is not turned away before it has said anything


async def drain_clients(
    registry: Registry, logins_open: Callable[[], int], timeout_seconds: float
) -> None:
    """Close each client as soon as it has no transaction and waits for none; returns when all are gone, or
    the time is over. Logins under way are waited for a moment."""
    began = monotonic()
    with trio.move_on_after(timeout_seconds):
        while (registry.clients or registry.replications
               or (logins_open() and monotonic() - began < FIRST_WORD_SECONDS)):
            for pool in registry.pools.values():  # those of logins under way come meanwhile
                pool.transaction_counted = _Boundaries(pool, registry.parts.reactor).counted
            end_streams(registry)
            _end_idle(registry.clients.values())
            await trio.sleep(LOOK_SECONDS)  # noqa: TID251 - clients leave in the reactor, unheard


def end_clients(registry: Registry) -> None:
    """Close every client now."""
    for client in list(registry.clients.values()):
        client.break_off("57P01", ADMINISTRATOR)
    for replication in list(registry.replications.values()):
        replication.break_off("57P01", ADMINISTRATOR)


def end_streams(registry: Registry) -> None:
    """Close the replication connections that can go on elsewhere where they were."""
    for replication in tuple(registry.replications.values()):
        if replication.may_end:
            replication.break_off("57P01", ADMINISTRATOR)


@dataclass(slots=True)
class _Boundaries:
    """Ends the clients of a pool behind the batch in which their transactions end: one that asks without a
    pause is between two of them for less time than looking now and then would find."""

    pool: Pool
    reactor: Reactor
    asked: bool = False

    def counted(self, seconds: float) -> None:
        """In place of the pool's own count of transactions."""
        self.pool.transaction_times.observe(seconds)
        if not self.asked:
            self.asked = True
            self.reactor.at_end(self.look)

    def look(self) -> None:
        """Their answers are on their way, and what they ask next has not been read."""
        self.asked = False
        _end_idle(self.pool.clients)


def _end_idle(clients: Iterable[ClientConn]) -> None:
    now = monotonic()
    for client in list(clients):
        if client.requested_at == client.connected_at and now - client.connected_at < FIRST_WORD_SECONDS:
            continue
        busy = client.ticket.waiting or (client.server is not None and not _between(client.server))
        if not busy and not client.buffer and not client.missing:
            client.break_off("57P01", ADMINISTRATOR)


def _between(server: object) -> bool:
    """A session held by its client (session pooling), with nothing going on."""
    return not getattr(server, "owed", True) and getattr(server, "status", 0) == 0x49
