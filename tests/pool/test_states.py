"""The table of a server session's states."""

from __future__ import annotations

from itertools import product

import pytest

from pooler.pool.states import MOVES, IllegalMove, ServerState, find_move


def _reachable(start: ServerState) -> set[ServerState]:
    seen: set[ServerState] = set()
    todo = [start]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo += [move.target for move in MOVES if move.source is state]
    return seen


def test_each_transition_stands_once_and_is_found() -> None:
    pairs = [(move.source, move.target) for move in MOVES]
    assert len(pairs) == len(set(pairs))
    assert all(find_move(*pair).reason for pair in pairs)


@pytest.mark.parametrize(("source", "target"), [
    pair for pair in product(ServerState, ServerState) if pair not in {(m.source, m.target) for m in MOVES}])
def test_what_the_table_does_not_have_raises(source: ServerState, target: ServerState) -> None:
    with pytest.raises(IllegalMove, match=f"{source} to {target}"):
        find_move(source, target)


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    assert _reachable(ServerState.CONNECTING) == set(ServerState)
    assert all(ServerState.CLOSED in _reachable(state) for state in ServerState)
    assert _reachable(ServerState.CLOSED) == {ServerState.CLOSED}


def test_a_session_left_dirty_or_closing_never_serves_again_uncleaned() -> None:
    served_from = {move.source for move in MOVES if move.target is ServerState.ACTIVE}
    assert served_from == {ServerState.IDLE, ServerState.ACTIVE}
    assert _reachable(ServerState.CLOSING) == {ServerState.CLOSING, ServerState.CLOSED}
