"""What happened to each session permit, read from etcd itself and not from the fleet.

Uses etcd's JSON gateway, so that this needs neither the coordinator nor its client: one watch from the first
revision on, in a thread of its own. The history is in etcd's order; the times are when this process saw it.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordinator.ledger.keys import FleetKeys, prefix_end
from coordinator.ledger.record import Session, Worker


@dataclass(frozen=True, slots=True)
class Seen:
    """One change of a permit's key. `session` None: the key is gone."""

    at: float  # seconds since 1970
    revision: int
    key: str
    session: Session | None


class LedgerWatch:
    """Follows `session/` of one database. `history` only grows."""

    def __init__(self, endpoint: str, keys: FleetKeys, database: str) -> None:
        self._url = f"http://{endpoint}/v3"
        self._prefix = keys.db(database).sessions()
        self._workers = keys.worker("")
        self.history: list[Seen] = []
        self._answer: Any = None
        self._thread = threading.Thread(target=self._follow, name="ledger watch", daemon=True)

    def start(self) -> None:
        """Follow from the first revision on."""
        self._answer = self._post("/watch", {"create_request": {
            **_range(self._prefix), "start_revision": "1"}}, timeout_seconds=None)
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
        try:
            for line in self._answer:
                self._take(json.loads(line))
        except (OSError, ValueError, AttributeError):
            return  # etcd is stopped: the history ends here

    def _take(self, line: dict[str, Any]) -> None:
        at = time.time()
        for event in line.get("result", {}).get("events", []):
            entry = event["kv"]
            gone = event.get("type") == "DELETE"
            self.history.append(Seen(
                at, int(entry["mod_revision"]), _text(entry["key"]), None if gone else _session(entry)))

    def _post(self, path: str, body: dict[str, Any], timeout_seconds: float | None = 5) -> Any:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode())
        return urllib.request.urlopen(request, timeout=timeout_seconds)


def lives(history: list[Seen]) -> Iterator[tuple[str, list[Seen]]]:
    """Each tenure of a slot, from its reservation to the deletion of its key (or the end of the history)."""
    current: dict[str, list[Seen]] = {}
    for seen in history:
        current.setdefault(seen.key, []).append(seen)
        if seen.session is None:
            yield seen.key, current.pop(seen.key)
    yield from current.items()


def _range(prefix: str) -> dict[str, str]:
    return {"key": _base64(prefix), "range_end": _base64(prefix_end(prefix))}


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


def _session(entry: dict[str, Any]) -> Session:
    return Session.decode(base64.b64decode(entry["value"]))
