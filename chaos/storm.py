"""A storm of logins and clients while workers are killed at random: the budget holds all the same.

Budget 10, two workers, 100 clients that never stop, 1,000 logins beside them. The server has exactly ten
ordinary slots to give, so that one session too many is a 53300 in its log.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from random import Random

from chaos.outcome import Outcome
from chaos.world import DBNAME, PASSWORD, USER, World, world
from pooler.demo import judge, schema
from pooler.demo.client import RawClient, ServerSaid
from pooler.demo.fleet import import_path
from pooler.demo.judge import ServerSeen, Verdict
from pooler.demo.load import Group, LoadSpec
from pooler.demo.process import Child
from pooler.demo.serverlog import refusals_from_log, sessions_from_log

PERMITS, WORKERS, CLIENTS, LOGINS = 10, 2, 100, 1_000
LOGINS_AT_ONCE = 50
KILL_EVERY_SECONDS = (6.0, 9.0)  # a worker that dies five times in a minute is kept down by its supervisor
QUIET_SECONDS = 60.0


def storm(seed: int, seconds: float, say: Callable[[str], None]) -> Outcome:
    """Run it for so long. Raises PartFailed."""
    chance = Random(seed)
    with world(permits=PERMITS, workers=WORKERS) as here:
        load = _start_load(here)
        with ThreadPoolExecutor(LOGINS_AT_ONCE) as pool:
            logins = [pool.submit(_login, here.port) for _ in range(LOGINS)]
            kills = _kill_for(here, load, chance, seconds, say)
            outcomes = Counter(each.result() for each in logins)
        load.stop(signal.SIGTERM, 30)
        say(f"{kills} workers killed; logins: {dict(outcomes)}")
        verdicts = [_audit(here), _kills_happened(kills, logins)]
        left = here.fleet.stop()
        verdicts += [Verdict("orphans", not left, f"processes left behind: {len(left)}"), *_judge(here)]
        moved = sum(schema.calls(here.server, DBNAME).values())
        return Outcome(verdicts, {"kills": kills, "logins": dict(outcomes), "transactions": moved})


def _start_load(here: World) -> Child:
    groups = (Group("web", USER, PASSWORD, schema.LOOKUP, CLIENTS),)
    spec = LoadSpec("127.0.0.1", here.port, DBNAME, groups, str(here.directory / "result.json"),
                    str(here.directory / "progress.json"))
    path = here.directory / "load.json"
    spec.save(path)
    return Child([sys.executable, "-m", "pooler.demo.load", path], here.directory / "load.log",
                 env={"PYTHONPATH": import_path()})


def _login(port: int) -> str:
    """One login, one query, one word for how it went."""
    try:
        with RawClient("127.0.0.1", port, 60) as client:
            client.login(USER, PASSWORD, DBNAME).query("SELECT 1")
            return "served"
    except ServerSaid as said:
        return said.sqlstate
    except (OSError, EOFError):
        return "cut off"


def _kill_for(
    here: World, load: Child, chance: Random, seconds: float, say: Callable[[str], None]
) -> int:
    """Kill a worker now and then until the time is over; how many were killed."""
    kills, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        until = min(end, time.monotonic() + chance.uniform(*KILL_EVERY_SECONDS) / WORKERS)
        load.wait_until(partial(_has_passed, until), "the load runs", seconds + 10)
        workers = here.watch.workers()
        if workers and time.monotonic() < end:
            victim = chance.choice(workers)
            if os.path.exists(f"/proc/{victim.pid}"):
                os.kill(victim.pid, signal.SIGKILL)
                kills += 1
                say(f"killed worker {victim.index} (pid {victim.pid})")
    return kills


def _has_passed(moment: float) -> bool:
    return time.monotonic() >= moment


def _audit(here: World) -> Verdict:
    """Once the last killed worker's permits are proven gone, the audit is clean."""
    assert here.fleet.child is not None
    alive = {worker.boot_id for worker in here.watch.workers()}
    deadline = time.monotonic() + QUIET_SECONDS
    here.fleet.child.wait_until(
        lambda: all(held.owner in alive for held in here.watch.now().values())
        or time.monotonic() > deadline, "the fleet lives", QUIET_SECONDS + 5)
    with here.parked.away():
        done = here.fleet.command("ledger", "audit", here.fleet.plan.ledger)
    said = (done.stdout or done.stderr).strip()
    return Verdict("audit", done.returncode == 0, f"exit {done.returncode}; {said}")


def _kills_happened(kills: int, logins: list[Future[str]]) -> Verdict:
    served = sum(each.result() == "served" for each in logins)
    return Verdict("storm", kills > 0 and served >= LOGINS * 0.9,
                   f"{kills} workers killed, {served} of {LOGINS} logins served")


def _judge(here: World) -> list[Verdict]:
    ours = [each for each in sessions_from_log(here.server.log) if each.user == USER]
    refused = [each for each in refusals_from_log(here.server.log) if each.user == USER]
    seen = ServerSeen("server", ours, refused)
    held = here.watch.now()
    tag = next((each.application_name.split(":")[1] for each in ours
                if each.application_name.startswith(judge.BIRTH_TAG)), "")
    return [judge.judge_budget([seen], PERMITS), judge.judge_permits([seen], list(here.watch.history), tag),
            Verdict("free", not held, "permits held at the end: " + (
                "; ".join(f"{each.permit} {each.state}" for each in held.values()) or "none"))]
