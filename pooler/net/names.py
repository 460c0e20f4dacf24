"""The addresses of a server's name: what the system's resolver says now, each time a session is opened.

A resolver may take its time. It is asked in a thread, once for all who want the same name meanwhile, so that
a name that is slow holds up nobody who wants another, nor anything else that is done in threads.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from pooler.net.stream import Broken

AT_ONCE = 100  # names, each of which stands in the config

Addresses = list[tuple[int, Any]]
"""(family, address of a socket)"""

_under_way = trio.lowlevel.RunVar["dict[tuple[str, int], _Lookup]"]("look-ups under way")
_limiter = trio.lowlevel.RunVar[trio.CapacityLimiter]("look-ups at once")


@dataclass(slots=True)
class _Lookup:
    done: trio.Event = field(default_factory=trio.Event)
    found: Addresses = field(default_factory=list)
    fault: str = ""


async def addresses_of(host: str, port: int) -> Addresses:
    """In the resolver's order. Raises Broken."""
    if _is_address(host):
        return _resolve(host, port)
    lookups = _look_ups()
    lookup = lookups.get((host, port))
    if lookup is None:
        lookup = lookups[host, port] = _Lookup()
        trio.lowlevel.spawn_system_task(_look_up, host, port, lookup)
    await lookup.done.wait()
    if lookup.fault:
        raise Broken(f"cannot resolve the name: {lookup.fault}")
    return lookup.found


async def _look_up(host: str, port: int, lookup: _Lookup) -> None:
    """Goes on though who asked first is cancelled: others may wait for it."""
    try:
        lookup.found = await trio.to_thread.run_sync(
            partial(_resolve, host, port), abandon_on_cancel=True, limiter=_threads())
    except (OSError, ValueError, RuntimeError) as fault:  # it is no name, or there is no thread to be had
        lookup.fault = getattr(fault, "strerror", None) or str(fault)
    finally:
        _look_ups().pop((host, port), None)
        lookup.done.set()


def _resolve(host: str, port: int) -> Addresses:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_ups() -> dict[tuple[str, int], _Lookup]:
    try:
        return _under_way.get()
    except LookupError:
        _under_way.set({})
        return _under_way.get()


def _threads() -> trio.CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        _limiter.set(trio.CapacityLimiter(AT_ONCE))
        return _limiter.get()
