"""What this host saw of each ledger: whole or absent after any end, and never silently forgotten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.ledger.access import Seen
from coordinator.remembered import FILE_NAME, POLICIES_NAME, MemoryUnreadable, Remembered

SEEN = {"shop/write": Seen("abc", 7)}


def test_what_was_saved_is_known_to_the_next_life(tmp_path: Path) -> None:
    Remembered(tmp_path).save(SEEN)
    assert Remembered(tmp_path).seen("shop/write") == Seen("abc", 7)
    assert Remembered(tmp_path).seen("other/write") == Seen()


@pytest.mark.parametrize("content", [
    b"", b'{"shop/write": ["ab', b"[]", b'{"shop/write": []}', b'{"shop/write": 7}', b'{"a": ["x", "y"]}',
    b"\xff",
])
def test_a_file_that_says_nothing_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(MemoryUnreadable, match=f"{tmp_path / FILE_NAME} cannot be read"):
        Remembered(tmp_path)


def test_the_text_is_on_disk_before_its_name_and_the_name_before_it_counts_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        done.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}")

    def rename(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(f"rename {target}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    Remembered(tmp_path).save(SEEN)
    path = tmp_path / FILE_NAME
    assert done == [f"sync {path.with_suffix('.new')}", f"rename {path}", f"sync {tmp_path}"]


def test_a_disk_that_refuses_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Remembered(tmp_path)
    memory.save(SEEN)

    def fsync(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        memory.save({"shop/write": Seen("abc", 9)})
    assert Remembered(tmp_path).seen("shop/write") == Seen("abc", 7)
    monkeypatch.undo()
    memory.save({"shop/write": Seen("abc", 9)})
    assert Remembered(tmp_path).seen("shop/write") == Seen("abc", 9)


def test_the_policy_that_granted_is_known_to_the_next_life_and_replaces_an_earlier_one(
    tmp_path: Path
) -> None:
    known = Remembered(tmp_path)
    known.keep_policy("shop/write", 1, b"\x81one")
    known.keep_policy("other/write", 3, b"three")
    known.keep_policy("shop/write", 2, b"\xfftwo")
    again = Remembered(tmp_path)
    assert (again.policy("shop/write"), again.policy("other/write")) == ((2, b"\xfftwo"), (3, b"three"))
    assert again.policy("new/write") is None


@pytest.mark.parametrize("content", [b"", b"[]", b'{"shop/write": 7}', b'{"shop/write": [1]}', b"\xff",
                                     b'{"shop/write": ["x", "y"]}', b'{"shop/write": [1, "y"]}'])
def test_a_policy_that_cannot_be_read_is_not_known_and_stops_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / POLICIES_NAME).write_bytes(content)
    assert Remembered(tmp_path).policy("shop/write") is None
