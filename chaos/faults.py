"""What is done to a running fleet: each fault strikes once, and may have an end that comes later."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

from chaos.reserve import AdminReserve
from chaos.world import LEASE_SECONDS, World
from pooler.demo.etcd import Member
from pooler.demo.fleet import listener_pid
from pooler.demo.process import started_at

LASTS_SECONDS = {"worker stopped": 3 * LEASE_SECONDS, "etcd leader killed": 2.0, "etcd links cut": 3.0,
                 "etcd links silent": 2 * LEASE_SECONDS, "one etcd link cut": 3.0}
_CHILDREN_GONE_SECONDS, _READY_SECONDS = 20.0, 60.0


@dataclass(frozen=True, slots=True)
class Struck:
    """What a fault did; `heal` ends it, if it does not end by itself."""

    text: str
    heal: Callable[[], None] | None = None


@dataclass(slots=True)
class Scene:
    """What the faults have in hand. `heal` waits until none is under way any more."""

    here: World
    reserve: AdminReserve
    chance: Random
    heal: Callable[[], None]


Strike = Callable[[Scene], Struck | None]
"""None: there was nothing to strike just now."""


def kill_worker(scene: Scene) -> Struck | None:
    """SIGKILL."""
    found = _worker(scene)
    if found is None:
        return None
    index, pid = found
    os.kill(pid, signal.SIGKILL)
    return Struck(f"worker {index} (pid {pid}) killed")


def stop_worker(scene: Scene) -> Struck | None:
    """SIGSTOP past its lease: its permits become unknown, and are its own again once it goes on."""
    found = _worker(scene)
    if found is None:
        return None
    index, pid = found
    started = started_at(pid)
    os.kill(pid, signal.SIGSTOP)
    return Struck(f"worker {index} (pid {pid}) stopped", partial(_go_on, pid, started))


def kill_coordinator(scene: Scene) -> Struck | None:
    """SIGKILL of the only one, which is the leader."""
    fleet = scene.here.fleet
    assert fleet.child is not None
    pid = listener_pid(fleet.ports.http, fleet.processes() - {fleet.child.pid})
    if pid is None:
        return None
    os.kill(pid, signal.SIGKILL)
    return Struck(f"coordinator (pid {pid}) killed")


def kill_supervisor(scene: Scene) -> Struck | None:
    """SIGKILL; its children end by themselves, and then somebody starts it again."""
    fleet = scene.here.fleet
    scene.heal()
    before = {pid: started_at(pid) for pid in fleet.processes()}
    assert fleet.child is not None
    fleet.child.stop(signal.SIGKILL)
    postgres = scene.here.server.child
    assert postgres is not None
    began = time.monotonic()
    postgres.wait_until(
        lambda: not any(started_at(pid) == started for pid, started in before.items() if started),
        "the children of a killed supervisor are gone", _CHILDREN_GONE_SECONDS)
    gone = time.monotonic() - began
    fleet.launch()
    fleet.child.wait_until(fleet.is_ready, "the fleet is ready again", _READY_SECONDS)
    return Struck(f"supervisor killed, its {len(before) - 1} children gone after {gone:.1f} s, started anew, "
                  f"ready after {time.monotonic() - began - gone:.1f} s more")


def kill_backend(scene: Scene) -> Struck | None:
    """SIGKILL of one server process of the fleet: the server ends all the others, too, and recovers."""
    sessions = scene.reserve.sessions
    if not sessions:
        return None
    pid = scene.chance.choice(sessions)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return Struck(f"backend {pid} killed")
    return None


def kill_etcd_leader(scene: Scene) -> Struck | None:
    """SIGKILL; it comes back later, with its data."""
    etcd = scene.here.etcd
    leader = next((each for each in etcd.members if _leads(each)), None)
    if leader is None or any(each.child is None or not each.child.is_alive() for each in etcd.members):
        return None
    leader.kill()
    return Struck(f"etcd leader {leader.name} killed", partial(leader.start, etcd.binary, etcd.die_signal))


def cut_etcd(scene: Scene) -> Struck | None:
    """Every link of the coordinator to etcd."""
    for cable in scene.here.cables:
        cable.cut()
    return Struck("links to etcd cut", partial(_heal_cables, scene))


def silence_etcd(scene: Scene) -> Struck | None:
    """Nothing passes, nothing is refused, and what was sent arrives late."""
    for cable in scene.here.cables:
        cable.silence()
    return Struck("links to etcd silent", partial(_heal_cables, scene))


def cut_one_member(scene: Scene) -> Struck | None:
    """Of one member of etcd."""
    cable = scene.chance.choice(scene.here.cables)
    cable.cut()
    return Struck("link to one etcd member cut", partial(_heal_cables, scene))


FAULTS: Mapping[str, Strike] = {
    "worker killed": kill_worker, "worker stopped": stop_worker, "coordinator killed": kill_coordinator,
    "supervisor killed": kill_supervisor, "backend killed": kill_backend,
    "etcd leader killed": kill_etcd_leader, "etcd links cut": cut_etcd, "etcd links silent": silence_etcd,
    "one etcd link cut": cut_one_member,
}


def _worker(scene: Scene) -> tuple[int, int] | None:
    """A worker that runs, unless it is the only one."""
    running = {index: pid for index, pid in scene.here.fleet.worker_pids().items() if not _is_stopped(pid)}
    if len(running) < scene.here.fleet.plan.workers:
        return None
    return scene.chance.choice(sorted(running.items()))


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return True


def _go_on(pid: int, started: str) -> None:
    if started_at(pid) == started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _heal_cables(scene: Scene) -> None:
    for cable in scene.here.cables:
        cable.heal()


def _leads(member: Member) -> bool:
    request = urllib.request.Request(f"{member.url}/v3/maintenance/status", b"{}")
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            said = json.load(answer)
    except (OSError, ValueError):
        return False
    return bool(said.get("leader")) and said["leader"] == said["header"]["member_id"]
