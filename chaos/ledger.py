"""Everything is killed at random under token writers: the budget holds, nothing acknowledged is lost, and
once all is well again every permit comes back.

PostgreSQL has exactly the budget's slots and not one to spare; the admin reserve is taken, but for one fresh
login at each sample. Two workers, a coordinator, etcd of three members, reached over cables.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from chaos.clients import Clients, Told
from chaos.faults import FAULTS, LASTS_SECONDS, Scene
from chaos.outcome import Outcome
from chaos.reserve import PROBE, AdminReserve
from chaos.world import ADMIN_RESERVE, DBNAME, PASSWORD, USER, World, world
from coordinator.ledger.states import SessionState
from pooler.demo import judge, schema
from pooler.demo.judge import ServerSeen, Verdict
from pooler.demo.ledgerwatch import lives
from pooler.demo.load import Group
from pooler.demo.serverlog import refusals_from_log, sessions_from_log

PERMITS, WORKERS, MEMBERS = 10, 2, 3
WRITERS, READERS = 20, 6
WRITES_MIN = 300
GAP_SECONDS = (1.0, 3.5)  # from one fault to the next
MORE_SECONDS = 60.0  # for faults that have not struck when the time is over
QUIET_SECONDS = 120.0
_GONE = "session_permit_gone"


def ledger(seed: int, seconds: float, say: Callable[[str], None]) -> Outcome:
    """Run it for so long. Raises PartFailed."""
    with world(permits=PERMITS, workers=WORKERS, others=(PROBE,), members=MEMBERS, cabled=True) as here:
        here.server.execute("ALTER TABLE tokens DROP CONSTRAINT tokens_pkey", DBNAME)
        here.parked.leave()
        reserve = AdminReserve(here.server, ADMIN_RESERVE, DBNAME, USER)
        reserve.start()
        try:
            return _Run(here, reserve, Random(seed), say).whole(seconds)
        finally:
            reserve.leave()


class _Run:
    """One run: the faults as they come, and what is judged after them."""

    def __init__(
        self, here: World, reserve: AdminReserve, chance: Random, say: Callable[[str], None]
    ) -> None:
        self._here, self._reserve, self._chance, self._say = here, reserve, chance, say
        self._scene = Scene(here, reserve, chance, self.heal)
        self._load = Clients(here.directory, here.port, (
            Group("writers", USER, PASSWORD, schema.WRITE, WRITERS, writes=True),
            Group("readers", USER, PASSWORD, schema.LOOKUP, READERS)))
        self._began = time.monotonic()
        self._under_way: list[tuple[float, str, Callable[[], None]]] = []
        self._struck = Counter[str]()

    def whole(self, seconds: float) -> Outcome:
        """Disturb, heal, judge."""
        try:
            self._disturb(seconds)
            self.heal()
            healed_after = self._until_healed()
        finally:
            self._load.stop()
        told = self._load.told()
        verdicts = [self._faults_happened(), self._audit()]
        left = self._here.fleet.stop()
        self._reserve.leave()
        verdicts += [Verdict("orphans", not left, f"processes left behind: {len(left)}"),
                     self._reserve.verdict(self._struck["backend killed"]), *self._judge(told)]
        return Outcome(verdicts, self._figures(told, healed_after))

    def heal(self) -> None:
        """Until all faults that are under way are over."""
        self._pass(max((due for due, _, _ in self._under_way), default=time.monotonic()))

    def _disturb(self, seconds: float) -> None:
        end, deck = time.monotonic() + seconds, list[str]()
        while time.monotonic() < end or not self._all_struck():
            if time.monotonic() > end + MORE_SECONDS:
                return
            self._pass(time.monotonic() + self._chance.uniform(*GAP_SECONDS))
            if not deck:
                deck = sorted(FAULTS)
                self._chance.shuffle(deck)
            name = deck.pop()
            struck = FAULTS[name](self._scene)
            if struck is None:
                continue
            self._struck[name] += 1
            self._note(struck.text)
            if struck.heal is not None:
                self._under_way.append((time.monotonic() + LASTS_SECONDS[name], struck.text, struck.heal))

    def _pass(self, until: float) -> None:
        """Let time pass; faults that are due end meanwhile."""
        def is_over() -> bool:
            now = time.monotonic()
            due = [each for each in self._under_way if each[0] <= now]
            self._under_way = [each for each in self._under_way if each[0] > now]
            for _, what, end in due:
                end()
                self._note(f"{what}: over")
            return now >= until

        self._load.child.wait_until(is_over, "the load runs", until - time.monotonic() + 30)

    def _until_healed(self) -> float:
        """Until no permit is unknown any more and each one's owner lives, or the time is over; how long."""
        self._here.etcd.start()
        began = time.monotonic()
        assert self._here.fleet.child is not None
        self._here.fleet.child.wait_until(
            lambda: self._is_healed() or time.monotonic() - began > QUIET_SECONDS, "the fleet lives",
            QUIET_SECONDS + 10)
        lasted = time.monotonic() - began
        self._note(f"healed after {lasted:.1f} s")
        return round(lasted, 1)

    def _is_healed(self) -> bool:
        try:
            held = self._here.watch.now().values()
            alive = {worker.boot_id for worker in self._here.watch.workers()}
        except OSError:
            return False
        return len(alive) == WORKERS and self._here.fleet.is_ready() and all(
            each.owner in alive and each.state is not SessionState.UNKNOWN for each in held)

    def _audit(self) -> Verdict:
        with self._reserve.away():
            done = self._here.fleet.command("ledger", "audit", self._here.fleet.plan.ledger)
        said = (done.stdout or done.stderr).strip().splitlines()
        return Verdict("audit", done.returncode == 0, f"exit {done.returncode}; {said[-1] if said else ''}")

    def _faults_happened(self) -> Verdict:
        counts = ", ".join(f"{name} {self._struck[name]}" for name in FAULTS)
        return Verdict("faults", self._all_struck(), counts)

    def _all_struck(self) -> bool:
        return all(self._struck[name] for name in FAULTS)

    def _judge(self, told: Told) -> list[Verdict]:
        server = self._here.server
        ours = [each for each in sessions_from_log(server.log) if each.user == USER]
        seen = ServerSeen("server", ours, refusals_from_log(server.log))  # whoever it is that was refused
        held = self._here.watch.now()
        gone = sum(_GONE in line for line in self._here.fleet.log.read_text(errors="replace").splitlines())
        return [judge.judge_budget([seen], PERMITS),
                judge.judge_permits([seen], list(self._here.watch.history), birth_tag(ours)),
                Verdict("free", not held, f"permits held at the end: {len(held)}"
                        + "".join(f"; {each.permit} {each.state}" for each in list(held.values())[:3])),
                Verdict("gone", not gone, f"sessions that lost their permit while they served: {gone}"),
                _all_along(judge.judge_writes(told.writes(schema.tokens(server, DBNAME)), told.started,
                                              told.ended, WRITES_MIN))]

    def _figures(self, told: Told, healed_after: float) -> dict[str, Any]:
        return {
            "faults": dict(self._struck), "healed_after_seconds": healed_after,
            "transactions": told.total("done"), "writes_acknowledged": len(told.acknowledged),
            "longest_write_gap_seconds": told.longest_gap_seconds(), "errors": told.errors,
            "unknown": told.total("unknown"), "reconnects": told.total("disconnects"),
            "unknown_permits": unknown_permits(self._here),
            "proofs": dict(proofs(self._here.fleet.log)), "samples": dict(self._reserve.outcomes),
        }

    def _note(self, what: str) -> None:
        self._say(f"{time.monotonic() - self._began:6.1f} s  {what}")


def _all_along(writes: Verdict) -> Verdict:
    """There is no drain here around which they were."""
    return replace(writes, text=writes.text.replace("around the drain", "of them under disturbance"))


def proofs(log: Path) -> Counter[str]:
    """How the fleet's own log says that permits were released after they had been unknown."""
    found = Counter[str]()
    for line in log.read_text(errors="replace").splitlines():
        if "session_permit_released" in line:
            found[str(json.loads(line).get("proof"))] += 1
    return found


def unknown_permits(here: World) -> int:
    """How many sessions were SESSION_UNKNOWN at some time."""
    return sum(any(each.session is not None and each.session.state is SessionState.UNKNOWN for each in seen)
               for _, seen in lives(list(here.watch.history)))


def birth_tag(sessions: list[Any]) -> str:
    """The ledger's tag, as the sessions' birth names have it."""
    return next((each.application_name.split(":")[1] for each in sessions
                 if each.application_name.startswith(judge.BIRTH_TAG)), "")
