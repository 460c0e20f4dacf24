"""Names of log events: an API that operators and tests match on. `noun_happened`, one per fact."""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    """Every event name; docs list them from here."""

    FLEET_STARTED = "fleet_started"
    FLEET_STOPPING = "fleet_stopping"
    FLEET_STOPPED = "fleet_stopped"
    PROCESS_STARTED = "process_started"
    PROCESS_READY = "process_ready"
    PROCESS_EXITED = "process_exited"
    PROCESS_KEPT_DOWN = "process_kept_down"
    CONFIG_RELOADED = "config_reloaded"
    CONFIG_REFUSED = "config_refused"
    SIGNAL_RECEIVED = "signal_received"
    TAKEOVER_ASKED = "takeover_asked"
    POOL_CHANGED = "pool_changed"
    WORKER_DRAINING = "worker_draining"
    CLIENT_REFUSED = "client_refused"
    AUTH_QUERY_FAILED = "auth_query_failed"
    CANCEL_NOT_DELIVERED = "cancel_not_delivered"
    SESSION_OPENED = "session_opened"
    SESSION_OPEN_FAILED = "session_open_failed"
    SESSION_CLOSED = "session_closed"
    SESSION_LOST = "session_lost"
    SERVER_RESTARTED = "server_restarted"
    SESSION_PERMIT_GONE = "session_permit_gone"
    SESSION_REASSERTED = "session_reasserted"
    LINK_UP = "link_up"
    LINK_LOST = "link_lost"
    EPOCH_CHANGED = "epoch_changed"
    COMMAND_ISSUED = "command_issued"
    SOMETHING_FAILED = "something_failed"
