"""The supervisor with real processes: what dies comes back, no process is left over, nobody is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest
import trio

from coordinator.link import LinkLost
from pooler.demo.process import has_ended, started_at
from tests.supervisor.conftest import FACT_SECONDS_MAX, SmallFleet


async def test_a_killed_worker_comes_back_and_its_exit_reaches_the_coordinator(
    small_fleet: SmallFleet,
) -> None:
    await small_fleet.up()
    before = (await small_fleet.rows())["worker 0"]
    os.kill(before["pid"], signal.SIGKILL)
    gone = await small_fleet.saw("process_exited", process="worker 0")
    assert gone["how"] == "signal 9"
    await small_fleet.saw("process_ready", process="worker 0")
    after = (await small_fleet.rows())["worker 0"]
    assert after["pid"] != before["pid"]
    assert after["boot_id"] != before["boot_id"]
    assert (after["deaths"], after["last_exit"]) == (1, "signal 9")
    await all_reported(small_fleet)
    [told] = small_fleet.told("worker_exited")
    assert (told["boot_id"], told["how"]) == (before["boot_id"], "signal 9")


async def test_nobody_is_refused_while_every_worker_is_dead(small_fleet: SmallFleet) -> None:
    await small_fleet.up()
    rows = await small_fleet.rows()
    for name in ("worker 0", "worker 1"):
        os.kill(rows[name]["pid"], signal.SIGSTOP)  # neither accepts from here on
    ports = (small_fleet.port, small_fleet.services, small_fleet.services + 1)
    answers: list[int] = []

    async def ask(port: int) -> None:
        async with small_fleet.client(port) as pid:
            answers.append(pid)

    async with trio.open_nursery() as nursery:
        for port in ports * 3:
            nursery.start_soon(ask, port)
        await trio.testing.wait_all_tasks_blocked()
        for name in ("worker 0", "worker 1"):
            os.kill(rows[name]["pid"], signal.SIGKILL)
    assert len(answers) == 9
    assert not {rows["worker 0"]["pid"], rows["worker 1"]["pid"]} & set(answers)


async def test_a_killed_coordinator_comes_back_alone(small_fleet: SmallFleet) -> None:
    await small_fleet.up()
    before = await small_fleet.rows()
    os.kill(before["coordinator"]["pid"], signal.SIGKILL)
    await small_fleet.saw("process_ready", process="coordinator")
    after = await small_fleet.rows()
    assert after["coordinator"]["pid"] != before["coordinator"]["pid"]
    assert all(after[name]["pid"] == before[name]["pid"] for name in ("worker 0", "worker 1"))
    assert small_fleet.told("worker_exited") == []


async def test_an_exit_that_no_coordinator_could_take_is_told_to_the_next_one(
    small_fleet: SmallFleet,
) -> None:
    await small_fleet.up()
    rows = await small_fleet.rows()
    (small_fleet.folder / "die-coordinator").touch()
    os.kill(rows["coordinator"]["pid"], signal.SIGKILL)
    await small_fleet.saw("process_exited", process="coordinator")
    os.kill(rows["worker 1"]["pid"], signal.SIGKILL)
    await small_fleet.saw("process_exited", process="worker 1")
    note = small_fleet.folder / "run/exits" / rows["worker 1"]["boot_id"]
    assert json.loads(note.read_text())["how"] == "signal 9"
    (small_fleet.folder / "die-coordinator").unlink()
    await small_fleet.command("reload")  # in case it stays down by now
    await small_fleet.saw("process_ready", process="coordinator")
    await all_reported(small_fleet)
    assert [told["boot_id"] for told in small_fleet.told("worker_exited")] == [rows["worker 1"]["boot_id"]]
    assert not note.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
async def test_no_process_survives_the_supervisors_death(
    small_fleet: SmallFleet, how: signal.Signals
) -> None:
    (
        small_fleet.folder / "deaf-worker-1"
    ).touch()  # it does not look at its link: only the kernel can tell it
    small_fleet.start()
    await small_fleet.saw("deaf")
    pids = [row["pid"] for row in (await small_fleet.command("status"))["processes"]]
    assert len(pids) == 3
    pidfds = [os.pidfd_open(pid) for pid in pids]
    os.kill(small_fleet.pid, how)
    assert all(has_ended(pidfd, FACT_SECONDS_MAX) for pidfd in pidfds)
    for pidfd in pidfds:
        os.close(pidfd)
    assert await small_fleet.ended() == -how


async def test_the_next_supervisor_reports_the_workers_of_a_killed_one(small_fleet: SmallFleet) -> None:
    await small_fleet.up()
    boots = {row["boot_id"] for name, row in (await small_fleet.rows()).items() if name != "coordinator"}
    os.kill(small_fleet.pid, signal.SIGKILL)
    await small_fleet.ended()
    await small_fleet.up()  # also: the ports are free at once
    await all_reported(small_fleet)
    told = small_fleet.told("worker_exited")
    assert {each["boot_id"] for each in told} == boots
    assert {each["how"] for each in told} == {"gone when the supervisor started"}


async def test_five_deaths_in_a_minute_keep_a_place_down_and_the_others_go_on(
    small_fleet: SmallFleet,
) -> None:
    (small_fleet.folder / "die-worker-1").touch()
    await small_fleet.up()
    assert [line for line in small_fleet.log if line["event"] == "process_kept_down"]
    row = (await small_fleet.rows())["worker 1"]
    assert (row["state"], row["deaths"], row["last_exit"]) == ("down", 5, "exit code 7")
    async with small_fleet.client() as pid:
        assert pid == await small_fleet.pid_of("worker 0")
    (small_fleet.folder / "die-worker-1").unlink()
    await small_fleet.command("reload")
    await small_fleet.saw("process_ready", process="worker 1")


@pytest.mark.parametrize("name", ["coordinator", "worker 1"])
async def test_what_died_too_often_comes_back_by_itself_once_its_fault_has_passed(
    small_fleet: SmallFleet, name: str
) -> None:
    fault = small_fleet.folder / f"die-{name.replace(' ', '-')}"
    fault.touch()
    await small_fleet.up(DOWN_RETRY_SECONDS="0.5")
    told = next(line for line in small_fleet.log if line["event"] == "process_kept_down")
    assert (told["process"], told["level"], told["next_try_seconds"]) == (name, "error", 0.5)
    await small_fleet.saw("process_kept_down", process=name)  # said at each death, not once
    fault.unlink()
    await small_fleet.saw("process_ready", process=name)
    assert (await small_fleet.rows())[name]["state"] == "ready"


async def test_a_port_in_use_is_one_clear_line_and_no_child_is_started(small_fleet: SmallFleet) -> None:
    with socket.create_server(("127.0.0.1", small_fleet.services + 1)):
        small_fleet.start()
        assert await small_fleet.ended() == 1
    [line] = small_fleet.log
    assert line["text"] == (
        f"services.primary.worker_ports 127.0.0.1:{small_fleet.services + 1}: already in use by "
        "another process: stop it, or name another port"
    )


async def test_a_second_fleet_in_the_same_run_dir_is_refused_and_the_first_goes_on(
    small_fleet: SmallFleet,
) -> None:
    await small_fleet.up()
    second = SmallFleet(small_fleet.folder)  # other ports, same run_dir
    second.start()
    assert await second.ended() == 1
    assert second.log[-1]["text"].endswith(
        f"is in use by fleet small (pid {small_fleet.pid}): stop it, or set another run_dir"
    )
    second.close()
    async with small_fleet.client():
        pass


async def test_a_bad_config_is_refused_at_reload_and_a_good_one_reaches_the_children(
    small_fleet: SmallFleet,
) -> None:
    await small_fleet.up()
    small_fleet.write(pool={"default_pool_size": "many"})
    os.kill(small_fleet.pid, signal.SIGHUP)
    refused = await small_fleet.saw("config_refused")
    assert any('"many" must be a whole number' in problem for problem in refused["problems"])
    assert (await small_fleet.command("reload"))["refused"] is True
    await trio.Path(small_fleet.folder / "users").write_text("rubbish")
    small_fleet.write(auth={"type": "scram-sha-256", "file": "users"})
    refused = await small_fleet.command("reload")
    assert refused["refused"] is True
    assert any("users:1: " in problem for problem in refused["problems"])
    small_fleet.write(pool={"default_pool_size": 7}, fleet={"workers": 3})
    answer = await small_fleet.command("reload")
    assert answer == {
        "refused": False,
        "problems": ["fleet.workers changed: it keeps its old value until the fleet is restarted"],
        "warnings": ["coordinator: the policy differs"],
    }
    assert small_fleet.told("reload").count(7) == 2


async def test_a_rolling_restart_replaces_every_worker_and_refuses_nobody(small_fleet: SmallFleet) -> None:
    await small_fleet.up()
    before = await small_fleet.rows()
    rolled: dict[str, object] = {}

    async def roll() -> None:
        rolled.update(await small_fleet.command("restart_rolling", timeout_seconds=15))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(roll)
        while not rolled:
            async with small_fleet.client():
                pass
    assert rolled["code"] == 0
    after = await small_fleet.rows()
    assert after["coordinator"]["pid"] == before["coordinator"]["pid"]
    assert not {before[n]["pid"] for n in ("worker 0", "worker 1")} & {row["pid"] for row in after.values()}


async def test_a_rolling_restart_stops_at_a_worker_whose_clients_stay_and_names_them(
    small_fleet: SmallFleet,
) -> None:
    await small_fleet.up()
    before = await small_fleet.rows()
    async with small_fleet.client(small_fleet.services) as pid:
        assert pid == before["worker 0"]["pid"]
        rolled = await small_fleet.command("restart_rolling", timeout_seconds=1.5)
        assert rolled["code"] == 4
        assert f"pid {pid} is still held after 1.5 s (1 clients): client 0" in rolled["text"]
        after = await small_fleet.rows()
        assert after["worker 0"]["pid"] != pid
        assert after["worker 1"]["pid"] == before["worker 1"]["pid"]
        assert started_at(pid), "the old worker serves its client on"
    gone = await small_fleet.saw("process_exited", pid=before["worker 0"]["pid"])
    assert gone["how"] == "exit code 0"


async def test_a_rolling_restart_that_meets_a_stop_starts_no_further_worker(small_fleet: SmallFleet) -> None:
    await small_fleet.up()
    rolled: dict[str, object] = {}

    async def roll() -> None:
        try:
            rolled.update(await small_fleet.command("restart_rolling", timeout_seconds=15))
        except* LinkLost:
            pass

    async with trio.open_nursery() as nursery:
        async with small_fleet.client(small_fleet.services):
            nursery.start_soon(roll)
            await small_fleet.saw("process_ready", process="worker 0")  # its replacement; the old one is held
            os.kill(small_fleet.pid, signal.SIGTERM)
            await small_fleet.saw("fleet_stopping")
        await small_fleet.ended()
    events = [line["event"] for line in small_fleet.log if "event" in line]
    assert "process_started" not in events[events.index("fleet_stopping"):]
    assert rolled.get("code", 1) == 1


async def test_a_replacement_that_does_not_come_up_leaves_the_old_worker_serving(
    small_fleet: SmallFleet,
) -> None:
    await small_fleet.up()
    before = await small_fleet.rows()
    (small_fleet.folder / "die-worker-0").touch()
    rolled = await small_fleet.command("restart_rolling", timeout_seconds=10)
    assert rolled["code"] == 1
    assert "did not come up (exit code 7)" in rolled["text"]
    assert (await small_fleet.rows())["worker 0"]["pid"] == before["worker 0"]["pid"]


async def test_sigterm_lets_clients_finish_before_the_fleet_ends(small_fleet: SmallFleet) -> None:
    await small_fleet.up()
    async with small_fleet.client() as pid:
        os.kill(small_fleet.pid, signal.SIGTERM)
        await small_fleet.saw("fleet_stopping")
        assert started_at(pid)
        assert (await small_fleet.command("status"))["state"] == "stopping"
    assert await small_fleet.ended() == 0
    assert sorted(small_fleet.told("stop")) == ["coordinator", "worker-0", "worker-1"]
    assert small_fleet.told("stop")[-1] == "coordinator", "it takes the workers' last reports"
    assert len(small_fleet.told("worker_exited")) == 2
    assert files_in(small_fleet.folder / "run") == {"lock"}
    assert not [name for name in files_in(small_fleet.folder) if name.startswith(".s.PGSQL.")]


async def test_sigint_does_not_wait_for_clients(small_fleet: SmallFleet) -> None:
    await small_fleet.up()
    async with small_fleet.client():
        os.kill(small_fleet.pid, signal.SIGINT)
        assert await small_fleet.ended() == 0
    assert len(small_fleet.told("stop")) == 3


async def test_a_second_signal_ends_everything_at_once(small_fleet: SmallFleet) -> None:
    await small_fleet.up()
    async with small_fleet.client():
        os.kill(small_fleet.pid, signal.SIGTERM)
        await small_fleet.saw("fleet_stopping")
        os.kill(small_fleet.pid, signal.SIGTERM)
        assert await small_fleet.ended() == 0
    assert small_fleet.told("stop").count("coordinator") == 0


async def test_systemd_is_told_ready_and_stopping(
    small_fleet: SmallFleet, notified: tuple[str, socket.socket]
) -> None:
    address, listener = notified
    await small_fleet.up(NOTIFY_SOCKET=address)
    assert listener.recv(100) == b"READY=1"
    await small_fleet.command("stop", drain=False)
    assert listener.recv(100) == b"STOPPING=1"
    assert await small_fleet.ended() == 0


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if not path.is_dir()}


async def all_reported(fleet: SmallFleet) -> None:
    """Wait until the ledger has every exit (the answer of a status comes after a turn of the supervisor)."""
    with trio.fail_after(FACT_SECONDS_MAX):
        while (await fleet.command("status"))["unreported_exits"]:
            await trio.lowlevel.checkpoint()
