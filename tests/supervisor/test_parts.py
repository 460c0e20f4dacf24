"""The supervisor's parts one by one: back-off, what a reload takes, what proves a process dead, sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pooler.settings import Address, Settings, load
from pooler.supervise.backoff import DEATHS_MAX, DOWN_RETRY_SECONDS, Deaths
from pooler.supervise.exits import Boot, ExitFiles, how_it_is_gone
from pooler.supervise.process import Ending
from pooler.supervise.reloading import merge_reload
from pooler.supervise.run_dir import RunDir, RunDirRefused
from pooler.supervise.sockets import FleetSockets, PortRefused
from tests.supervisor.conftest import SmallFleet


def test_back_off_doubles_from_100_ms_up_to_5_s() -> None:
    deaths, now, delays = Deaths(), 0.0, []
    for _ in range(9):
        now += 20  # too rare to stay down
        delays.append(deaths.died(now, 20))
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_after_five_deaths_within_a_minute_a_try_each_half_minute_goes_on_for_ever() -> None:
    deaths = Deaths()
    delays = [deaths.died(float(second), 0) for second in range(DEATHS_MAX)]
    assert delays == [0.1, 0.2, 0.4, 0.8, DOWN_RETRY_SECONDS]
    for number in range(1, 100):  # rarely enough for the window, and still too often
        assert deaths.died(number * DOWN_RETRY_SECONDS, 1.0) == DOWN_RETRY_SECONDS
        assert deaths.too_often


@pytest.mark.parametrize("pardoned", [True, False])
def test_a_pardon_or_a_long_life_ends_the_rare_tries(pardoned: bool) -> None:
    deaths = Deaths()
    for second in range(DEATHS_MAX):
        deaths.died(float(second), 0)
    if pardoned:
        deaths.forgive()
    assert deaths.died(200.0, 0 if pardoned else 190.0) == 0.1
    assert not deaths.too_often
    assert deaths.total == 6


def test_a_long_life_ends_the_back_off() -> None:
    deaths = Deaths()
    assert [deaths.died(0, 0), deaths.died(1, 1), deaths.died(100, 99)] == [0.1, 0.2, 0.1]


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (Ending(0, None, 0), "exit code 0"),
        (Ending(None, 9, 0), "signal 9"),
        (Ending(137, None, 1), "exit code 137"),
        (Ending(None, 9, 1), "signal 9 (out of memory: the kernel killed it)"),
    ],
)
def test_out_of_memory_is_said_only_of_a_kill_that_the_cgroup_counted(ending: Ending, text: str) -> None:
    assert str(ending) == text


@pytest.fixture
def settings(small_fleet: SmallFleet) -> Settings:
    return load(small_fleet.config)


def test_a_reload_takes_pools_and_databases_and_names_what_must_wait(
    small_fleet: SmallFleet, settings: Settings
) -> None:
    small_fleet.write(
        fleet={"listen": "127.0.0.1:1", "drain_timeout": "9s"},
        services={"primary": {"worker_ports": 9, "database_role": "write", "pool_mode": "session"}},
        pool={"default_pool_size": 3},
        http={"listen": "127.0.0.1:2"},
    )
    merged, waiting = merge_reload(settings, load(small_fleet.config))
    assert merged.pool.default_pool_size == 3
    assert merged.fleet.drain_timeout_seconds == 9
    assert merged.services["primary"].pool_mode == "session"
    assert merged.services["primary"].worker_ports == settings.services["primary"].worker_ports
    assert (merged.fleet.listen, merged.http) == (settings.fleet.listen, settings.http)
    assert [line.split()[0] for line in waiting] == ["fleet.listen", "services.primary.worker_ports", "http"]


def test_an_unchanged_config_has_nothing_that_waits(settings: Settings) -> None:
    assert merge_reload(settings, settings) == (settings, [])


@pytest.fixture
def boot(tmp_path: Path) -> Boot:
    """This very process, as a boot."""
    ExitFiles(tmp_path).note_boot("b", "worker", 0, os.getpid())
    [boot] = ExitFiles(tmp_path).left_over()
    return replace(boot, machine=boot.machine or "m")


def test_a_running_process_is_not_gone(boot: Boot) -> None:
    assert how_it_is_gone(boot) is None


def test_a_pid_in_use_by_another_process_is_gone(boot: Boot) -> None:
    assert how_it_is_gone(replace(boot, pid_start=boot.pid_start - 1)) == "gone when the supervisor started"


def test_a_process_waited_for_is_gone_and_a_zombie_too(boot: Boot, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ExitFiles(tmp_path).note_boot("c", "worker", 1, child.pid)
    [other] = [each for each in ExitFiles(tmp_path).left_over() if each.boot_id == "c"]
    assert how_it_is_gone(other) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
    assert how_it_is_gone(other) is not None
    child.communicate()
    assert how_it_is_gone(other) is not None


@pytest.mark.parametrize("change", [{"pid_namespace": "pid:[1]"}, {"kernel_boot": "x", "machine": "other"}])
def test_what_cannot_be_looked_at_is_never_called_dead(boot: Boot, change: dict[str, Any]) -> None:
    assert how_it_is_gone(replace(boot, pid=1 << 22, **change)) is None


def test_another_boot_of_the_same_machine_proves_it(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooler.supervise.exits.machine_id", lambda: boot.machine)
    assert how_it_is_gone(replace(boot, kernel_boot="x")) == "the machine booted anew"
    monkeypatch.setattr("pooler.supervise.exits.machine_id", lambda: "")
    assert how_it_is_gone(replace(boot, kernel_boot="x", machine="")) is None


def test_a_noted_exit_stays_until_it_is_forgotten(tmp_path: Path) -> None:
    files = ExitFiles(tmp_path)
    files.note_boot("b", "worker", 0, os.getpid())
    noted = files.note_exit("b", "signal 9")
    assert ExitFiles(tmp_path).unreported() == [noted]
    assert files.left_over() == []
    files.forget("b")
    assert (files.unreported(), files.left_over()) == ([], [])


def test_a_damaged_note_is_dropped_and_the_others_are_read(tmp_path: Path) -> None:
    files = ExitFiles(tmp_path)
    noted = files.note_exit("b", "signal 9")
    for name, content in (("x", "{"), ("y", "[1]"), ("z", '{"a": 1}')):
        (tmp_path / "exits" / name).write_text(content)
    assert files.unreported() == [noted]


def test_a_run_dir_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(RunDirRefused, match="writable by no other"):
        RunDir.take(tmp_path, "f")


def test_a_run_dir_is_free_again_after_its_holder_closed_it(tmp_path: Path) -> None:
    RunDir.take(tmp_path / "run", "one").close()
    RunDir.take(tmp_path / "run", "two").close()


def test_a_stale_unix_socket_is_taken_over_and_a_live_one_is_not(settings: Settings) -> None:
    assert settings.fleet.unix_socket_dir is not None
    path = settings.fleet.unix_socket_dir / f".s.PGSQL.{settings.fleet.listen[0].port}"
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(path))
        FleetSockets.open(settings).close()  # bound, but nobody listens
        holder_of_new = socket.socket(socket.AF_UNIX)
        holder_of_new.bind(str(path))
        holder_of_new.listen()
        with holder_of_new, pytest.raises(PortRefused, match=r"unix_socket_dir .* already in use"):
            FleetSockets.open(settings)


def test_an_address_that_is_not_this_hosts_names_the_setting(settings: Settings) -> None:
    elsewhere = settings.fleet.model_copy(update={"listen": (Address("192.0.2.1", 6432),)})
    with pytest.raises(PortRefused, match=r"^fleet\.listen 192\.0\.2\.1:6432: "):
        FleetSockets.open(settings.model_copy(update={"fleet": elsewhere}))
