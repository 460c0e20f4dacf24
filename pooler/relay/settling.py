"""What an answer of the server means for what it still owes and for what is known of the session."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pooler.relay import owed as o
from pooler.wire.prepared import ALL, ALTERING_TAG, IS_ANALYSIS, OUTDATED_PLAN, OWN_NAME, STAND_IN, UNSURE
from pooler.wire.session_state import FORGETTING_TAGS, Residue, is_local_set, residue_of_tag
from pooler.wire.state_refusal import words_for

if TYPE_CHECKING:
    from pooler.relay.served import Served
    from pooler.relay.server import ServerConn

_LOOK, _RESETS = int(Residue.LOOK), int(Residue.RESETS)
_DEFAULT: Final = re.compile(rb"\bdefault\b", re.IGNORECASE).search  # SET … TO DEFAULT is a RESET


_RESET_ALL: Final = re.compile(rb"\breset\b.*\ball\b", re.IGNORECASE | re.DOTALL).search


def errored(server: ServerConn, message: bytes) -> None:
    """An ErrorResponse: what the server skips after it did not happen."""
    owed = server.owed
    is_bind = bool(owed) and owed[0] == o.BIND
    if not o.ends_by_itself(owed):
        if type(owed[0]) is o.Parsed:
            owed[0].before = None  # it was not skipped: it dropped the unnamed statement, and failed
            if owed[0].taken and server.client is not None and server.client.statements is not None:
                server.client.statements.in_use = owed[0].taken
        if o.may_touch_unnamed(owed):
            server.statements.unnamed = UNSURE
        skipped(server, o.settle_error(owed))
        server.skipping = not owed
        server.unsynced = server.unsynced or not owed  # a query that seemed to end the group is skipped too
    statements = server.client.statements if server.client is not None else None
    if statements is not None and (OUTDATED_PLAN(message) is not None or (is_bind and IS_ANALYSIS(message))):
        statements.outdate()
    server.copy_in = False
    server.doubtful = server.doubtful or server.syncs_ignored > 0
    server.pool.errors += 1
    server.note_fatal(message)


def refusal(server: ServerConn) -> tuple[str, ...] | bytes:
    """What was refused in what an error answers now; none if it answers anything else. What is skipped after
    it has no answer any more."""
    owed = server.owed
    ours, count = False, 0
    for at, entry in enumerate(owed):
        is_refused = entry.refused if type(entry) is o.Parsed else entry == o.REFUSED
        ours = ours or (is_refused and at == 0)
        count += is_refused
        if entry == o.SYNC or o.ends_by_itself(owed):
            break
    kinds = server.refused[:count]
    del server.refused[:count]
    return kinds[0] if ours else ()


def reworded(server: ServerConn, message: bytes, refused: tuple[str, ...] | bytes) -> bool:
    """An ErrorResponse to a text of ours, sent for one that is refused. True: the client hears our words."""
    words = words_for(message, refused)
    if words is None:
        return False
    server.owed.appendleft(o.Told(words, b""))
    return True


def skipped(server: ServerConn, failed: list[o.Entry]) -> None:
    """The server skipped these after an error."""
    for entry in reversed(failed):  # each knows what was before it
        if type(entry) is o.Parsed:
            if entry.named:  # the same text may be there under its name all the same
                server.statements.remove(entry.statement)
        elif type(entry) is o.Closed and entry.statement is not None:
            server.statements.restore(entry.statement)
        if server.client is not None and not o.is_superseded(server.owed, entry):
            server.client.did_not_happen(entry)


def copying(server: ServerConn) -> None:
    """COPY IN begins."""
    owed = server.owed
    ignored, server.copy_in = o.settle_copy_in(owed)
    server.syncs_ignored += ignored
    if server.copy_in and owed and owed[0] == o.EXECUTE:
        server.unsynced = True


def _is_local(server: ServerConn) -> bool:
    """Whether the SET that is answered now is a query of its own and gone with its transaction."""
    return server.client is not None and len(server.owed) == 1 and is_local_set(server.client.last_sent)


def tagged(server: ServerConn, tag: bytes) -> None:
    """A command tag that is not one of the common ones."""
    if server.pool.pinned:
        server.residue |= _LOOK
    if tag != b"SET" or not _is_local(server):
        server.residue |= residue_of_tag(tag)
        if tag == b"SET" and server.client is not None and _DEFAULT(server.client.last_sent) is not None:
            server.residue |= _RESETS
    if (tag == b"RESET" or tag == b"DISCARD ALL") and server.client is not None:
        _own_reset(server, server.client, tag)
    if ALTERING_TAG(tag) is not None:
        server.altered = True
    if tag in FORGETTING_TAGS:
        server.statements.clear()
        server.statements.unnamed = UNSURE
        for entry in server.owed:  # sent behind it: these are still to be prepared
            if type(entry) is o.Parsed and entry.named and entry.statement.server_name:
                server.statements.restore(entry.statement)
    if tag in FORGETTING_TAGS or tag == b"DEALLOCATE":
        _forget(server.client, tag)


def _own_reset(server: ServerConn, client: Served, tag: bytes) -> None:
    """RESET ALL and DISCARD ALL mean the pooler's own parameters, too."""
    text = client.last_sent
    if server.owed and server.owed[0] == o.EXECUTE:  # of a named statement: its text is not known here
        text = server.statements.unnamed.body if server.statements.unnamed is not None else b""
    if tag == b"DISCARD ALL" or _RESET_ALL(text) is not None:
        client.reset_asked()


def _forget(client: Served | None, tag: bytes) -> None:
    if client is None or client.statements is None or client.forgets is None:
        return  # what names it has now were given behind that text
    if tag in FORGETTING_TAGS:
        if client.forgets == ALL:
            client.statements.forget_names()
    elif client.forgets != ALL:
        client.statements.close(client.forgets)


def renamed(server: ServerConn, message: bytes) -> bytes:
    """An ErrorResponse with the client's names of statements, where the server speaks of the pooler's."""
    statements = server.client.statements if server.client is not None else None

    def own(found: re.Match[bytes]) -> bytes:
        if statements is None:
            return found[0]
        name = statements.in_use if found[1] == STAND_IN else statements.name_of(found[1])
        return found[0] if name is None else b'"%b"' % name

    body = OWN_NAME.sub(own, message[5:])
    return b"E" + (len(body) + 4).to_bytes(4, "big") + body
