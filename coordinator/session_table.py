"""What each open session of a worker is doing, kept where a crash of the worker does not lose it.

One mmap'ed file per boot id in the run directory: the worker writes, the coordinator of the host (and the
live view) reads, also after the worker was killed. A session row has an identity (permit, pid), written when
the session opens, and an activity (idle, or busy for which ticket), written with one pack on grant and one on
release. A ticket row is an activity alone: a ticket that was granted and has no session yet.

An activity bears its sequence number at both ends, and every part of it can be told from zeros: `pack_into`
first clears the row, then fills it from front to back, so a writer killed at any point leaves a row that
is seen to be torn. A reader beside a live writer reads back to front and looks again when the ends differ.

Standard library only: a worker and a coordinator both load it.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, Self
from zlib import crc32

MAGIC = b"PLRSESS\0"
SCHEMA = 1
SESSION_ROWS = 4096
TICKET_ROWS = 1024
READ_TRIES = 16

_HEADER = struct.Struct("<8sHHIIIII64sq")  # magic, schema, sizes: header, rows; pid; boot id; clock offset
_HEADER_BYTES = 128
_IDENTITY = struct.Struct("<IBxxxIIQ128s")  # crc, kind, slot, pid, generation, database
_WHO = struct.Struct("<I24s16s60s36s")  # crc, tenant, class, client, the client's own ticket name
_ACTIVITY = struct.Struct(f"<QIIQQ{_WHO.size}sIQ")  # sequence, state, -, ticket, since, who, -, sequence
_SESSION_BYTES = -(-(_IDENTITY.size + _ACTIVITY.size) // 64) * 64
_TICKET_BYTES = -(-_ACTIVITY.size // 64) * 64
DATABASE_BYTES_MAX = 128  # of a ledger's name: what a policy is held to
_KINDS = ("", "main", "reserve", "admin", "replication")
_IDLE, _BUSY = 1, 2  # never zero: a cleared row has no state
_BOOT_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FILE_NAME = re.compile(r"sessions-([A-Za-z0-9_.-]{1,64})\.tbl")


class TableUnreadable(Exception):
    """The file is not a session table of a schema this version reads; names the file."""


class Activity(StrEnum):
    """What a row says. TORN: its writer was killed while it wrote, so it was changing at that moment."""

    IDLE = "idle"
    BUSY = "busy"
    TORN = "torn"


class PermitIdentity(Protocol):
    """What a row needs of a permit (`record.Permit` has it)."""

    @property
    def kind(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Doing:
    """Whom a row serves, in microseconds since 1970; empty when idle or torn."""

    activity: Activity
    ticket_id: int = 0
    ticket_name: str = ""  # only if the client named its ticket
    tenant: str = ""
    class_: str = ""
    client: str = ""
    since_us: int = 0


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One open session as its worker last wrote it."""

    db: str
    kind: str
    slot: int
    generation: int
    pid: int
    doing: Doing


@dataclass(frozen=True, slots=True)
class TableHead:
    """Whose table it is."""

    boot_id: str
    pid: int


def encode_who(tenant: str, class_: str, client: str, ticket_name: str = "") -> bytes:
    """The constant part of a busy row: made once per client. Texts too long for their field are cut."""
    body = _WHO.pack(0, tenant.encode(), class_.encode(), client.encode(), ticket_name.encode())
    return crc32(body[4:]).to_bytes(4, "little") + body[4:]


def decode_who(who: bytes) -> tuple[str, str, str, str]:
    """(tenant, class, client, ticket name) of what `encode_who` made."""
    _, *texts = _WHO.unpack(who)
    tenant, class_, client, ticket_name = map(_text, texts)
    return tenant, class_, client, ticket_name


_NOBODY = encode_who("", "", "")


class Row:
    """One session's row. Every method is one pack; a row that found no room in the file writes nowhere."""

    __slots__ = ("_buffer", "_identity_at", "_index", "_offset", "_pack", "_sequence", "_table")

    def __init__(self, table: SessionTable, index: int, buffer: mmap.mmap | bytearray, offset: int) -> None:
        self._table = table
        self._index = index
        self._buffer = buffer
        self._identity_at = offset
        self._offset = offset + _IDENTITY.size
        self._pack = _ACTIVITY.pack_into
        self._sequence = 0

    def busy(self, ticket_id: int, who: bytes, since_us: int) -> None:
        """A ticket (id ≥ 1) got this session at `since_us` of the monotonic clock (> 0); `who` is from
        `encode_who`."""
        self._sequence = n = self._sequence + 1
        self._pack(self._buffer, self._offset, n, _BUSY, 0, ticket_id, since_us, who, 0, n)

    def idle(self) -> None:
        """Nobody has it."""
        self._sequence = n = self._sequence + 1
        self._pack(self._buffer, self._offset, n, _IDLE, 0, 0, 0, _NOBODY, 0, n)

    def identify(self, db: str, permit: PermitIdentity, pid: int) -> None:
        """Whose row it is: on taking it, and when the session's permit moves to another slot.

        A name over its field is cut: the row is then nobody's, but the session serves.
        """
        name = db.encode(errors="replace")[:DATABASE_BYTES_MAX]
        fields = (_KINDS.index(permit.kind), permit.slot, pid, permit.generation, name)
        check = crc32(_IDENTITY.pack(0, *fields))
        _IDENTITY.pack_into(self._buffer, self._identity_at, check, *fields)

    def free(self) -> None:
        """The session is gone with proof; the row may be taken again. A second call changes nothing."""
        if self._index != _FREED:
            _IDENTITY.pack_into(self._buffer, self._identity_at, 0, 0, 0, 0, 0, b"")
            self._table.give_back_session(self._index)
            self._index = _FREED


