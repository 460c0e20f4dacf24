"""What `session_state: reject` refuses, among other errors."""

from __future__ import annotations

import pytest

from pooler.demo.client import SYNC, parse, query
from pooler.wire.messages import read_fault
from tests.relay.world import world


@pytest.mark.parametrize("other", [
    parse("bad"), parse("bad") + parse("LISTEN a"), parse("CREATE ASSERTION a"),
], ids=["an error", "which skips a refused one", "of the same kind"])
@pytest.mark.parametrize("refused", [parse("LISTEN a", "a") + SYNC, query("LISTEN a")], ids=["P", "Q"])
def test_a_refused_text_is_told_in_our_words_and_no_other_error_is(other: bytes, refused: bytes) -> None:
    with world(session_state="reject") as w:
        client = w.client()
        w.send(client, other + SYNC + refused + parse("LOAD 'a'", "b") + SYNC)
        w.settle()
        said = [read_fault(each.body).message for each in client.take() if each.type == "E"]
        assert len(said) == 3
        assert "session state" not in said[0]
        assert "session state (listen)" in said[1]
        assert "session state (renew)" in said[2]
        assert not w.sessions[0].conn.refused
        w.check_idle()
