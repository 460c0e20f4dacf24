"""Whether what a server shows proves that a permit's session is gone. Pure.

These are the only three proofs a look can give. Each answer is a proof with its evidence, or what is still
awaited: never a guess. The rules are narrow on purpose; each condition has a trace in which leaving it out
frees the permit of a living session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.ledger.record import Backend, Session
from coordinator.ledger.states import Proof

ORPHAN_CONNECT_GRACE_SECONDS = 120.0  # how long a dead process's kernel may go on retransmitting


@dataclass(frozen=True, slots=True)
class Row:
    """One row of pg_stat_activity. `backend_start_us` None: the looking role may not see it."""

    pid: int
    backend_start_us: int | None
    user: str | None
    dbname: str | None
    application_name: str
    state: str | None
    backend_type: str | None
    client: str | None = None

    @property
    def is_client(self) -> bool:
        """An ordinary session (not a walsender, not a process of the server's own)."""
        return self.backend_type in (None, "client backend")

    @property
    def is_walsender(self) -> bool:
        """A replication connection: ours only where a permit names it, for standbys connect by themselves."""
        return self.backend_type == "walsender"


@dataclass(frozen=True, slots=True)
class Look:
    """What ONE statement on one server showed, outside any transaction block.

    `anonymous` are the pids of starters without a name: a virtualxid in pg_locks but no row, or a row in
    state `starting`. `connection` numbers the connection that was looked through.
    """

    backend: Backend
    may_see_all: bool  # pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')
    is_node: bool  # what was dialled is what answered, and never showed an older start than before
    rows: tuple[Row, ...]
    anonymous: frozenset[int]
    at_us: int  # our monotonic clock when the statement was sent: only differences mean anything
    connection: int
    authentication_timeout_seconds: float
    is_local: bool  # over loopback or a unix socket: no network can hold an orphan's packets back
    max_connections: int = 0  # 0: not told
    reserved_connections: int = 0  # of those, for superusers and for pg_use_reserved_connections
    max_wal_senders: int = -1  # -1: not told
    own_pid: int = 0  # of the session that looked, which `rows` leaves out
    own_start_us: int = 0

    @property
    def void(self) -> str | None:
        """Why this look may prove nothing, or None."""
        if not self.may_see_all:
            return "the monitor role cannot see other sessions: GRANT pg_monitor (or pg_read_all_stats) to it"
        if not self.is_node:
            return "the address is not one node (it answers for another, or went back in time)"
        return None


@dataclass(frozen=True, slots=True)
class Proven:
    """The session is gone: by which proof, and what was seen."""

    proof: Proof
    evidence: str


@dataclass(frozen=True, slots=True)
class Awaiting:
    """Not proven: what is missing, for people. `look_again_at_us`: when another look can help."""

    reason: str
    look_again_at_us: int = 0


def proof_of_absence(
    session: Session,
    look: Look,
    *,
    ledger_tag: str,
    epoch_backend: Backend | None = None,
    owner_known_dead: bool = False,
    first: Look | None = None,
    orphan_connect_grace_seconds: float = ORPHAN_CONNECT_GRACE_SECONDS,
    tag_before: str = "",
) -> Proven | Awaiting:
    """What `look` proves about `session`, a permit in SESSION_UNKNOWN.

    `epoch_backend` is the backend of the epoch it was reserved under, used when the permit has none yet.
    `owner_known_dead` must have been known *before* `first` was taken; `first` is an earlier look for the
    same permit at the same server, or None. `tag_before`: of the ledger whose place this one took.
    """
    if look.void is not None:
        return Awaiting(f"a look that counts: {look.void}")
    recorded = session.backend or epoch_backend
    if recorded is None:
        return Awaiting("nothing says which server it was for: only an attestation helps")
    if session.pid:
        return _with_pid(session, recorded, look)
    if not (owner_known_dead or session.abandoned):
        return Awaiting("its owner's process to be known dead, or its word that it gave the attempt up")
    tags = [session.permit.birth_tag(tag) for tag in (ledger_tag, tag_before) if tag]
    return _never_born(session, recorded, look, first, tags=tags, grace=orphan_connect_grace_seconds)


def _with_pid(session: Session, recorded: Backend, look: Look) -> Proven | Awaiting:
    seen = look.backend
    if not _same_node(recorded, seen):
        return Awaiting(f"a look at {recorded.address} (system {recorded.system_identifier})")
    if seen.postmaster_start_us == recorded.postmaster_start_us:
        return _absent(session, look)
    same_line = seen.timeline == recorded.timeline or seen.in_recovery
    if same_line and seen.postmaster_start_us > max(recorded.postmaster_start_us, session.backend_start_us):
        return Proven(Proof.RESTARTED, f"postmaster started at {seen.postmaster_start_us}, "
                                       f"after the session ({session.backend_start_us})")
    return Awaiting(f"{recorded.address} shows another postmaster, not one that replaced the recorded one")


def _absent(session: Session, look: Look) -> Proven | Awaiting:
    for row in look.rows:
        if row.pid == session.pid:
            if session.backend_start_us and row.backend_start_us not in (None, session.backend_start_us):
                return Proven(Proof.ABSENT, f"pid {session.pid} is another session now")
            return Awaiting(f"pid {session.pid} to end: it is {row.state or 'there'}")
    if session.pid in look.anonymous:
        return Awaiting(f"pid {session.pid} holds a virtual transaction but has no name")
    return Proven(Proof.ABSENT, f"no session with pid {session.pid}")


def _never_born(
    session: Session, recorded: Backend, look: Look, first: Look | None, *, tags: Sequence[str], grace: float
) -> Proven | Awaiting:
    seen = look.backend
    if not _same_node(recorded, seen) or seen.postmaster_start_us < recorded.postmaster_start_us:
        return Awaiting(f"a look at {recorded.address} (system {recorded.system_identifier})")
    bearer = next((row for row in look.rows if row.application_name in tags), None)
    if bearer is not None:
        return Awaiting(f"pid {bearer.pid} to end: it has the birth tag {bearer.application_name}")
    interval_us = never_born_interval_us(look, grace)
    if first is None or first.void is not None or not first.backend.same_server(seen):
        return Awaiting("a second look", look.at_us + interval_us)
    if any(row.application_name in tags for row in first.rows):
        return Awaiting("two looks without its birth tag", look.at_us + interval_us)
    if look.at_us - first.at_us < interval_us:
        return Awaiting("the second look, past every start-up's time limit", first.at_us + interval_us)
    if look.connection == first.connection:
        return Awaiting("the second look over a connection of its own", look.at_us)
    # also one that began after the first look: what a dead owner had on the wire may arrive until the second,
    # and a start-up that waits for a lock takes as long as the lock
    if look.anonymous:
        return Awaiting(f"pid {min(look.anonymous)}, still starting, to get a name or end", look.at_us)
    return Proven(Proof.NEVER_BORN, f"no session was born as {' or '.join(tags)}")


def never_born_interval_us(look: Look, grace_seconds: float) -> int:
    """How far apart the two looks must be: a start-up runs into authentication_timeout twice."""
    grace = 0.0 if look.is_local else grace_seconds
    return int((2 * look.authentication_timeout_seconds + grace) * 1_000_000)


def _same_node(recorded: Backend, seen: Backend) -> bool:
    return (recorded.address, recorded.system_identifier) == (seen.address, seen.system_identifier)
