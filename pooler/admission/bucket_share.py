"""One worker's part of a fleet's token bucket: what it may admit while parts of it come and go.

Pure. Of a move, what the worker loses is lost before anybody is told, and what it gains is gained when it is
sure that the move came to be. Until then (an answer that never came) it stays taken. One move at a time.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from pooler.admission.token_bucket import N, Taken, TokenBucket


class Move(NamedTuple, Generic[N]):
    """What moves, and whether to the worker or from it."""

    burst: N
    rate: N
    tokens: N
    is_taken: bool


class BucketPart(Generic[N]):
    """A part that is nothing at first: also after a restart."""

    __slots__ = ("bucket", "move", "moves")

    def __init__(self, nothing: N, now: N) -> None:
        self.bucket: TokenBucket[N] = TokenBucket(nothing, nothing, nothing, now)
        self.moves = 0  # that came to be
        self.move: Move[N] | None = None

    def admit(self, cost: N, now: N) -> bool:
        """Whether the tokens are here; then they are taken."""
        return self.bucket.take(cost, now) is Taken.ADMITTED

    def begin_take(self, burst: N, rate: N, tokens: N) -> None:
        """A part of the pool is about to be asked for: nothing is here before it is won."""
        assert self.move is None
        self.move = Move(burst, rate, tokens, is_taken=True)

    def begin_give(self, burst: N, rate: N, now: N) -> N:
        """A part is about to be given back: it is used no more. → the tokens that go with it: those that do
        not fit any more."""
        assert self.move is None
        before = self.bucket.settle(now)
        self.bucket.resize(self.bucket.rate - rate, self.bucket.burst - burst, now)
        tokens: N = before - self.bucket.settle(now)
        self.move = Move(burst, rate, tokens, is_taken=False)
        return tokens

    def won(self, now: N) -> None:
        """The move came to be."""
        move, self.move = self.move, None
        self.moves += 1
        if move is not None and move.is_taken:
            self._gain(move, now)

    def lost(self, now: N) -> None:
        """The move can never come to be: what was set aside for it is here again."""
        move, self.move = self.move, None
        if move is not None and not move.is_taken:
            self._gain(move, now)

    def read(self, moves: int, *, has_changed: bool, now: N) -> bool:
        """What stands in the ledger after an answer that never came: so many moves, and whether the share or
        the pool has changed since the move was tried. → whether it is settled; while nothing has changed it
        may still come to be, and is tried again as it was."""
        if moves > self.moves:
            self.won(now)
        elif has_changed:
            self.lost(now)
        return self.move is None

    def _gain(self, move: Move[N], now: N) -> None:
        self.bucket.resize(self.bucket.rate + move.rate, self.bucket.burst + move.burst, now)
        self.bucket.add(move.tokens, now)
