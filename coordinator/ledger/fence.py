"""What it proves that a node was confirmed off. Pure.

Only what was known before the node was told to go off: it may be back a moment after that was confirmed, as a
standby or by itself, and who was only paused may connect to it then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from coordinator.ledger.proofs import Awaiting, Proven
from coordinator.ledger.record import Backend, Permit, Session, backend_from
from coordinator.ledger.states import Proof


@dataclass(frozen=True, slots=True)
class Fenced:
    """What ends with a node that goes off.

    `servers`: the servers that had run there; `unborn`: permits for it without a server process, whose owners
    were known dead or had given the attempt up: nothing could come of them any more but there and then.
    """

    address: str
    servers: frozenset[Backend]
    unborn: frozenset[Permit] = frozenset()

    def plain(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "address": self.address,
            "servers": [[each.system_identifier, each.timeline, each.postmaster_start_us, each.in_recovery]
                        for each in sorted(self.servers, key=lambda each: each.postmaster_start_us)],
            "unborn": [str(each) for each in sorted(self.unborn)],
        }

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of `plain`. Raises ValueError, KeyError, TypeError for what is not one."""
        names = ("system_identifier", "timeline", "postmaster_start_us", "in_recovery")
        servers = [backend_from({"address": stored["address"], **dict(zip(names, each, strict=True))})
                   for each in stored["servers"]]
        return cls(stored["address"], frozenset(each for each in servers if each is not None),
                   frozenset(map(Permit.parse, stored["unborn"])))


def what_goes_off(
    backend: Backend, sessions: Iterable[Session], known_dead: Iterable[str], epoch_number: int = 0
) -> Fenced:
    """What ends when the node of `backend` goes off, by what stands in the ledger now.

    `known_dead`: boot ids of owners whose processes were seen to end. `epoch_number`: the epoch of `backend`,
    whose permits are for it where they do not say.
    """
    dead, servers, unborn = frozenset(known_dead), {backend}, set[Permit]()
    for session in sessions:
        recorded = session.backend or (backend if session.epoch == epoch_number else None)
        if recorded is None or not _same_node(recorded, backend):
            continue
        servers.add(recorded)
        if not session.pid and (session.abandoned or session.owner in dead):
            unborn.add(session.permit)
    return Fenced(backend.address, frozenset(servers), frozenset(unborn))


def proof_of_fence(session: Session, fenced: Fenced) -> Proven | Awaiting:
    """What it proves about `session`, a permit in SESSION_UNKNOWN, that the node was confirmed off since."""
    if not session.pid:
        if session.permit in fenced.unborn:
            return Proven(Proof.FENCED, f"{fenced.address} went off after its owner had ended or given it up")
        return Awaiting("its owner could still connect when the node was back")
    if session.backend is None or not any(session.backend.same_server(each) for each in fenced.servers):
        return Awaiting(f"it is not of a server that ran at {fenced.address} before it went off")
    return Proven(Proof.FENCED, f"{fenced.address} went off with the server of {session.pid}")


def _same_node(one: Backend, other: Backend) -> bool:
    return (one.address, one.system_identifier) == (other.address, other.system_identifier)
