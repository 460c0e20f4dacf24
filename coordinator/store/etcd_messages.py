"""etcd's messages and what its failures mean: with `etcd` and `etcd_wire` all that knows etcd.

`meaning` decides it in one place: a request that certainly never reached etcd, or that etcd refused whole, is
StoreUnavailable; anything else that ends without an answer is StoreUnknown if it could have written.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import grpc
import grpc.aio

from coordinator.store.api import (
    Change,
    Entry,
    LeaseGone,
    StoreFull,
    StoreUnavailable,
    StoreUnknown,
)

# etcd3's messages were generated before protobuf's C parts refused such code
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from etcd3 import etcdrpc as rpc

__all__ = ["changes", "entries", "meaning", "range_op", "rpc"]

# what etcd and gRPC say when a request was certainly not carried out
NEVER_CARRIED_OUT = (
    "failed to connect", "connections to all backends failing", "DNS resolution failed", "name resolution",
    "etcdserver: no leader", "etcdserver: too many requests", "etcdserver: not capable",
)
REFUSED_WHOLE = (
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def meaning(error: grpc.aio.AioRpcError, writes: bool) -> Exception:
    """What a failed request means for what may have been written."""
    code, details = error.code(), error.details() or ""
    if "duplicate key" in details or "too many operations" in details:
        return ValueError(details)
    if "requested lease not found" in details:
        return LeaseGone(details)
    if "database space exceeded" in details:
        return StoreFull(details)
    if code in REFUSED_WHOLE or any(text in details for text in NEVER_CARRIED_OUT) or not writes:
        return StoreUnavailable(details)
    return StoreUnknown(details)


def range_op(start: str, end: str | None) -> Any:
    request = rpc.RangeRequest(key=start.encode(), range_end=end.encode() if end else b"")
    return rpc.RequestOp(request_range=request)


def _entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def entries(answer: Any) -> tuple[Entry, ...]:
    return tuple(_entry(kv) for kv in answer.kvs)


def changes(answer: Any, after: int) -> tuple[Change, ...]:
    """The events of one answer; etcd never splits a revision between two of them."""
    return tuple(
        Change(event.kv.key.decode(), None if event.type else _entry(event.kv), event.kv.mod_revision)
        for event in answer.events if event.kv.mod_revision > after
    )
