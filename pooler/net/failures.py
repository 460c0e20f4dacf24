"""How failed logins of one address are slowed down.

A success is never held up: only the answer to a failure comes later, the more failures the later, and while
too many such answers are outstanding further logins of that address are refused unread. One failure is
forgotten every FORGET_SECONDS. The table is bounded: the address that was quiet for longest goes first. Pure:
`now` is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

ADDRESSES_MAX = 10_000
OUTSTANDING_MAX = 16
FORGET_SECONDS = 6.0
DELAY_FIRST_SECONDS = 0.125
_DOUBLINGS_MAX = 16


@dataclass(slots=True)
class _Record:
    count: float = 0.0
    seen_at: float = 0.0
    outstanding: int = 0


class FailedLogins:
    """The failures of every address. `free`: how many of one address are answered at once.

    `delay_max_seconds`: the longest delay; 0: none, and nothing is kept.
    """

    def __init__(self, free: int, delay_max_seconds: float, *, addresses_max: int = ADDRESSES_MAX) -> None:
        self.set_limits(free, delay_max_seconds)
        self._addresses_max = addresses_max
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def set_limits(self, free: int, delay_max_seconds: float, aside: Sequence[str] = ()) -> None:
        """New limits; what was counted stays. Addresses in the networks `aside` are those of proxies, behind
        which anybody may be: they are not counted."""
        self.free, self.delay_max_seconds = free, delay_max_seconds
        self._aside = tuple(ip_network(network, strict=False) for network in aside)

    def source(self, host: str) -> str | None:
        """What failures of a host are counted under: its address, of IPv6 the network of 64 bits; None for a
        unix socket and for addresses that are not counted."""
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return None
        address = getattr(address, "ipv4_mapped", None) or address
        if any(address in network for network in self._aside):
            return None
        return str(address) if address.version == 4 else str(ip_network(f"{address}/64", strict=False))

    def refuses(self, source: str) -> bool:
        """Whether so many failures of this source wait for their answer that no more is read from it."""
        record = self._records.get(source)
        return record is not None and record.outstanding >= OUTSTANDING_MAX

    def failed(self, source: str, now: float) -> float:
        """One more failure. Returns the seconds after which to answer it; answered() must follow."""
        if self.delay_max_seconds <= 0:
            return 0.0
        record = self._records.setdefault(source, _Record(seen_at=now))
        self._records.move_to_end(source)
        record.count = max(0.0, record.count - (now - record.seen_at) / FORGET_SECONDS) + 1
        record.count = min(record.count, self.free + _DOUBLINGS_MAX)
        record.seen_at = now
        record.outstanding += 1
        self._forget_quiet()
        over = record.count - self.free
        return 0.0 if over <= 0 else min(self.delay_max_seconds, DELAY_FIRST_SECONDS * 2 ** (over - 1))

    def answered(self, source: str) -> None:
        """A failure had its answer, or its client is gone."""
        record = self._records.get(source)
        if record is not None:
            record.outstanding = max(0, record.outstanding - 1)

    def _forget_quiet(self) -> None:
        while len(self._records) > self._addresses_max:
            self._records.popitem(last=False)
