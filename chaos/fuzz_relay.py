"""The same bytes to the worker's relay alone, in this process.

Each input is seen through to its end before the next, whatever the machine does: both halves of the fuzz in
great number. Which scene gets an input hangs on its number alone, and no scene knows of another, so that what
an input did is seen again from the seed and its number.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from time import process_time
from typing import Any

import structlog

from chaos.fuzz_client import ends_whole, made
from chaos.fuzz_run import LOOKS, flat, in_mib, no_wrong, resident
from chaos.fuzz_scene import CLIENTS, Client, Scene
from chaos.fuzz_server import OddServer, asking
from chaos.fuzz_words import Nonsense, may_close
from chaos.outcome import Outcome
from pooler.relay import reactor

MIXES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("transaction", {}), ("session", {}), ("statement", {}), ("transaction", {"session_state": "pin"}),
    ("transaction", {"session_state": "reject"}), ("transaction", {"session_state": "warn"}),
    ("transaction", {"max_prepared_statements": 3}), ("transaction", {"max_prepared_statements": 0}))


class Fuzz:
    """Inputs to scenes; `wrong` should stay empty."""

    def __init__(self, seed: int, scenes: list[Scene]) -> None:
        self._seed, self._scenes = seed, scenes
        self.heard: Counter[str] = Counter()
        self.wrong: list[str] = []

    def put(self, number: int, *, odd: bool) -> None:
        """One input: hostile bytes of a client, or an odd answer to one."""
        scene = self._scenes[number % len(self._scenes)]
        client = scene.client(number // len(self._scenes) % CLIENTS)
        (self._said_by_server if odd else self._sent_by_client)(number, scene, client)

    def client_of(self, number: int) -> Client:
        """Whose input that was."""
        client = self._scenes[number % len(self._scenes)].clients[number // len(self._scenes) % CLIENTS]
        assert client is not None
        return client

    def _said_by_server(self, number: int, scene: Scene, client: Client) -> None:
        data, readies = asking(self._seed, number)
        client.hearing.asked.add(number)
        wanted = client.hearing.readies + readies
        self._see_through(number, scene, client, (data,), "server", may_be_cut=True)
        if scene.odd is not None:
            scene.odd.told.clear()  # nobody here asks for it, and it would grow for ever
        if strange := client.hearing.strange - {0}:
            self.wrong.append(f"server {number}: heard what others were said: {sorted(strange)}")
            client.leave()
        if not client.closed and client.hearing.readies < wanted:
            client.left = 0  # it waits for what will never come

    def _sent_by_client(self, number: int, scene: Scene, client: Client) -> None:
        writes = made(self._seed, number, "session").writes
        self._see_through(number, scene, client, writes, "client")
        client.hearing.strange.clear()
        if not all(map(ends_whole, writes)):
            client.left = min(client.left, 1)  # what follows would be taken for the rest of it

    def _see_through(
        self, number: int, scene: Scene, client: Client, writes: tuple[bytes, ...], who: str, *,
        may_be_cut: bool = False,
    ) -> None:
        """`may_be_cut`: the server may end, or be ended, in the middle of a message."""
        client.sent.append(number)
        readies, cut = client.hearing.readies, scene.cut
        try:
            for data in writes:
                client.send(data)
                scene.settle()
            scene.pass_time()
        except (Nonsense, AssertionError) as heard:
            self.wrong.append(f"{who} {client.sent}: {heard!r}")
            client.leave()
        else:
            rightly = may_close(client.hearing, was_cut=may_be_cut and scene.cut > cut)
            if client.closed and not rightly and not self._said_bye(client, who):
                self.wrong.append(f"{who} {client.sent}: closed without a word")
        said = "closed" if client.closed else (
            "answered" if client.hearing.readies > readies else "nothing")
        self.heard[f"{who} {said}"] += 1

    def _said_bye(self, client: Client, who: str) -> bool:
        return who == "client" and any(
            b"X" in each for n in client.sent for each in made(self._seed, n, "session").writes)


@contextmanager
def scenes(seed: int, *, odd: bool) -> Iterator[list[Scene]]:
    """One of each of MIXES. What they log of sessions that come and go is not shown."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    made_ones = [Scene(seed, mode, settings, OddServer(seed, at, shared=False) if odd else None)
                 for at, (mode, settings) in enumerate(MIXES)]
    times = reactor.LINGER_SECONDS, reactor.TURN_SECONDS_MAX
    reactor.LINGER_SECONDS, reactor.TURN_SECONDS_MAX = 0.0, 1.0  # nothing comes by itself; all moves at once
    try:
        yield made_ones
    finally:
        reactor.LINGER_SECONDS, reactor.TURN_SECONDS_MAX = times
        structlog.configure(**before)
        for each in made_ones:
            each.close()


def fuzz_relay(seed: int, inputs: int, *, odd: bool) -> Outcome:
    """So many inputs of one kind; `odd`: answers of the server."""
    who = "relay-server" if odd else "relay-client"
    with scenes(seed, odd=odd) as stage:
        fuzz, began = Fuzz(seed, stage), process_time()
        looks: list[int] = []
        for look in range(LOOKS):
            for number in range(inputs * look // LOOKS, inputs * (look + 1) // LOOKS):
                fuzz.put(number, odd=odd)
            looks.append(resident({os.getpid()}))
        said = sum(scene.odd.said.total() for scene in stage if scene.odd is not None)
    return Outcome([
        no_wrong(who, fuzz.wrong),
        flat(who, looks, inputs),
    ], {who: {"inputs": fuzz.heard.total(), "said": said, "heard": dict(fuzz.heard),
              "resident_mib": in_mib(looks), "processor_seconds": round(process_time() - began, 1)}})


@contextmanager
def relay_beside(seed: int, inputs: int, *, odd: bool) -> Iterator[Callable[[], Outcome]]:
    """The same in a process of its own, which leaves the processors to whoever else needs them. What is
    yielded waits for its outcome."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, os.nice, (5,)) as pool:
        yield pool.submit(fuzz_relay, seed, inputs, odd=odd).result


def replay_relay(seed: int, number: int, say: Callable[[str], None], *, odd: bool) -> list[str]:
    """One input again (`odd`: an answer of the server), behind all that its scene got before it. → what was
    wrong with it."""
    with scenes(seed, odd=odd) as stage:
        fuzz = Fuzz(seed, stage)
        for before in range(number % len(MIXES), number, len(MIXES)):
            fuzz.put(before, odd=odd)
        fuzz.wrong.clear()
        fuzz.put(number, odd=odd)
        client = fuzz.client_of(number)
        mode, settings = MIXES[number % len(MIXES)]
        say(f"{mode} {settings}: input {number} of a client that was sent {client.sent}")
        for asked in ([asking(seed, number)[0]] if odd else made(seed, number, "session").writes):
            say(f"sent {asked!r}")
        say(f"{'closed' if client.closed else 'open'} behind {b''.join(client.hearing.heard)!r}")
    return fuzz.wrong
