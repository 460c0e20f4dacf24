"""The worker as a process: what ends it, and what must not."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from coordinator.link import Args, Link
from pooler.settings import load

CONFIG = """
fleet: {name: o, run_dir: run}
etcd: {endpoints: ["127.0.0.1:2379"]}
auth: {type: md5, file: users}
databases: {o: {hosts: ["127.0.0.1:5432"], policy: o.yaml}}
"""


def test_a_worker_whose_supervisor_dies_before_it_says_what_to_be_ends() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "pooler.worker", "--link-fd", str(theirs.fileno())]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with ours:
        assert ours.recv(1)  # it asks for its specification
    try:
        assert worker.wait(timeout=10) == 0
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(("damage", "code", "why"), [
    (lambda folder: (folder / "users").write_text('"a" "b"\na b\n"c"\n'), 2, ["users:2: ", "users:3: "]),
    (lambda folder: (folder / "users").unlink(), 2, ["users: cannot be read: No such file"]),
    (lambda folder: (folder / "run/clients.cnt").mkdir(), 1, ["Is a directory", "run/clients.cnt"]),
])
async def test_a_worker_that_cannot_start_says_why_in_one_line_and_ends(
    tmp_path: Path, damage: Callable[[Path], object], code: int, why: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "users").write_text('"a" "b"\n')
    (tmp_path / "o.yaml").write_text("schema: dbAdmissionPolicy.v1\ndatabase: o/write\n")
    (tmp_path / "pooler.yaml").write_text(CONFIG)
    settings = load(tmp_path / "pooler.yaml")
    damage(tmp_path)

    async def spec(args: Args) -> Args:
        return {"config": settings.to_wire(), "index": 0, "boot_id": "b" * 32, "workers": 1,
                "coordinator_socket": str(tmp_path / "none.sock"), "listen": [], "services": {}, "unix": []}

    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "pooler.worker", "--link-fd", str(theirs.fileno())]
        worker = subprocess.Popen(  # noqa: ASYNC220 - blocks for the fork only
            command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    link = Link(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), {"spec": spec})
    with worker, trio.fail_after(20):
        await link.run()  # until it has ended
        said, _ = worker.communicate()
    lines = [json.loads(line) for line in said.decode().splitlines()]
    assert [line["what"] for line in lines] == ["the worker cannot start"]
    assert all(part in lines[0]["why"] for part in why)
    assert "fleet reload" in lines[0]["hint"]
    assert worker.returncode == code
