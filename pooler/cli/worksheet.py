"""What `pooler plan` found, for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pooler.capacity import FleetShare, LocalPools, Server, proposed, waiting, wanted_of
from pooler.cli.plan_zones import ZonePlan

LABEL_WIDTH = 70


@dataclass(frozen=True, slots=True)
class Worksheet:
    """A server with what takes its sessions, and the workers that a forecast needs; each may be left out.

    `shares`: the ledgers of the config; where there are none, a budget that fits is proposed.
    """

    server: Server | None
    shares: Sequence[FleetShare]
    local: LocalPools | None
    zoned: ZonePlan | None

    @property
    def fits(self) -> bool:
        """Nothing takes more than there is."""
        return self.server is None or (self._fleet_fits(self.server) and self._local_fits(self.server))

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"fits": self.fits}
        if self.server is not None:
            found["server"] = _server_json(self.server)
            found["fleet"] = self._fleet_json(self.server)
            if self.local is not None:
                found["local_pools"] = self._local_json(self.server, self.local)
        if self.zoned is not None:
            found["workers"] = self.zoned.as_json()
        return found

    def lines(self) -> Iterator[str]:
        if self.server is not None:
            yield from _server_lines(self.server)
            if self.local is not None:
                yield from _local_lines(self.server, self.local)
            yield from self._fleet_lines(self.server)
        if self.zoned is not None:
            yield from self.zoned.lines()

    def _rows(self, server: Server) -> Sequence[FleetShare]:
        return self.shares or [proposed(server)]

    def _fleet_fits(self, server: Server) -> bool:
        rows = self._rows(server)
        return wanted_of(server, rows) <= server.hard_connection_limit and rows[0].permits > 0

    def _local_fits(self, server: Server) -> bool:
        return self.local is None or self.local.overlap <= server.ordinary

    def _waiting(self, server: Server) -> int | None:
        """Which of several ledgers the application would use is not known."""
        rows = self._rows(server)
        return waiting(rows[0], self.local.overlap) if self.local is not None and len(rows) == 1 else None

    def _fleet_json(self, server: Server) -> dict[str, Any]:
        rows = self._rows(server)
        return {
            "ledgers": [{"database": share.db, "serverSessionPermits": share.permits,
                         "reservePermits": share.reserve, "adminReserve": share.admin,
                         "otherClients": share.other_clients} for share in rows],
            "proposed": not self.shares, "sessions": wanted_of(server, rows),
            "hardConnectionLimit": server.hard_connection_limit, "fits": self._fleet_fits(server)}

    def _local_json(self, server: Server, local: LocalPools) -> dict[str, Any]:
        return {"steady": local.steady, "overlap": local.overlap, "ordinary_sessions": server.ordinary,
                "fits": self._local_fits(server), "waiting_in_fleet": self._waiting(server)}

    def _fleet_lines(self, server: Server) -> Iterator[str]:
        rows = self._rows(server)
        yield "fleet: one budget for all workers, however many replicas connect to it"
        for share in rows:
            name = share.db if self.shares else "a policy that fits"
            yield _line(f"{name}: permits {share.permits} + reserve {share.reserve} + admin {share.admin}",
                        share.sessions)
        wanted = wanted_of(server, rows)
        yield _line("with other clients, of what ordinary roles can have", wanted,
                    _verdict(wanted, server.hard_connection_limit))
        late = self._waiting(server)
        if self.local is not None and late is not None:
            yield _line(f"of {self.local.overlap} connections that all run a transaction at once, wait", late)


def _server_json(server: Server) -> dict[str, int]:
    return {"max_connections": server.max_connections,
            "superuser_reserved_connections": server.superuser_reserved,
            "reserved_connections": server.reserved, "other_clients": server.other_clients,
            "margin": server.margin, "ordinary_sessions": server.ordinary}


def _server_lines(server: Server) -> list[str]:
    return ["server", _line("max_connections", server.max_connections),
            _line("superuser_reserved_connections", -server.superuser_reserved),
            _line("reserved_connections", -server.reserved), _line("other clients", -server.other_clients),
            _line("margin (adminReserve)", -server.margin),
            _line("remain for ordinary sessions", server.ordinary)]


def _local_lines(server: Server, local: LocalPools) -> list[str]:
    each = f"{local.processes} processes x {local.pools} pools x ({local.size} + {local.overflow})"
    return ["pools in each process",
            _line(f"{local.replicas} replicas x {each}", local.steady,
                  _verdict(local.steady, server.ordinary)),
            _line(f"in the overlap of a rollout: {local.replicas + local.surge} replicas", local.overlap,
                  _verdict(local.overlap, server.ordinary))]


def _line(label: str, value: int, verdict: str = "") -> str:
    return f"  {label.ljust(LABEL_WIDTH)} {value:>6}  {verdict}".rstrip()


def _verdict(wanted: int, room: int) -> str:
    return f"fits {room}" if wanted <= room else f"{wanted - room} too many for {room}"
