"""What is written and read by hand is what etcd's own messages say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.store.api import Compare, Entry, Field, Lost, Put, Txn, Won, prefix_end
from coordinator.store.etcd_messages import rpc
from coordinator.store.etcd_wire import decode_txn_answer, encode_txn

keys = st.text(max_size=200).map(lambda text: "/" + text)
values = st.binary(max_size=300)
numbers = st.integers(0, (1 << 63) - 1)
compares = st.builds(Compare, keys, st.sampled_from(Field), st.integers(-1, (1 << 63) - 1),
                     st.none() | keys)
txns = st.builds(
    Txn, st.lists(compares, max_size=5).map(tuple),
    st.lists(st.builds(Put, keys, values, numbers), max_size=5).map(tuple),
    st.lists(keys, max_size=5).map(tuple),
    st.lists(st.tuples(keys, keys), max_size=5).map(tuple))
entries = st.builds(Entry, keys, values, numbers, numbers, numbers)


@given(txns)
def test_a_transaction_is_what_etcd_reads_of_it(txn: Txn) -> None:
    read = rpc.TxnRequest.FromString(encode_txn(txn))
    assert [_compare(each) for each in read.compare] == list(txn.compares)
    puts = [each.request_put for each in read.success if each.WhichOneof("request") == "request_put"]
    assert [Put(each.key.decode(), each.value, each.lease) for each in puts] == list(txn.puts)
    deletes = [each.request_delete_range for each in read.success
               if each.WhichOneof("request") == "request_delete_range"]
    assert [each.key.decode() for each in deletes] == list(txn.deletes)
    assert not any(each.range_end for each in deletes)
    assert len(read.success) == len(puts) + len(deletes)
    assert [(each.request_range.key.decode(), each.request_range.range_end.decode())
            for each in read.failure] == list(txn.reads)


def _compare(message: Any) -> Compare:
    assert message.result == rpc.Compare.EQUAL
    field = {rpc.Compare.CREATE: Field.CREATE, rpc.Compare.MOD: Field.MOD}[message.target]
    assert message.WhichOneof("target_union") == f"{field}_revision"
    return Compare(message.key.decode(), field, getattr(message, f"{field}_revision"),
                   message.range_end.decode() if message.range_end else None)


@given(st.booleans(), numbers, st.lists(st.lists(entries, max_size=4), max_size=4))
def test_an_answer_is_read_as_etcd_wrote_it(won: bool, revision: int, ranges: list[list[Entry]]) -> None:
    answer = _answer(won, revision, ranges)
    expected = Won(revision) if won else Lost(revision, tuple(map(tuple, ranges)))
    assert decode_txn_answer(answer.SerializeToString()) == expected


def _answer(won: bool, revision: int, ranges: list[list[Entry]]) -> Any:
    answer = rpc.TxnResponse(succeeded=won)
    answer.header.cluster_id, answer.header.member_id = (1 << 64) - 1, 7
    answer.header.revision, answer.header.raft_term = revision, 3
    for found in ranges:
        part = answer.responses.add().response_range
        part.header.revision, part.count, part.more = revision, len(found), True
        for each in found:
            kv = part.kvs.add(key=each.key.encode(), value=each.value, version=9, lease=each.lease)
            kv.create_revision, kv.mod_revision = each.create_revision, each.mod_revision
    if won:
        answer.responses.add().response_put.header.revision = revision
    return answer


def test_an_answer_that_ends_early_is_refused() -> None:
    whole = _answer(False, 300, [[Entry("/a", b"value", 5, 300)]]).SerializeToString()
    refused = 0
    for length in range(len(whole)):
        try:
            decode_txn_answer(whole[:length])
        except ValueError:
            refused += 1
    assert refused >= len(whole) - 4  # but where a field of the outermost message just ended
    with pytest.raises(ValueError, match="wire type"):
        decode_txn_answer(b"\x0b")


@pytest.mark.parametrize("key", ["/p/f/session/db/main/000001", "/é/ü"])
def test_a_range_is_from_its_first_key_to_before_its_last(key: str) -> None:
    end = prefix_end(key[:-1] + "/")
    read = rpc.TxnRequest.FromString(encode_txn(Txn(reads=((key, end),))))
    assert read.failure[0].request_range.range_end == end.encode()
