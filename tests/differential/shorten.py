"""A failing script made short: writes, then messages, left out one by one as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.differential.script import Write


def shortened(steps: list[Write], fails: Callable[[list[Write]], bool]) -> list[Write]:
    """The least that still fails when any one thing is left out of it. Precondition: `fails(steps)`."""
    while (less := next(filter(fails, _with_less(steps)), None)) is not None:
        steps = less
    return steps


def _with_less(steps: list[Write]) -> Iterator[list[Write]]:
    for n in reversed(range(len(steps))):
        yield steps[:n] + steps[n + 1 :]
    for n, (data, client) in enumerate(steps):
        said = _messages(data)
        for k in range(len(said) if len(said) > 1 else 0):
            yield [*steps[:n], Write(b"".join(said[:k] + said[k + 1 :]), client), *steps[n + 1 :]]


def _messages(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        end = at + 1 + int.from_bytes(data[at + 1 : at + 5])
        found.append(data[at:end])
        at = end
    return found