class TicketRow:
    """One granted ticket that has no session yet."""

    __slots__ = ("_buffer", "_index", "_offset", "_sequence", "_table")

    def __init__(self, table: SessionTable, index: int, buffer: mmap.mmap | bytearray, offset: int) -> None:
        self._table = table
        self._index = index
        self._buffer = buffer
        self._offset = offset
        self._sequence = 0

    def granted(self, ticket_id: int, who: bytes, since_us: int) -> None:
        """As `Row.busy`."""
        self._write(_BUSY, ticket_id, who, since_us)

    def free(self) -> None:
        """The ticket has its session, or ended. A second call changes nothing."""
        if self._index != _FREED:
            self.clear()
            self._table.give_back_ticket(self._index)
            self._index = _FREED

    def clear(self) -> None:
        """Say that nobody has this row."""
        self._write(_IDLE, 0, _NOBODY, 0)

    def _write(self, state: int, ticket_id: int, who: bytes, since_us: int) -> None:
        self._sequence = n = self._sequence + 1
        _ACTIVITY.pack_into(self._buffer, self._offset, n, state, 0, ticket_id, since_us, who, 0, n)


_FREED = -2
_NOWHERE = -1


class SessionTable:
    """The writer's end. Rows beyond the file's size are handed out all the same and counted in `overflowed`:
    a worker never refuses work for want of a row, it only leaves no trace of it.
    """

    def __init__(self, path: Path, buffer: mmap.mmap, session_rows: int, ticket_rows: int) -> None:
        self.path = path
        self.overflowed = 0
        self._buffer = buffer
        self._tickets_at = _HEADER_BYTES + session_rows * _SESSION_BYTES
        self._free_sessions = list(range(session_rows - 1, -1, -1))
        self._free_tickets = list(range(ticket_rows - 1, -1, -1))

    @classmethod
    def create(
        cls, run_dir: Path, boot_id: str, session_rows: int = SESSION_ROWS, ticket_rows: int = TICKET_ROWS,
        *, clock_offset_us: int | None = None,
    ) -> Self:
        """A new table, complete before it has its name. `clock_offset_us`: from the monotonic clock to the
        time since 1970; None: as it is now.

        Raises OSError (a full disk among them: every page is allocated here, because a hole that cannot be
        filled later would be SIGBUS), ValueError for a boot id that is no file name.
        """
        if clock_offset_us is None:
            clock_offset_us = (time.time_ns() - time.monotonic_ns()) // 1000
        path = table_path(run_dir, boot_id)
        size = _HEADER_BYTES + session_rows * _SESSION_BYTES + ticket_rows * _TICKET_BYTES
        draft = path.with_suffix(".new")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            buffer = mmap.mmap(descriptor, size)
        except OSError:
            draft.unlink()
            raise
        finally:
            os.close(descriptor)
        _HEADER.pack_into(buffer, 0, MAGIC, SCHEMA, _HEADER_BYTES, session_rows, _SESSION_BYTES,
                          ticket_rows, _TICKET_BYTES, os.getpid(), boot_id.encode(), clock_offset_us)
        table = cls(path, buffer, session_rows, ticket_rows)
        for index in range(ticket_rows):
            table._ticket(index).clear()  # a row of zeros is one whose writer was killed
        draft.rename(path)
        return table

    def take(self, db: str, permit: PermitIdentity, pid: int) -> Row:
        """A row for a session that is open, idle at first."""
        if self._free_sessions:
            index = self._free_sessions.pop()
            row = Row(self, index, self._buffer, _HEADER_BYTES + index * _SESSION_BYTES)
        else:
            self.overflowed += 1
            row = Row(self, _NOWHERE, bytearray(_SESSION_BYTES), 0)
        row.idle()  # before the identity: a row with an identity has an activity
        row.identify(db, permit, pid)
        return row

    def take_ticket(self, ticket_id: int, who: bytes, since_us: int) -> TicketRow:
        """A row for a ticket that was granted and has no session yet."""
        if self._free_tickets:
            row = self._ticket(self._free_tickets.pop())
        else:
            self.overflowed += 1
            row = TicketRow(self, _NOWHERE, bytearray(_TICKET_BYTES), 0)
        row.granted(ticket_id, who, since_us)
        return row

    def _ticket(self, index: int) -> TicketRow:
        return TicketRow(self, index, self._buffer, self._tickets_at + index * _TICKET_BYTES)

    def give_back_session(self, index: int) -> None:
        """For `Row.free`."""
        if index != _NOWHERE:
            self._free_sessions.append(index)

    def give_back_ticket(self, index: int) -> None:
        """For `TicketRow.free`."""
        if index != _NOWHERE:
            self._free_tickets.append(index)

    def close(self) -> None:
        """Stop writing; the file stays for the coordinator, which removes it with the last permit."""
        self._buffer.close()


