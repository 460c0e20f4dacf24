"""What happened to each session permit, read from etcd itself and not from the fleet.

Uses etcd's JSON gateway, so that this needs neither the coordinator nor its client: one watch from the first
revision on, in a thread of its own; when its member goes away it goes on at the next one, from the revision
it had got to. The history is in etcd's order; the times are when this process saw it.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from coordinator.ledger.keys import FleetKeys, prefix_end
from coordinator.ledger.record import Session, Worker

GIVEN_UP_SECONDS = 60.0
AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Seen:
    """One change of a permit's key. `session` None: the key is gone."""

    at: float  # seconds since 1970
    revision: int
    key: str
    session: Session | None


class LedgerWatch:
    """Follows `session/` of one database. `history` only grows. With several endpoints it outlives the loss
    of any member."""

    def __init__(self, endpoints: str | Sequence[str], keys: FleetKeys, database: str) -> None:
        names = [endpoints] if isinstance(endpoints, str) else endpoints
        self._urls = deque(f"http://{name}/v3" for name in names)
        self._prefix = keys.db(database).sessions()
        self._workers = keys.worker("")
        self.history: list[Seen] = []
        self._answer: Any = None
        self._thread = threading.Thread(target=self._follow, name="ledger watch", daemon=True)

    def start(self) -> None:
        """Follow from the first revision on."""
        self._answer = self._watch()
        self._thread.start()

    def now(self) -> dict[str, Session]:
        """The permits as they stand, by key, in one linearizable read."""
        with self._post("/kv/range", _range(self._prefix)) as answer:
            found = json.load(answer).get("kvs", [])
        return {_text(entry["key"]): _session(entry) for entry in found}

    def workers(self) -> list[Worker]:
        """The live workers, by index."""
        with self._post("/kv/range", _range(self._workers)) as answer:
            found = json.load(answer).get("kvs", [])
        return sorted((Worker.decode(base64.b64decode(entry["value"])) for entry in found),
                      key=lambda worker: worker.index)

    def owned_by(self, boot_id: str) -> dict[str, Session]:
        """The permits a worker holds, dead or alive."""
        return {key: held for key, held in self.now().items() if held.owner == boot_id}

    def _follow(self) -> None:
        """Until no member answers for a while: then etcd is stopped, and the history ends here."""
        silent_since = time.monotonic()
        while time.monotonic() - silent_since < GIVEN_UP_SECONDS:
            with suppress(OSError, ValueError, AttributeError, HTTPException):
                answer = self._answer or self._watch()
                for line in answer:
                    self._take(json.loads(line))
                    silent_since = time.monotonic()
            self._answer = None
            if len(self._urls) == 1:
                return
            self._urls.rotate(-1)
            threading.Event().wait(AGAIN_SECONDS)

    def _watch(self) -> Any:
        after = self.history[-1].revision if self.history else 0
        return _post(self._urls[0] + "/watch", {"create_request": {
            **_range(self._prefix), "start_revision": str(after + 1)}}, timeout_seconds=None)

    def _take(self, line: dict[str, Any]) -> None:
        at = time.time()
        for event in line.get("result", {}).get("events", []):
            entry = event["kv"]
            gone = event.get("type") == "DELETE"
            self.history.append(Seen(
                at, int(entry["mod_revision"]), _text(entry["key"]), None if gone else _session(entry)))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """From the first member that answers. Raises OSError."""
        urls = tuple(self._urls)
        for url in urls[:-1]:
            with suppress(OSError):
                return _post(url + path, body)
        return _post(urls[-1] + path, body)


def lives(history: list[Seen]) -> Iterator[tuple[str, list[Seen]]]:
    """Each tenure of a slot, from its reservation to the deletion of its key (or the end of the history)."""
    current: dict[str, list[Seen]] = {}
    for seen in history:
        current.setdefault(seen.key, []).append(seen)
        if seen.session is None:
            yield seen.key, current.pop(seen.key)
    yield from current.items()


def _post(url: str, body: dict[str, Any], timeout_seconds: float | None = 5) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    return urllib.request.urlopen(request, timeout=timeout_seconds)


def _range(prefix: str) -> dict[str, str]:
    return {"key": _base64(prefix), "range_end": _base64(prefix_end(prefix))}


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


def _session(entry: dict[str, Any]) -> Session:
    return Session.decode(base64.b64decode(entry["value"]))
