"""What is done by the clock: each rule acts past its limit, on nobody else, and not at all when it is off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pooler.pool import janitor
from pooler.pool.pool import Pool
from pooler.relay import owed as o

IDLE, IN_TRANSACTION = 0x49, 0x54


class Someone:
    """A client: remembers what it was told."""

    def __init__(self, **more: Any) -> None:
        self.server: Any = None
        self.ticket = SimpleNamespace(waiting=False)
        self.requested_at = self.idle_since = 0.0
        self.told: list[str] = []
        self.__dict__.update(more)

    def break_off(self, sqlstate: str, text: str) -> None:
        self.told.append(sqlstate)


class Session:
    """A session in use."""

    def __init__(self, client: Someone | None, **more: Any) -> None:
        self.client = client
        self.owed: list[int] = []
        self.status = IDLE
        self.own = 0
        self.own_at = self.last_used = self.query_at = self.started_at = 0.0
        self.unsynced = False
        self.closing = False
        self.epoch = 1
        self.given_up = ""
        self.__dict__.update(more)

    def give_up(self, reason: str) -> None:
        self.given_up = reason


def _pool(*sessions: Session, clients: tuple[Someone, ...] = (), **settings: float) -> Pool:
    names = ("idle_transaction_timeout_seconds", "query_timeout_seconds", "client_idle_timeout_seconds",
             "transaction_timeout_seconds")
    limits = SimpleNamespace(**{name: settings.get(name, 0.0) for name in names})
    core, plan = SimpleNamespace(active=set(sessions)), SimpleNamespace(settings=limits)
    return cast(Pool, SimpleNamespace(core=core, clients=set(clients), plan=plan))


def test_an_idle_transaction_is_ended_past_its_limit_and_a_working_one_is_not() -> None:
    silent, busy, free = Someone(), Someone(), Someone()
    unsynced = Someone()
    pool = _pool(
        Session(silent, status=IN_TRANSACTION, last_used=1.0),
        Session(busy, status=IN_TRANSACTION, last_used=1.0, owed=[2]), Session(free, last_used=1.0),
        Session(unsynced, unsynced=True, query_at=1.0), idle_transaction_timeout_seconds=5.0)
    janitor.end_idle_transactions(pool, 5.9)
    assert silent.told == []
    janitor.end_idle_transactions(pool, 6.1)
    assert (silent.told, busy.told, free.told, unsynced.told) == (["25P03"], [], [], ["25P03"])


def test_a_long_transaction_is_ended_past_its_limit_whether_it_works_or_waits() -> None:
    working, waiting, free, new = Someone(), Someone(), Someone(), Someone()
    pool = _pool(
        Session(working, owed=[2], started_at=1.0), Session(waiting, status=IN_TRANSACTION, started_at=1.0),
        Session(free, started_at=1.0), Session(new, owed=[2], started_at=3.0),
        Session(None, owed=[2], started_at=1.0), transaction_timeout_seconds=5.0)
    janitor.end_long_transactions(pool, 5.9)
    assert working.told == []
    janitor.end_long_transactions(pool, 6.1)
    assert [each.told for each in (working, waiting, free, new)] == [["25P04"], ["25P04"], [], []]


def test_a_long_query_is_ended_past_its_limit() -> None:
    slow, quick = Someone(), Someone()
    pool = _pool(Session(slow, owed=[2], query_at=1.0), Session(quick, owed=[2], query_at=9.0),
                 query_timeout_seconds=5.0)
    janitor.end_long_queries(pool, 10.0)
    assert (slow.told, quick.told) == (["57014"], [])


def test_queries_that_are_answered_together_have_their_times_together() -> None:
    """R53: nothing is heard of the first before the Sync behind the last."""
    many = [o.BIND, o.EXECUTE, o.BIND, o.EXECUTE, o.SYNC, o.EXECUTE, o.SYNC]
    client = Someone()
    pool = _pool(Session(client, owed=many, query_at=1.0), query_timeout_seconds=5.0)
    janitor.end_long_queries(pool, 10.9)
    assert client.told == []
    janitor.end_long_queries(pool, 11.1)
    assert client.told == ["57014"]


def test_an_idle_client_is_ended_and_one_that_waits_or_works_is_not() -> None:
    idle, working = Someone(), Someone(server=object())
    waiting = Someone(ticket=SimpleNamespace(waiting=True))
    pool = _pool(clients=(idle, waiting, working), client_idle_timeout_seconds=5.0)
    janitor.end_idle_clients(pool, 10.0)
    assert (idle.told, waiting.told, working.told) == (["57P05"], [], [])


def test_a_client_is_idle_from_the_end_of_its_last_transaction() -> None:
    client = Someone(requested_at=1.0, idle_since=9.0)
    pool = _pool(clients=(client,), client_idle_timeout_seconds=5.0)
    janitor.end_idle_clients(pool, 13.9)
    assert client.told == []
    janitor.end_idle_clients(pool, 14.1)
    assert client.told == ["57P05"]


def test_limits_of_zero_are_off() -> None:
    someone = Someone()
    pool = _pool(Session(someone, status=IN_TRANSACTION), clients=(someone,))
    janitor.end_idle_transactions(pool, 1e9)
    janitor.end_long_transactions(pool, 1e9)
    janitor.end_long_queries(pool, 1e9)
    janitor.end_idle_clients(pool, 1e9)
    assert someone.told == []


def test_a_cleanup_that_is_not_answered_costs_the_session() -> None:
    hung, quick, ours = Session(None, own=1), Session(None, own=1, own_at=9.0), Session(Someone())
    janitor.end_hung_cleanups(_pool(hung, quick, ours), janitor.OWN_QUERY_SECONDS_MAX + 0.1)
    assert hung.given_up
    assert not quick.given_up
    assert not ours.given_up


def _draining(*sessions: Session, epoch: int, serving: bool) -> tuple[Any, list[Session]]:
    cancelled: list[Session] = []
    core = SimpleNamespace(active=list(sessions), epoch=epoch, serving=serving)
    growth = SimpleNamespace(give_up_outlived=lambda: None)
    return SimpleNamespace(core=core, drain_at=5.0, drain_cancelled=False, growth=growth,
                           break_off_session=cancelled.append), cancelled


@pytest.mark.parametrize(("epoch", "serving"), [(1, False), (2, True)])
def test_past_drain_timeout_what_runs_is_cancelled_and_what_holds_a_transaction_is_closed(
    epoch: int, serving: bool
) -> None:
    """An epoch that drains, and the one behind an advance."""
    running, holding = Session(Someone(), owed=[2]), Session(Someone(), status=IN_TRANSACTION)
    own, new = Session(None, own=1), Session(Someone(), owed=[2], epoch=3)
    pool, cancelled = _draining(running, holding, own, new, epoch=epoch, serving=serving)
    janitor.end_overdue_drain(pool, 4.9)
    assert cancelled == []
    janitor.end_overdue_drain(pool, 5.1)
    assert cancelled == [running, own]
    assert (holding.client.told, running.client.told) == (["57P01"], [])  # type: ignore[union-attr]
    janitor.end_overdue_drain(pool, 5.2 + janitor.CANCELLED_SECONDS)
    assert running.client.told == ["57P01"]  # type: ignore[union-attr]
    assert new.client.told == []  # type: ignore[union-attr]
    assert pool.drain_at is None


def _unused(**more: Any) -> Pool:
    limits = SimpleNamespace(**({"autodb_idle_timeout_seconds": 100.0, "client_login_timeout_seconds": 60.0,
                                 "server_login_retry_seconds": 15.0} | more.pop("limits", {})))
    core = SimpleNamespace(**({"total": 0, "waiting": ()} | more.pop("core", {})))
    pool = {"clients": set(), "greeting": {b"a": b"b"}, "used_at": 0.0, "core": core}
    return cast(Pool, SimpleNamespace(**(pool | more), plan=SimpleNamespace(settings=limits)))


def test_a_pool_that_nobody_uses_is_forgotten_past_its_time() -> None:
    pool = _unused()
    assert not janitor.is_unused(pool, 100.0)
    assert janitor.is_unused(pool, 100.1)
    pool.used_at = 50.0
    assert not janitor.is_unused(pool, 150.0)


@pytest.mark.parametrize("more", [
    {"clients": {Someone()}}, {"core": {"total": 1}}, {"core": {"waiting": (1,)}},
])
def test_a_pool_in_use_is_kept_and_its_time_begins_anew(more: dict[str, Any]) -> None:
    pool = _unused(**more)
    assert not janitor.is_unused(pool, 1_000.0)
    assert pool.used_at == 1_000.0


def test_a_pool_that_never_had_a_session_is_kept_for_the_pause_of_its_refusal_alone() -> None:
    pool = _unused(greeting=None)
    assert not janitor.is_unused(pool, 15.0)
    assert janitor.is_unused(pool, 15.1)


@pytest.mark.parametrize(("limits", "kept"), [
    ({"autodb_idle_timeout_seconds": 0.0}, float("inf")),  # off
    ({"client_login_timeout_seconds": 0.0}, float("inf")),  # somebody may be at the door for ever
    ({"client_login_timeout_seconds": 300.0}, 300.0),
])
def test_no_pool_goes_while_its_time_is_off_or_a_login_may_still_be_under_way(
    limits: dict[str, float], kept: float
) -> None:
    pool = _unused(limits=limits)
    assert not janitor.is_unused(pool, min(kept, 1e9))
    assert janitor.is_unused(pool, 1e9) == (kept < 1e9)
