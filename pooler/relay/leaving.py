"""How a session comes back from its client, and what becomes of the state that was left behind on it.

By `session_state`: with `clean`, settings go with the client to whichever session serves it next and the rest
is undone; with `pin` the session stays with the client for as long as it has state; `allow` and `warn` leave
everything as it is. What a session says of itself decides, not what a text seemed to do: a SET that was
rolled back, or was local to its transaction, is not there any more.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from pooler.relay.answers import IDLE
from pooler.relay.keeping import pin, refuse_to_pin, tell_news, warn, warn_of
from pooler.relay.regaining import fit_again
from pooler.wire.session_state import STATE_MASK, Residue, is_undoable, kinds
from pooler.wire.state_question import question, read_answer

if TYPE_CHECKING:
    from pooler.relay.served import Served
    from pooler.relay.server import ServerConn

NOTHING_UNDOES: Final = "a client left something behind that nothing undoes"
CHANGED: Final = "database configuration changed"
SETTINGS_BYTES_MAX: Final = 64 * 1024  # of one client; each session that serves it is sent them
_PARAMETERS, _SUSPECT, _UNNAMED = int(Residue.PARAMETERS), int(Residue.SUSPECT), int(Residue.UNNAMED)
_RENEW, _RESETS = int(Residue.RENEW), int(Residue.RESETS)
_ASKED: Final = int(Residue.LISTEN | Residue.CURSORS | Residue.PREPARED | Residue.TEMP | Residue.ADVISORY)


def end_transaction(server: ServerConn, client: Any, now: float) -> None:
    """A transaction of a client (not of a task) is over, and the session cannot just go on."""
    rule, left = server.pool.state_rule, server.residue & STATE_MASK
    if left:
        server.pool.state_left(left)
        if rule == "warn":
            warn_of(client, kinds(left))
        if rule == "pin" or (rule in ("clean", "reject") and left & (_PARAMETERS | _SUSPECT)):
            server.leaver = client
    leave(server, client, now)


def leave(server: ServerConn, client: Served, now: float) -> None:
    """The client's use of this session is over; it is in step and idle."""
    server.client = None
    server.pause(False)
    client.detached(now)
    if server.out:
        client.pause(False)
    if server.leaver is not None:
        client.pause(True)  # what it asks next must find what it has set
    free(server, now)


def deserted(server: ServerConn, client: Served) -> None:
    """The client went away and takes no answers: undo what it began, or close what cannot be shown to be in
    step."""
    server.client = None
    server.pause(False)
    server.cut = bool(server.out or client.skip)
    if (server.owed or server.skip or server.held or server.cut or server.unsynced or server.own
            or server.closing):
        server.give_up("its client left in the middle of something")
        return
    if client.holds:
        server.residue |= _SUSPECT
    if server.status == IDLE:
        free(server, monotonic())
    else:
        _run(server, b"ROLLBACK")


def free(server: ServerConn, now: float) -> None:
    """Nobody uses it: ask what is set on it, undo what was left behind, then give it back."""
    if server.cancels or server.out or server.closing:
        return  # the last cancel to end calls again, and so does the last byte to go
    if server.row is not None:
        server.row.idle()
    if server.doubtful and not server.retire:
        server.doubtful = False  # what answers there are come before that to a query of ours
        _run(server, b"SELECT 1", again=True)
    elif server.leaver is not None:
        _ask(server)
    elif not server.residue or server.retire or not _clean(server):
        server.residue = 0
        server.pool.give(server, now)


def _run(server: ServerConn, sql: bytes, *, again: bool = False) -> None:
    """`again`: it may be refused once. Behind a group that a query has ended, PostgreSQL 18 refuses the first
    command and undoes what the group set; that is so for whoever has a session of its own."""
    def done(ok: bool) -> None:
        if ok and server.status == IDLE:
            free(server, monotonic())
        elif again and server.status == IDLE:
            _run(server, sql)
        else:
            server.give_up("it could not be shown to be idle")

    server.write(server.run_own([sql], done))


# ---- state that stays with the client


def _ask(server: ServerConn) -> None:
    states = _ASKED if server.pool.state_rule == "pin" else 0
    server.own_rows = []
    server.write(server.run_own([question(server.pool.custom_names, states)], lambda ok: _told(server, ok)))


def _told(server: ServerConn, ok: bool) -> None:
    client, server.leaver = server.leaver, None
    rows, server.own_rows = server.own_rows, None
    assert client is not None
    state = 0
    if ok and server.status == IDLE:
        state = _take_along(server, client, rows or [])
    else:
        server.residue |= _SUSPECT  # of a client that kept it, nothing else says what is there
        warn(client, "the session's settings could not be read and are not kept: " + server.own_fault())
    if client.closing:
        free(server, monotonic())
        return
    if state and server.pool.state_rule == "pin":
        if len(server.pool.pinned) < server.pool.plan.settings.max_pinned:
            if state & _RENEW:
                server.retire = server.retire or NOTHING_UNDOES
            server.residue = 0
            pin(client, server)
            fit_again(server, client)
        else:
            refuse_to_pin(client)
    if server.client is None:
        client.pause(False)
        free(server, monotonic())
    if not client.fitting:
        client.go_on()  # if it holds back what came behind a DISCARD ALL


def _take_along(server: ServerConn, client: Any, rows: list[list[bytes | None]]) -> int:
    """The client has what is set on the session. → other state that is there."""
    found = read_answer(rows, server.pool.plan.user.encode())
    known = server.parameters.with_settings(found.settings)
    left = server.residue
    if known.size_bytes > SETTINGS_BYTES_MAX:
        warn(client, f"settings of more than {SETTINGS_BYTES_MAX} bytes together are not kept")
        server.residue |= found.residue
        return found.residue
    server.parameters = known
    before, client.parameters = client.parameters, known
    if left & _RESETS:
        client.parameters = known.again(client.started, server.fresh, found.settings)
        tell_news(client, before)
    if server.pool.state_rule == "pin":
        server.residue = found.residue | (_RENEW if server.retire == NOTHING_UNDOES else left & _RENEW)
        return server.residue
    if not left & (_UNNAMED | _SUSPECT):
        server.residue &= ~_PARAMETERS
    return 0


# ---- state that is undone


def _clean(server: ServerConn) -> bool:
    """False: there is nothing to do. What nothing undoes ends the session."""
    if not is_undoable(server.residue):
        server.retire = NOTHING_UNDOES
        return False
    queries, forgets = server.pool.reset.sql(server.residue)
    if not queries:
        return False
    if forgets:
        server.statements.clear()
    server.write(server.run_own(queries, lambda ok: _cleaned(server, ok)))
    return True


def _cleaned(server: ServerConn, ok: bool) -> None:
    if not ok or server.status != IDLE:
        server.give_up("clean-up failed")
        return
    if server.residue & (_PARAMETERS | _SUSPECT) and server.pool.reset.restores_parameters:
        server.parameters = server.parameters.after_reset(server.fresh)
    server.residue = 0
    free(server, monotonic())
