"""The addresses of this host with their networks: what samehost and samenet mean (getifaddrs of the libc)."""

from __future__ import annotations

import ctypes
import socket
import sys
from collections.abc import Iterator
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface

_PARTS = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}  # of a sockaddr


class _Entry(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3)."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)), ("name", ctypes.c_char_p), ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p), ("netmask", ctypes.c_void_p), ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p)]


def own_interfaces() -> tuple[IPv4Interface | IPv6Interface, ...]:
    """Every address of every interface, as it is now; empty if the system does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return ()
    try:
        return tuple(_interfaces(first))
    finally:
        libc.freeifaddrs(first)


def _interfaces(entry: ctypes._Pointer[_Entry]) -> Iterator[IPv4Interface | IPv6Interface]:
    while entry:
        found = entry.contents
        family = _family(found.address)
        if family in _PARTS and found.netmask:
            address, mask = _bytes_of(found.address, family), _bytes_of(found.netmask, family)
            bits = f"{int.from_bytes(mask, 'big'):b}".count("1")
            yield ip_interface(f"{ip_address(address)}/{bits}")
        entry = found.next


def _family(pointer: int | None) -> int:
    return -1 if not pointer else int.from_bytes(ctypes.string_at(pointer, 2), sys.byteorder)


def _bytes_of(pointer: int, family: int) -> bytes:
    part = _PARTS[socket.AddressFamily(family)]
    return ctypes.string_at(pointer, part.stop)[part]
