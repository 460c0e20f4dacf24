"""etcd's transactions on the wire: the one message that every session costs several of, written and read
without the generated classes, which take twenty times as long.

Protocol buffers as etcd's rpc.proto and kv.proto number them
(https://github.com/etcd-io/etcd/blob/main/api/etcdserverpb/rpc.proto); fields that are not known are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.store.api import Compare, Entry, Field, Lost, Txn, Won

TXN_METHOD = "/etcdserverpb.KV/Txn"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TARGET = {Field.CREATE: (b"\x10\x01", 5), Field.MOD: (b"\x10\x02", 6)}  # target, and the number's field
_RANGE_END = 64 << 3 | _BYTES
_WORD = (1 << 64) - 1


def encode_txn(txn: Txn) -> bytes:
    """A TxnRequest."""
    out = bytearray()
    for compare in txn.compares:
        _message(out, 1, _compare(compare))
    for put in txn.puts:
        body = bytearray()
        _message(body, 1, put.key.encode())
        _message(body, 2, put.value)
        if put.lease:
            body.append(3 << 3 | _VARINT)
            _varint(body, put.lease)
        _operation(out, 2, 2, body)
    for key in txn.deletes:
        body = bytearray()
        _message(body, 1, key.encode())
        _operation(out, 2, 3, body)
    for start, end in txn.reads:
        body = bytearray()
        _message(body, 1, start.encode())
        _message(body, 2, end.encode())
        _operation(out, 3, 1, body)
    return bytes(out)


def decode_txn_answer(raw: bytes) -> Won | Lost:
    """A TxnResponse: what was read, where it failed. Raises ValueError for what is none."""
    revision, succeeded = 0, False
    answers: list[bytes] = []
    for number, value in _fields(raw):
        if number == 1 and isinstance(value, bytes):
            revision = _number(value, 3)
        elif number == 2:
            succeeded = bool(value)
        elif number == 3 and isinstance(value, bytes):
            answers.append(value)
    return Won(revision) if succeeded else Lost(revision, tuple(map(_entries, answers)))


def _compare(compare: Compare) -> bytearray:
    target, number = _TARGET[compare.field]
    body = bytearray(target)
    _message(body, 3, compare.key.encode())
    body.append(number << 3 | _VARINT)
    _varint(body, compare.revision)
    if compare.range_end is not None:
        _varint(body, _RANGE_END)
        end = compare.range_end.encode()
        _varint(body, len(end))
        body += end
    return body


def _operation(out: bytearray, branch: int, kind: int, body: bytearray) -> None:
    request = bytearray()
    _message(request, kind, body)
    _message(out, branch, request)


def _message(out: bytearray, number: int, body: bytes | bytearray) -> None:
    out.append(number << 3 | _BYTES)
    _varint(out, len(body))
    out += body


def _varint(out: bytearray, value: int) -> None:
    value &= _WORD
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _entries(operation: bytes) -> tuple[Entry, ...]:
    """The keys of a ResponseOp that answers a range."""
    ranges = [value for number, value in _fields(operation) if number == 1 and isinstance(value, bytes)]
    return tuple(_entry(value) for answer in ranges for number, value in _fields(answer)
                 if number == 2 and isinstance(value, bytes))


def _entry(raw: bytes) -> Entry:
    key = value = b""
    numbers = {2: 0, 3: 0, 6: 0}
    for number, found in _fields(raw):
        if isinstance(found, int):
            numbers[number] = found
        elif number == 1:
            key = found
        elif number == 5:
            value = found
    return Entry(key.decode(), value, numbers[2], numbers[3], numbers[6])


def _number(raw: bytes, wanted: int) -> int:
    return next((value for number, value in _fields(raw) if number == wanted and isinstance(value, int)), 0)


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields, in order."""
    at, end = 0, len(raw)
    while at < end:
        tag, at = _read_varint(raw, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _read_varint(raw, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(raw, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind} in an answer of etcd")
        if at + size > end:
            raise ValueError("an answer of etcd ends early")
        if kind == _BYTES:
            yield number, raw[at : at + size]
        at += size


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(raw) and shift < 64:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return _signed(value), at
        shift += 7
    raise ValueError("an answer of etcd ends within a number")


def _signed(value: int) -> int:
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value
