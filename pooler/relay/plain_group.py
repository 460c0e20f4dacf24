"""The commonest groups of the extended protocol, each known by its ends and taken as one: a Bind of a named
statement with Execute and Sync, or a Parse of the text that the client's unnamed statement is anyhow with its
Bind, Execute and Sync; with a Describe of the portal before the Execute or without. Every other group goes
message by message.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from pooler.relay import owed as o

if TYPE_CHECKING:
    from pooler.relay.client import ClientConn
    from pooler.relay.server import ServerConn
    from pooler.wire.prepared import Statement

PARSE, BIND = 0x50, 0x42
DESCRIBE: Final = b"D\0\0\0\6P\0"  # of the unnamed portal
ENDING: Final = b"E\0\0\0\t\0\0\0\0\0S\0\0\0\4"  # its Execute, without a limit of rows, and a Sync
_WITH_DESCRIBE: Final = DESCRIBE + ENDING
_DESCRIBED: Final = [o.BIND, o.DESCRIBE, o.EXECUTE, o.SYNC]
_BARE: Final = [o.BIND, o.EXECUTE, o.SYNC]
_length = Struct(">I")
_length_at = _length.unpack_from


def take_group(client: ClientConn, server: ServerConn, data: bytes, size: int) -> bytes | None:
    """What to send for `data`, if it is such a group and the session has its statement; what will be answered
    is entered then. None: nothing was done.

    Precondition: nothing is owed and nothing unsynced.
    """
    if data[-22:] == _WITH_DESCRIBE:
        ends, answers = size - 22, _DESCRIBED
    elif data[-15:] == ENDING:
        ends, answers = size - 15, _BARE
    else:
        return None
    statements, pool = client.statements, server.pool
    if statements is None or data[5] or pool.passes_names or size > pool.packet_bytes_max:
        return None  # data[5]: a Bind of a portal with a name; a Parse with one
    if data[0] == PARSE:
        statement = statements.get(b"")
        if statement is None or not _is_known(client, data, ends, statement):
            return None
        server.statements.unnamed = statement
        pool.client_parses += 1
        pool.server_parses += 1
        server.owed.append(o.Parsed(statement, b"", True, False, statement))
    else:
        name_end = data.find(0, 6, ends)
        statement = statements.get(data[6:name_end])
        length = _length_at(data, 1)[0]
        if (name_end <= 6 or length + 1 != ends or statement is None or statement.forgets is not None
                or not server.statements.touch(statement)):
            return None
        name = statement.server_name
        data = b"B%b\0%b%b" % (_length.pack(length + len(name) + 6 - name_end), name, data[name_end:])
    pool.binds += 1
    client.forgets = None
    if statement.residue:
        server.residue |= statement.residue
    if statement.commits:
        server.commits = True
    if statement.alters:
        server.altered = True
    server.owed.extend(answers)
    server.statements.group += 1
    return data


def _is_known(client: ClientConn, data: bytes, ends: int, statement: Statement) -> bool:
    """Whether a Parse of this very text is followed by nothing but a Bind of both unnamed ones."""
    bind = _length_at(data, 1)[0] + 1
    return (ends - bind >= 13 and data[bind] == BIND and not data[bind + 5] and not data[bind + 6]
            and bind + 1 + _length_at(data, bind + 1)[0] == ends
            and not client.pool.refuses and statement.is_again(data[6:bind], client.parameters.search_path))
