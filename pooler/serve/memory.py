"""SHOW MEM: what this worker holds, by kind, and what the process takes.

PgBouncer shows its slabs. Here nothing is kept for later, so that `free` is 0; `size` is what one object
takes without what it refers to, of buffers what is in one on average, of `process` a page.
"""

from __future__ import annotations

import resource
from collections.abc import Collection, Iterator
from pathlib import Path
from sys import getsizeof
from typing import Any, Final

from pooler.serve.registry import Registry

Row = dict[str, Any]
_STATM: Final = Path("/proc/self/statm")


def memory_rows(registry: Registry) -> Iterator[Row]:
    """A row for each kind. Takes time only for the buffers, one look at each client and session."""
    statements, settings = registry.parts.statements, registry.settings
    kinds: dict[str, Collection[Any]] = {
        "user_cache": registry.known_users, "db_cache": settings.databases.values(),
        "pool_cache": registry.pools.values(), "server_cache": registry.parts.servers,
        "client_cache": registry.clients.values(),
    }
    for name, objects in kinds.items():
        size = _size_of_one(objects)
        yield _row(name, size, len(objects), size * len(objects))
    buffers = [size for size in _buffered(registry) if size]
    yield _row("iobuf_cache", sum(buffers) // (len(buffers) or 1), len(buffers), sum(buffers))
    text_bytes, count = statements.text_bytes, len(statements)
    yield _row("server_prepared_statement_cache", text_bytes // (count or 1), count, text_bytes)
    page, pages = resource.getpagesize(), _resident_pages()
    yield _row("process", page, pages, page * pages)


def _row(name: str, size: int, used: int, total: int) -> Row:
    return {"name": name, "size": size, "used": used, "free": 0, "memtotal": total}


def _size_of_one(objects: Collection[Any]) -> int:
    one = next(iter(objects), None)
    return 0 if one is None else getsizeof(one) + getsizeof(getattr(one, "__dict__", ""))


def _buffered(registry: Registry) -> Iterator[int]:
    """Bytes in hand: what came and waits for its rest or its session, and what could not be sent yet."""
    for client in registry.clients.values():
        yield len(client.buffer) + len(client.out or b"")
    for server in registry.parts.servers:
        yield len(server.out)


def _resident_pages() -> int:
    return int(_STATM.read_text().split()[1])
