"""One run of inputs: sent by many threads while somebody else is served, then judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress

from pooler.demo import client as c
from pooler.demo.fleet import Fleet
from pooler.demo.judge import Verdict

SERVED_SECONDS_MAX = 5.0
GROWTH_BYTES_MAX = 8 << 20
LOOKS = 20  # at the memory, evenly over the inputs
FULL_AFTER = 60_000  # inputs that fill every cache: what comes behind them may grow by an arena or two
FLAT_BYTES_MAX = 2 << 20
SERVED_AFTER, SHOWN_MAX = 50, 5


class Run:
    """Inputs sent by many threads, while somebody else is served and the workers' memory is looked at."""

    def __init__(self, fleet: Fleet, log_in: Callable[[], c.RawClient]) -> None:
        self._fleet, self._log_in = fleet, log_in
        self._before = set(fleet.worker_pids().values())
        self._waits: list[float] = []
        self._stop = threading.Event()
        self._inputs, self._looks, self._seconds = 0, list[int](), 0.0
        self._lost = ""

    def all(self, inputs: int, senders: int, send: Callable[[Sequence[int]], None]) -> None:
        """Send them, and look at the workers' memory while they are sent."""
        bystander = threading.Thread(target=self._stand_by, daemon=True)
        bystander.start()
        began, self._inputs = time.monotonic(), inputs
        with ThreadPoolExecutor(senders) as pool:
            for look in range(LOOKS):
                part = range(inputs * look // LOOKS, inputs * (look + 1) // LOOKS)
                list(pool.map(send, [part[at::senders] for at in range(senders)]))
                self._looks.append(resident(self._before))
        self._seconds = time.monotonic() - began
        self._stop.set()
        bystander.join(2 * SERVED_SECONDS_MAX)

    @property
    def figures(self) -> dict[str, object]:
        return {"resident_mib": in_mib(self._looks), "seconds": round(self._seconds, 1),
                "served_beside": len(self._waits)}

    def verdicts(self, who: str) -> list[Verdict]:
        """Workers live, others were served, memory is flat, the log tells of no bug, and all goes on."""
        alive = set(self._fleet.worker_pids().values()) == self._before
        waits = self._waits
        return [
            Verdict("alive", alive, f"{who}: workers {'as they were' if alive else 'have died'}"),
            Verdict("others", bool(waits) and max(waits) <= SERVED_SECONDS_MAX and not self._lost,
                    f"{who}: {len(waits)} transactions beside it, the slowest {max(waits, default=-1):.2f} s"
                    + self._lost),
            flat(who, self._looks, self._inputs), no_bug(self._fleet), self._served()]

    def _stand_by(self) -> None:
        try:
            with self._log_in() as other:
                while not self._stop.is_set():
                    began = time.monotonic()
                    other.query("SELECT 1")
                    self._waits.append(time.monotonic() - began)
                    self._stop.wait(0.05)
        except (OSError, EOFError, c.ServerSaid) as lost:
            self._lost = f"; then {lost!r}"

    def _served(self) -> Verdict:
        for _ in range(SERVED_AFTER):
            with self._log_in() as client:
                client.query("SELECT 1")
        return Verdict("served", True, f"{SERVED_AFTER} clients were served after it")


def resident(pids: set[int]) -> int:
    """Bytes of memory that these processes have."""
    total = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/status") as status:
            total += next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    return total


def flat(who: str, looks: Sequence[int], inputs: int) -> Verdict:
    """Late inputs have left the memory as it was: its mean in the last quarter of them is that in the third.
    `looks`: bytes, evenly over that many inputs."""
    quarter = len(looks) // 4
    growth = (sum(looks[-quarter:]) - sum(looks[-2 * quarter : -quarter])) // quarter
    allowed = FLAT_BYTES_MAX if inputs >= 2 * FULL_AFTER else GROWTH_BYTES_MAX
    return Verdict("memory", growth <= allowed, f"{who}: {in_mib([growth])[0]} MiB more in the last quarter "
                   f"of {inputs} inputs than in the third (at most {allowed >> 20})")


def in_mib(sizes: Sequence[int]) -> list[float]:
    return [round(size / 2**20, 1) for size in sizes]


def no_bug(fleet: Fleet) -> Verdict:
    """No exception that nobody expected, in any process of the fleet."""
    lines = fleet.log.read_text(errors="replace").splitlines()
    found = [line for line in lines if "something_failed" in line or "Traceback" in line]
    return Verdict("no bug", not found, f"{len(found)}: {found[0]}" if found else "no exception in the log")


def no_wrong(who: str, wrong: Sequence[str]) -> Verdict:
    """What was heard was protocol, and every end had a word before it."""
    shown = "; ".join(wrong[:SHOWN_MAX])
    return Verdict("heard", not wrong, f"{who}: {len(wrong)} answers wrong" + (f": {shown}" if wrong else ""))


def audited(fleet: Fleet, room: Callable[[], AbstractContextManager[object]] = nullcontext) -> Verdict:
    """The ledger's audit is clean. `room`: while it runs, it may need sessions of its own."""
    with room():
        done = fleet.command("ledger", "audit", fleet.plan.ledger)
    said = (done.stdout or done.stderr).strip().splitlines()
    return Verdict("audit", done.returncode == 0, f"exit {done.returncode}; {said[-1] if said else ''}")
