"""Names of the coordinator's log events: an API that operators and tests match on. `noun_happened`."""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    """Every event name; docs list them from here."""

    COORDINATOR_STARTED = "coordinator_started"
    COORDINATOR_STOPPING = "coordinator_stopping"
    ETCD_STARTED = "etcd_started"
    ETCD_EXITED = "etcd_exited"
    ETCD_VERSION_UNSAFE = "etcd_version_unsafe"
    LEDGER_UNREACHABLE = "ledger_unreachable"
    LEDGER_REACHABLE = "ledger_reachable"
    LEDGER_CREATED = "ledger_created"
    LEDGER_LOST = "ledger_lost"
    LEDGER_STRANGERS_AT_START = "ledger_strangers_at_start"
    POLICY_PUBLISHED = "policy_published"
    POLICY_DIFFERS = "policy_differs"
    POLICY_REFUSED = "policy_refused"
    EPOCH_CHANGED = "epoch_changed"
    EPOCH_BACK_TO_ACTIVE = "epoch_back_to_active"
    NO_BACKEND_FOUND = "no_backend_found"
    WORKER_REGISTERED = "worker_registered"
    WORKER_LINK_LOST = "worker_link_lost"
    WORKER_LEASE_LOST = "worker_lease_lost"
    WORKER_EXITED = "worker_exited"
    WORKER_FORGOTTEN = "worker_forgotten"
    PERMIT_RESERVED = "session_permit_reserved"
    PERMIT_UNKNOWN = "session_permit_unknown"
    PERMIT_UNKNOWN_OLD = "session_permit_unknown_old"
    PERMIT_RELEASED = "session_permit_released"
    PERMIT_TERMINATING = "session_permit_terminating"
    PERMIT_STUCK = "session_permit_stuck"
    SHED_ASKED = "session_shed_asked"
    LOOK_VOID = "look_void"
    LOOK_FAILED = "look_failed"
    LEADER_ELECTED = "leader_elected"
    LEADER_RESIGNED = "leader_resigned"
    ATTESTED = "session_permit_attested"
    SOMETHING_FAILED = "something_failed"
