"""What a worker last heard of one database's ledger. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from coordinator.ledger.record import Backend, EpochState, LedgerState, backend_from


@dataclass(frozen=True, slots=True)
class LedgerView:
    """One `ledger` notification. `reachable` is false, too, while the worker has no link."""

    db: str
    tag: str = ""
    state: str = ""
    reachable: bool = False
    epoch: int = 0
    epoch_state: str = ""
    address: str = ""  # host:port, or the directory and port of a unix socket, as it is to be dialled
    backend: Backend | None = None
    drain_timeout_seconds: float = 0.0
    policy: Mapping[str, Any] = field(default_factory=dict)
    frozen: str = ""  # who forbade that it grows
    no_growth: str = ""  # why nothing more is granted; "": it is

    @classmethod
    def parse(cls, db: str, ledger: Mapping[str, Any]) -> Self:
        """From the map of docs/link.md; what is absent there keeps its default."""
        epoch = ledger.get("epoch") or {}
        return cls(
            db=db, tag=ledger.get("tag") or "", state=ledger.get("state") or "",
            reachable=bool(ledger.get("reachable")), epoch=epoch.get("number") or 0,
            epoch_state=epoch.get("state") or "", address=epoch.get("address") or "",
            backend=backend_from(epoch.get("backend")),
            drain_timeout_seconds=epoch.get("drain_timeout_seconds") or 0.0,
            policy=ledger.get("policy") or {}, no_growth=ledger.get("growth") or "",
            frozen=ledger.get("frozen") or "",
        )

    @property
    def policy_generation(self) -> int:
        """The one that grants; 0: none is known."""
        return int(self.policy.get("generation") or 0)

    @property
    def serving(self) -> bool:
        """Its epoch has a backend and does not drain: tickets may be granted sessions."""
        return self.epoch > 0 and self.epoch_state == EpochState.ACTIVE

    @property
    def grows(self) -> bool:
        """New sessions may be asked for, and old ones closed by choice: it is there, whole and not frozen."""
        return self.serving and self.has_successors

    @property
    def has_successors(self) -> bool:
        """What is closed by choice, or for its age, can be replaced."""
        return self.reachable and self.whole and not (self.no_growth or self.frozen)

    @property
    def whole(self) -> bool:
        """It is not lost and not being rebuilt: what is missing in it is really gone."""
        return self.state == LedgerState.ACTIVE

    def after(self, last: Self | None) -> Self:
        """What holds when this is heard after `last`.

        A ledger that is lost, or not yet whole again, says nothing of the epoch and policy by which it was
        served till then: those hold on, until one that is being rebuilt has gone on to a later epoch.
        """
        if last is None or self.whole or not last.epoch:
            return self
        if self.state == LedgerState.RECOVERING and self.epoch > last.epoch:
            return self
        return replace(last, state=self.state, reachable=self.reachable, tag=self.tag or last.tag,
                       policy=last.policy or self.policy)

    def cut_off(self) -> Self:
        """The same, as it stands while nothing can be heard of it."""
        return replace(self, reachable=False)
