"""What stands in etcd, for people: `etcdctl get --prefix /pooler/FLEET/ -w json | python -m
coordinator.ledger.decode`.

One JSON object per key. Nothing of it needs a running fleet, or a version that knows the record: values are
msgpack maps, and what is worked out (a permit's generation) is worked out as the ledger does it.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

# what the first word of a key below the fleet's root means; docs/etcd-layout.md says more
FAMILIES = {
    "ledger": "which ledger this is, and whether it grants",
    "epoch": "which server a database's sessions go to",
    "drain": "a command that drains is alive",
    "policy": "policy generations, and the alias that says which grants",
    "session": "a session permit, by kind and slot",
    "seat": "one of a pool's own numbered seats",
    "receipt": "what was answered to a reservation",
    "want": "who waits for a session that another host has",
    "exec": "how many tickets of a class a worker may execute; `raise`: moves when it may more",
    "bucket": "which part of a token bucket a worker has; `pool`: what none has",
    "demand": "what a host's queues want to execute",
    "worker": "a live worker or command",
    "worker-exit": "a process that is known dead",
    "claim": "which server processes a worker holds, as it told in a rebuild",
    "ordinal": "which worker has a number in its cancel keys",
    "leader": "which coordinator leads",
    "reach": "a coordinator is there, and which servers it reaches",
    "operator": "what operators forced",
    "awaiting": "what unknown permits wait for",
    "freed": "touched when something was freed",
    "growth": "why nothing is granted to clients",
    "ticket": "what stands under the name that a client gave its transaction",
    "shadow": "what another policy generation would have granted",
}


def decode(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One map per key of etcdctl's answer. Raises ValueError for what is no such answer."""
    kvs = document.get("kvs", [])
    if not isinstance(kvs, list):
        raise ValueError("no answer of etcdctl get -w json: `kvs` is not a list")
    for kv in kvs:
        try:
            key = base64.b64decode(kv["key"]).decode()
            value = base64.b64decode(kv.get("value") or "")
        except (AttributeError, KeyError, ValueError, TypeError) as fault:
            raise ValueError(f"no answer of etcdctl get -w json: {fault!r}") from None
        yield _decoded(key, value, kv)


def _decoded(key: str, value: bytes, kv: Mapping[str, Any]) -> dict[str, Any]:
    family = next((part for part in key.split("/")[3:] if part in FAMILIES), "")  # /prefix/fleet/family
    found: dict[str, Any] = {"key": key, "is": FAMILIES.get(family, "not known to this version"),
                             "created": kv.get("create_revision", 0), "changed": kv.get("mod_revision", 0)}
    if kv.get("lease"):
        found["lease"] = f"{kv['lease']:x}"
    record = _value(value)
    if isinstance(record, dict):
        found |= _worked_out(family, record, found)
    return found | {"value": record}


def _worked_out(family: str, record: Mapping[Any, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The permit that a session or a receipt stands for: see rules.session_of."""
    slot = f"{record.get('kind')}/{record.get('slot')}"
    generation = record.get("generation")
    if family == "session" and isinstance(generation, int):
        return {"permit": f"{slot}.{generation if generation > 0 else found['changed'] - generation}"}
    if family == "receipt" and not record.get("voided"):
        return {"permit": f"{slot}.{found['created'] + record.get('base', 0)}"}
    return {}


def _value(raw: bytes) -> Any:
    """A msgpack value; else the bytes, as text where they are one."""
    if not raw:
        return None
    try:
        return msgpack.unpackb(raw, strict_map_key=False)
    except ValueError:
        return raw.decode(errors="backslashreplace")


def main() -> int:
    """Reads stdin, writes one line per key. Exit 1 for what is no answer of etcdctl; that nobody reads on
    (`| head`) is no fault."""
    text = sys.stdin.read()
    try:
        if not text.strip():
            raise ValueError("nothing came on stdin: give it what `etcdctl get --prefix -w json` prints")
        for each in decode(json.loads(text)):
            sys.stdout.write(json.dumps(each, default=repr, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except (ValueError, AttributeError) as fault:
        sys.stderr.write(f"decode: {fault}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
