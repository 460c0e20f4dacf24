"""What a look at the model's server shows, judged by the production's proofs."""

from __future__ import annotations

from functools import cache

from coordinator.ledger.proofs import Look, Proven, Row, proof_of_absence
from coordinator.ledger.states import Proof
from tests.ledger.ground import TAG
from tests.model.image import Production, backend_of, pid_of, start_of
from tests.model.state import BACKEND, STARTING, Config


class Looks:
    """Looks are pure, so their proofs are remembered."""

    def __init__(self, production: Production, config: Config) -> None:
        self._production = production
        self._config = config
        self.prove = cache(self._prove)

    def _tag(self, request: int, looked_for: int) -> str:
        """The birth tag: only that of the permit looked for matters, the others are somebody else's."""
        return self._production.permit(request, self._production.sessions[looked_for].slot).birth_tag(TAG)

    def starters(self, procs: tuple[int, ...]) -> str:
        if not self._config.sees_starters:
            return ""
        return "".join(str(request) for request, proc in enumerate(procs) if proc == STARTING)

    def _prove(
        self, slot: int, procs: tuple[int, ...], births: tuple[int, ...], named: tuple[int, ...],
        restarts: int, *, dead: bool, first: str | None,
    ) -> str | None:
        """The production's proof from what the server shows now."""
        if self._config.restart_frees_unborn and restarts and not self._production.sessions[slot].pid:
            return Proof.RESTARTED.value
        rows = tuple(
            Row(pid_of(request), start_of(request, births[request]), "app", "app",
                "app" if named[request] else self._tag(request, slot), "idle",
                "client backend")
            for request, proc in enumerate(procs) if proc == BACKEND and self._config.sees_everything)
        now = _look_at(rows, self.starters(procs), restarts, 2)
        earlier = None if first is None else _look_at((), first, restarts, 1)
        answer = proof_of_absence(
            self._production.sessions[slot], now, ledger_tag=TAG, owner_known_dead=dead, first=earlier)
        return answer.proof.value if isinstance(answer, Proven) else None


def _look_at(rows: tuple[Row, ...], starters: str, restarts: int, number: int) -> Look:
    """The look with this number, long enough after the one before."""
    return Look(backend_of(restarts), may_see_all=True, is_node=True, rows=rows,
                anonymous=frozenset(pid_of(int(each)) for each in starters), at_us=number * 1_000_000_000,
                connection=number, authentication_timeout_seconds=60, is_local=False)
