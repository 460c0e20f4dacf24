"""The worker as a process: what ends it, and what must not."""

from __future__ import annotations

import socket
import subprocess
import sys


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