def table_path(run_dir: Path, boot_id: str) -> Path:
    """Where a worker's table is. Raises ValueError for a boot id that is no file name."""
    if not _BOOT_ID.fullmatch(boot_id):
        raise ValueError(f"{boot_id!r} is not a boot id")
    return run_dir / f"sessions-{boot_id}.tbl"


def list_tables(run_dir: Path) -> dict[str, Path]:
    """Every table of the directory, by boot id."""
    found = ((path, _FILE_NAME.fullmatch(path.name)) for path in run_dir.glob("sessions-*.tbl"))
    return {match[1]: path for path, match in found if match}


def read_head(path: Path) -> TableHead:
    """Whose table it is. Raises TableUnreadable, OSError."""
    with _Reader(path) as reader:
        return reader.head


def read_table(path: Path) -> list[SessionRow]:
    """The sessions that have a row. One with a torn activity says TORN; one whose identity was being written
    when its worker was killed was being opened or was already gone, and is left out.
    Raises TableUnreadable, OSError.
    """
    with _Reader(path) as reader:
        return [row for index in range(reader.session_rows) if (row := reader.session(index)) is not None]


def read_tickets(path: Path) -> list[Doing]:
    """The tickets that were granted and had no session yet. Raises TableUnreadable, OSError."""
    with _Reader(path) as reader:
        return [doing for index in range(reader.ticket_rows) if (doing := reader.ticket(index)) is not None]


class _Reader:
    """A read-only map of a table."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise TableUnreadable(f"{path} is empty") from None
        try:
            self._read_header(path)
        except TableUnreadable:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def _read_header(self, path: Path) -> None:
        if len(self._map) < _HEADER_BYTES or self._map[:8] != MAGIC:
            raise TableUnreadable(f"{path} is not a session table")
        _, schema, *sizes, pid, boot, self._clock_offset_us = _HEADER.unpack_from(self._map)
        if schema != SCHEMA:
            raise TableUnreadable(f"{path} has schema {schema}, this version reads {SCHEMA}")
        self._sessions_at, self.session_rows, self._session_bytes = sizes[:3]
        self.ticket_rows, self._ticket_bytes = sizes[3:]
        self._tickets_at = self._sessions_at + self.session_rows * self._session_bytes
        if len(self._map) < self._tickets_at + self.ticket_rows * self._ticket_bytes:
            raise TableUnreadable(f"{path} is cut short")
        self.head = TableHead(_text(boot), pid)

    def session(self, index: int) -> SessionRow | None:
        at = self._sessions_at + index * self._session_bytes
        for _ in range(READ_TRIES):
            raw = self._map[at : at + _IDENTITY.size]
            check, kind, slot, pid, generation, db = _IDENTITY.unpack(raw)
            if kind == 0:
                return None
            if check == crc32(bytes(4) + raw[4:]):
                doing = self._doing(at + _IDENTITY.size)
                if self._map[at : at + _IDENTITY.size] == raw:  # else the row changed hands meanwhile
                    name = _KINDS[kind] if kind < len(_KINDS) else f"kind {kind}"
                    return SessionRow(_text(db), name, slot, generation, pid, doing)
        return None

    def ticket(self, index: int) -> Doing | None:
        at = self._tickets_at + index * self._ticket_bytes
        doing = self._doing(at)
        return doing if doing.activity is not Activity.IDLE else None

    def _doing(self, at: int) -> Doing:
        end = at + _ACTIVITY.size
        for _ in range(READ_TRIES):
            tail = self._map[end - 8 : end]
            doing = _decode_activity(self._map[at : end - 8] + tail, self._clock_offset_us)
            if tail == self._map[at : at + 8] and doing is not None:
                return doing
        return Doing(Activity.TORN)


def _decode_activity(raw: bytes, clock_offset_us: int) -> Doing | None:
    """None if any part of it is missing."""
    head, state, _, ticket_id, since_us, who, _, tail = _ACTIVITY.unpack(raw)
    if head != tail or head == 0 or int.from_bytes(who[:4], "little") != crc32(who[4:]):
        return None
    if state == _IDLE:
        return Doing(Activity.IDLE)
    if state != _BUSY or ticket_id == 0 or since_us == 0:
        return None
    tenant, class_, client, ticket_name = decode_who(who)
    return Doing(Activity.BUSY, ticket_id, ticket_name, tenant, class_, client, since_us + clock_offset_us)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")  # a cut may have split a character
