"""What stands in etcd can be read by one command, and its page names every key."""

from __future__ import annotations

import base64
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from coordinator.ledger.decode import FAMILIES, decode
from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import Kind, Receipt
from coordinator.store.api import Put, Txn
from coordinator.store.etcd import open_etcd
from pooler.demo.etcd import Etcd
from tests.ledger.ground import KEYS, NOW_US, ask, found, register, session
from tests.support.need import missing

PAGE = Path(__file__).parents[2] / "docs" / "etcd-layout.md"
ARGUMENTS: dict[str, Any] = {"kind": Kind.MAIN, "host": "h", "dbname": "d", "user": "u"}


def keys_of(keys: FleetKeys | DbKeys) -> dict[str, str]:
    """Every key and prefix that these spell, by the method's name."""
    spelt: dict[str, str] = {}
    named = [name for name in dir(keys) if not name.startswith("_") and name not in ("db", "under")]
    for name, method in ((name, getattr(keys, name)) for name in named):
        if inspect.ismethod(method):
            parameters = inspect.signature(method).parameters
            spelt[name] = method(*(ARGUMENTS.get(each, 1 if "int" in str(of.annotation) else "x")
                                   for each, of in parameters.items()))
    return spelt


@pytest.mark.parametrize("keys", [FleetKeys("pooler", "f"), FleetKeys("pooler", "f").db("d")])
def test_page_and_command_know_every_key(keys: FleetKeys | DbKeys) -> None:
    spelt = keys_of(keys)
    assert len(spelt) > 9
    page = PAGE.read_text()
    for name, key in spelt.items():
        if not key.startswith(keys.root):  # of a key, and none itself
            continue
        family = key.removeprefix(keys.root).partition("/")[0]
        assert family in FAMILIES, name
        assert f"| `{family}/" in page or f"| `{family}`" in page, name


def answer(*kvs: tuple[str, bytes, int]) -> dict[str, Any]:
    return {"kvs": [{"key": base64.b64encode(key.encode()).decode(),
                     "value": base64.b64encode(value).decode(),
                     "create_revision": revision, "mod_revision": revision} for key, value, revision in kvs]}


def test_the_permit_of_a_session_and_of_a_receipt_is_worked_out() -> None:
    new, old = session(generation=0), session(generation=7)
    rebuilt, voided = Receipt(Kind.MAIN, 3, base=1_000), Receipt(Kind.MAIN, -1, voided=True)
    shown = list(decode(answer(
        (KEYS.session(Kind.MAIN, 0), new.encode(), 12), (KEYS.session(Kind.MAIN, 0), old.encode(), 12),
        (KEYS.receipt("r"), rebuilt.encode(), 12), (KEYS.receipt("v"), voided.encode(), 3))))
    assert [each.get("permit") for each in shown] == ["main/0.12", "main/0.7", "main/3.1012", None]


def test_what_is_not_a_record_is_shown_as_it_is() -> None:
    shown = list(decode(answer(("/pooler/f/freed/d", b"", 2), ("/pooler/f/drain/d", b"\xc1promotes", 2),
                               ("/pooler/f/later/d", b"\x01", 2), ("/other", b"x", 2))))
    assert [each["value"] for each in shown] == [None, "\\xc1promotes", 1, 120]
    assert [each["is"] for each in shown][2:] == ["not known to this version"] * 2


@pytest.mark.parametrize("document", ["[]", "{", '{"kvs": 7}', '{"kvs": [{"value": ""}]}'])
def test_what_etcdctl_never_says_is_refused(document: str) -> None:
    done = subprocess.run([sys.executable, "-m", "coordinator.ledger.decode"], input=document, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("decode: ")


def test_nothing_on_stdin_is_refused_with_what_to_pipe_into_it() -> None:
    done = subprocess.run([sys.executable, "-m", "coordinator.ledger.decode"], input=" \n", text=True,
                          capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing came on stdin" in done.stderr


def test_a_reader_that_has_enough_is_no_fault() -> None:
    kv = {"key": base64.b64encode(b"/pooler/f/freed/d").decode(), "value": ""}
    done = subprocess.run(f"{sys.executable} -m coordinator.ledger.decode | head -n 1", shell=True, text=True,
                          input=json.dumps({"kvs": [kv] * 5_000}), capture_output=True, check=False)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.etcd
async def test_the_command_of_the_page_reads_a_real_ledger(etcd: Etcd, etcd_prefix: str) -> None:
    etcdctl = shutil.which("etcdctl")
    if etcdctl is None:
        missing("the page's command needs etcdctl")
    fleet = FleetKeys(etcd_prefix, "test")
    there, keyspace = fleet.db("orders/write"), found()
    register(keyspace, "A")
    async with open_etcd(etcd.endpoints) as store:
        puts = [Put(fleet.root + key.removeprefix("/pooler/test/"), entry.value)
                for key, entry in keyspace.entries.items()]
        await store.txn(Txn(puts=tuple(puts)))
        # the worker's key has no lease here, so that the receipt is on none either
        granted = await Ledger(store, there, fleet, lambda: NOW_US).reserve(ask("r1"))
    command = next(line for line in PAGE.read_text().splitlines() if line.startswith("etcdctl get"))
    line = command.replace("/pooler/FLEET/", fleet.root).replace("python", sys.executable).replace(
        "etcdctl", f"{etcdctl} --endpoints {etcd.endpoints[0]}", 1)
    done = await trio.run_process(line, shell=True, capture_stdout=True)
    shown = [json.loads(each) for each in done.stdout.decode().splitlines()]
    assert len(shown) == len(puts) + 3
    [permit] = [each["permit"] for each in shown if "/session/" in each["key"]]
    assert permit == str(granted.permit)  # type: ignore[union-attr]
    [given] = [each["permit"] for each in shown if "/receipt/" in each["key"]]
    assert given == permit
