"""Hostile bytes from clients, and from a server: whoever sends them ends alone.

Three in five inputs are a client's; the others are what a scripted server says. One in ten goes to a whole
fleet (a PostgreSQL, or the scripted server, behind it), the rest to the worker's relay alone, in processes
beside it: a fleet waits most of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from chaos.fuzz_client import Place, Sender
from chaos.fuzz_relay import relay_beside, replay_relay
from chaos.fuzz_run import SERVED_SECONDS_MAX, Run, audited, no_wrong
from chaos.fuzz_server import fuzz_server
from chaos.outcome import Outcome
from chaos.world import CONSOLE, DBNAME, PASSWORD, USER, World, world
from pooler.demo import client as c

PERMITS, WORKERS, SENDERS = 60, 2, 24
INPUTS_PER_SECOND = 400  # how many are sent for each second that was asked for
CLIENTS_PART = 0.6
FLEET_CLIENTS_PART, FLEET_SERVER_PART = 0.12, 0.05  # of each kind: what a whole fleet is sent
BYSTANDER = "bystander"
MODES = {USER: "transaction", "fuzz_session": "session", "fuzz_statement": "statement"}
REPLAYED = ("relay-client", "relay-server", "port")
Say = Callable[[str], None]


def fuzz(seed: int, seconds: float, say: Say) -> Outcome:
    """Both kinds, INPUTS_PER_SECOND for each of `seconds` together. Raises PartFailed."""
    inputs = round(seconds * INPUTS_PER_SECOND)
    clients = round(inputs * CLIENTS_PART)
    server = inputs - clients
    to_fleet, to_fleet_by_server = round(clients * FLEET_CLIENTS_PART), round(server * FLEET_SERVER_PART)
    with (relay_beside(seed, clients - to_fleet, odd=False) as by_clients,
          relay_beside(seed, server - to_fleet_by_server, odd=True) as by_server):
        parts = [fuzz_clients(seed, to_fleet, say), fuzz_server(seed, to_fleet_by_server, say),
                 by_clients(), by_server()]
    for part in parts[-2:]:
        say(f"{part.figures}")
    return Outcome([verdict for part in parts for verdict in part.verdicts],
                   {name: value for part in parts for name, value in part.figures.items()})


def fuzz_clients(seed: int, inputs: int, say: Say) -> Outcome:
    """Bytes to the client port."""
    with _port() as here:
        place = _place(here)
        run = Run(here.fleet, lambda: c.RawClient("127.0.0.1", here.port, 2 * SERVED_SECONDS_MAX).login(
            BYSTANDER, PASSWORD, DBNAME))
        senders: list[Sender] = []

        def send(numbers: Sequence[int]) -> None:
            sender = Sender(place, seed)
            senders.append(sender)
            sender.send(numbers)

        run.all(inputs, SENDERS, send)
        heard = sum((each.heard for each in senders), Counter[str]())
        wrong = [each for sender in senders for each in sender.wrong]
        say(f"clients: {sum(heard.values())} inputs; heard: {dict(heard.most_common(9))}")
        verdicts = [*run.verdicts("clients"), no_wrong("clients", wrong),
                    audited(here.fleet, here.parked.away)]
        return Outcome(verdicts, {"clients": {
            "inputs": sum(heard.values()), "heard": dict(heard), **run.figures}})


def replay(part: str, seed: int, numbers: Sequence[int], say: Say) -> list[str]:
    """The inputs of one client again, as a run has named them: what was wrong. `part`: relay-client,
    relay-server (of these the last is looked at, behind all that came before) or port. Raises PartFailed."""
    if part != "port":
        return replay_relay(seed, numbers[-1], say, odd=part == "relay-server")
    with _port() as here:
        sender = Sender(_place(here), seed)
        sender.send(numbers)
        say(f"heard: {dict(sender.heard)}")
        return sender.wrong


def _place(here: World) -> Place:
    return Place(here.port, PASSWORD, DBNAME, list(MODES), (CONSOLE, PASSWORD))


def _port() -> AbstractContextManager[World]:
    others = [BYSTANDER, *(name for name in MODES if name != USER)]
    more: dict[str, dict[str, Any]] = {
        "users": {name: {"pool_mode": mode} for name, mode in MODES.items()}, "log": {"level": "error"},
        "auth": {"failed_login_delay_max": "0s"}}
    return world(permits=PERMITS, workers=WORKERS, others=others, more=more)
