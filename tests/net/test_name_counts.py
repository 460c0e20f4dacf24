"""Clients of one name are counted over all workers of a host, and a worker that died counts no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pooler.net import name_counts
from pooler.net.name_counts import NameCounts

OTHER = """
import sys
from pathlib import Path
from pooler.net.name_counts import NameCounts
counts = NameCounts(Path(sys.argv[1]))
assert all(counts.enter(b"a", 100) for _ in range(3))
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_limit_holds_over_processes_until_one_dies(tmp_path: Path) -> None:
    path = tmp_path / "names"
    counts = NameCounts(path)
    with subprocess.Popen([sys.executable, "-c", OTHER, str(path)], text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        assert counts.enter(b"a", 4)
        assert not counts.enter(b"a", 4)
        assert counts.enter(b"b", 1)
        assert counts.total(b"a") == 4
        other.kill()
    assert counts.enter(b"a", 4)
    assert counts.total(b"a") == 2
    counts.close()


def test_who_leaves_makes_room_and_no_limit_is_none() -> None:
    counts = NameCounts()
    assert all(counts.enter(b"a", 0) for _ in range(50))
    assert not counts.enter(b"a", 50)
    counts.leave(b"a")
    assert counts.enter(b"a", 50)


def test_names_that_come_and_go_leave_nothing_and_take_each_others_places(tmp_path: Path) -> None:
    """R73: many more names than there is room for, one after the other, and some that stay."""
    one, two = NameCounts(tmp_path / "names"), NameCounts()
    staying = [b"stays %d" % number for number in range(100)]
    for name in staying:
        one.enter_always(name)
    for number in range(3 * name_counts.ENTRIES):
        one.enter_always(b"%d" % number)
        one.leave(b"%d" % number)
    assert len(one._own) == 100
    two._map, two._fd, two._slot = one._map, one._fd, one._slot + 1  # as another process sees them
    assert [two.total(name) for name in staying] == [1] * 100
    assert two.total(b"5") == 0
    two._map = None
    one.close()
