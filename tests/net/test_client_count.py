"""One count of clients for all workers of a host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pooler.net.client_count import ClientCount

OTHER = """
import sys
from pathlib import Path
from pooler.net.client_count import ClientCount
count = ClientCount(Path(sys.argv[1]))
assert all(count.enter(100) for _ in range(3))
print("counted", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_worker(path: Path) -> Iterator[None]:
    """Another process with three clients; it is killed at the end."""
    child = subprocess.Popen([sys.executable, "-c", OTHER, str(path)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "counted\n"
        yield
        child.kill()


def test_what_is_counted_are_the_clients_of_all_workers_that_live(tmp_path: Path) -> None:
    path = tmp_path / "clients.cnt"
    count = ClientCount(path)
    assert count.enter(100)
    with other_worker(path):
        assert (count.total(), count.total_alive()) == (4, 4)
        assert not count.enter(4)
    assert (count.total(), count.total_alive(), count.total()) == (4, 1, 1)
    count.close()
