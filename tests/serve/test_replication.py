"""Which server a replication connection is for, and when it has to go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.ledger.record import EpochState
from pooler.admission.classes import Classes
from pooler.errors import LoginRefused
from pooler.pool.ledger_view import LedgerView
from pooler.serve.cancelling import cancel_address
from pooler.serve.registry import Registry
from pooler.serve.replication import entry_for
from pooler.settings import Settings
from pooler.wire.startup import Replication


def settings(*names: str, **fleet: Any) -> Settings:
    """A config with these databases; `_read` in a name makes it one for reading, `other` another cluster."""
    def entry(name: str) -> dict[str, Any]:
        cluster = "other" if "other" in name else "shop"
        role = "read" if "_read" in name else "write"
        return {"hosts": ["10.0.0.1:5432"], "role": role,
                "policy": {"path": "p.yaml", "text": "", "database": f"{cluster}/{role}"}}

    return Settings.from_wire({
        "fleet": {"name": "f", "run_dir": "/nowhere", **fleet}, "etcd": {"endpoints": ["127.0.0.1:2379"]},
        "databases": {name: entry(name) for name in names},
        "services": {"replicas": {"worker_ports": 7000, "database_role": "read"}}})


def asked(database: str, kind: Replication = Replication.PHYSICAL) -> Any:
    return SimpleNamespace(database=database, replication=kind)


@pytest.mark.parametrize(("names", "database", "service", "found"), [
    (("shop",), "replication", None, "shop"),  # what libpq says where no database is named
    (("shop", "crm"), "replication", None, "shop"),  # two databases of one cluster
    (("shop", "shop_read"), "replication", None, "shop"),
    (("shop", "shop_read"), "replication", "replicas", "shop_read"),
    (("shop", "*"), "replication", None, "shop"),  # not a database of that name
    (("shop", "replication"), "replication", None, "replication"),
    (("shop", "other"), "other", None, "other"),
    (("shop",), "nowhere", None, "shop"),  # physical replication is of the cluster
])
def test_physical_replication_finds_the_cluster(
    names: tuple[str, ...], database: str, service: str | None, found: str
) -> None:
    assert entry_for(settings(*names), asked(database), service) == found


def test_between_several_clusters_the_client_has_to_choose() -> None:
    with pytest.raises(LoginRefused, match="other, shop"):
        entry_for(settings("shop", "other"), asked("replication"), None)


def test_logical_replication_is_of_a_database() -> None:
    place = settings("shop", "other")
    assert entry_for(place, asked("shop", Replication.LOGICAL), None) == "shop"
    assert entry_for(place, asked("replication", Replication.LOGICAL), None) is None
    assert entry_for(place, asked("other", Replication.NONE), None) == "other"


def view(epoch: int, state: EpochState = EpochState.ACTIVE, *, reachable: bool = True) -> LedgerView:
    return LedgerView("shop/write", epoch=epoch, epoch_state=state, reachable=reachable)


@pytest.mark.parametrize(("heard", "ended"), [
    (view(3), False), (view(3, reachable=False), False), (view(3, EpochState.DRAINING), True),
    (view(4), True)])
def test_it_ends_when_another_server_takes_over_and_not_when_the_ledger_is_away(
    heard: LedgerView, ended: bool
) -> None:
    words: list[str] = []
    client: Any = SimpleNamespace(
        plan=SimpleNamespace(ledger="shop/write"), opened=SimpleNamespace(epoch=3),
        break_off=lambda sqlstate, text: words.append(sqlstate))
    other: Any = SimpleNamespace(plan=SimpleNamespace(ledger="other/write"))
    parts: Any = SimpleNamespace(classes=Classes())
    registry = Registry(settings("shop"), parts, replications={b"one": client, b"two": other})
    registry.ledger_changed(heard)
    assert words == (["57P01"] if ended else [])


@pytest.mark.parametrize(("fleet", "address"), [
    ({"listen": ["10.0.0.5:6432"]}, "10.0.0.5:6432"),
    ({"listen": ["127.0.0.1:6432", "10.0.0.5:6433"]}, "10.0.0.5:6433"),
    ({"listen": ["127.0.0.1:6432"]}, "127.0.0.1:6432"),
    ({"listen": ["[fd00::5]:6432"]}, "[fd00::5]:6432"),
    ({"listen": ["10.0.0.5:6432"], "cancel_address": "pooler-a.example:7000"}, "pooler-a.example:7000"),
])
def test_other_hosts_are_told_an_address_that_they_reach(fleet: dict[str, Any], address: str) -> None:
    assert cancel_address(settings("shop", **fleet)) == address


def test_who_listens_everywhere_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooler.serve.cancelling.host_name", lambda: "pooler-b")
    assert cancel_address(settings("shop", listen=["0.0.0.0:6432"])) == "pooler-b:6432"
