"""Commands of the console: what a worker does, what stands for the next, what is not told as done."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from coordinator.link import LinkRefused
from pooler.console.commands import Act, Show, help_text, parse_commands
from pooler.errors import FleetUnreachable
from pooler.relay.reactor import Reactor
from pooler.serve.client_numbers import COUNT_BITS, ClientNumbers
from pooler.serve.commands import Commands
from pooler.serve.config_rows import config_rows
from pooler.serve.fleet_view import SUPERVISORS, FleetView, WaitEndedByResume
from pooler.serve.registry import EVERY
from pooler.serve.standing import Standing, Stands
from pooler.settings import Settings
from pooler.supervise.run_dir import STANDING_FILE, RunDir

POLICY = {"path": "p.yaml", "text": "", "database": "a/write"}
SETTINGS = Settings.from_wire({
    "fleet": {"name": "f", "run_dir": "/nowhere"}, "etcd": {"endpoints": ["127.0.0.1:2379"]},
    "databases": {name: {"hosts": ["127.0.0.1:5432"], "policy": POLICY} for name in ("a", "b")},
    "pool": {"query_wait_timeout": 7.0},
})


class Pool:
    """As much of a pool as a command touches."""

    def __init__(self, name: str) -> None:
        self.plan = SimpleNamespace(name=name)
        self.core = SimpleNamespace(active=set())
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class Registry:
    """Two databases with a pool each."""

    def __init__(self) -> None:
        self.settings: Any = SETTINGS
        self.set_here: dict[str, str] = {}
        self.paused: set[str] = set()
        self.disabled: set[str] = set()
        self.suspended = False
        self.parts = SimpleNamespace(reactor=Reactor())
        self.pools = {"a": Pool("a"), "b": Pool("b")}
        self.numbers: ClientNumbers[Any] = ClientNumbers()

    def is_paused(self, name: str) -> bool:
        return self.suspended or name in self.paused or EVERY in self.paused

    def by_name(self, name: str | None) -> list[Pool]:
        return [pool for key, pool in self.pools.items() if name in (None, key)]


def worker(run_dir: Path) -> tuple[Commands, Any]:
    registry: Any = Registry()

    def take(settings: Settings) -> list[str]:
        registry.settings = settings
        return []

    return Commands(registry, Standing(run_dir), take), registry


async def test_a_worker_that_starts_later_finds_what_the_others_have_paused_and_disabled(
    tmp_path: Path
) -> None:
    first, _ = worker(tmp_path)
    await first.run("pause", {"database": "a"})
    await first.run("disable", {"database": "b"})
    later, registry = worker(tmp_path)
    later.recall()
    assert (registry.paused, registry.disabled) == ({"a"}, {"b"})
    assert [pool.is_paused for pool in registry.pools.values()] == [True, False]
    await first.run("resume", {})
    await first.run("enable", {"database": "b"})
    after, registry = worker(tmp_path)
    after.recall()
    assert (registry.paused, registry.disabled) == (set(), set())


async def test_what_is_said_to_all_holds_for_names_that_come_later(tmp_path: Path) -> None:
    commands, registry = worker(tmp_path)
    await commands.run("pause", {})
    assert registry.paused == {EVERY}
    await commands.run("resume", {})
    assert not any(pool.is_paused for pool in registry.pools.values())


@pytest.mark.parametrize(("held", "word"), [("pause", "paused"), ("suspend", "suspended")])
async def test_a_resume_of_one_that_would_change_nothing_is_refused_and_says_what_to_do(
    tmp_path: Path, held: str, word: str
) -> None:
    commands, registry = worker(tmp_path)
    await commands.run("pause", {"database": "a"})
    await commands.run(held, {})
    before = set(registry.paused)
    with pytest.raises(LinkRefused, match=f"everything is {word}, say RESUME without a name"):
        await commands.run("resume", {"database": "a"})
    assert registry.paused == before
    assert all(pool.is_paused for pool in registry.pools.values())


async def test_where_it_stands_for_pgbouncer_a_database_loses_its_own_pause_while_all_are_paused(
    tmp_path: Path
) -> None:
    commands, registry = worker(tmp_path)
    registry.settings = SETTINGS.model_copy(update={
        "admin": SETTINGS.admin.model_copy(update={"as_pgbouncer": True})})
    await commands.run("pause", {"database": "a"})
    await commands.run("pause", {})
    await commands.run("resume", {"database": "a"})
    assert registry.paused == {EVERY}
    assert all(pool.is_paused for pool in registry.pools.values())


async def test_nothing_moves_while_suspended_and_everything_after(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    commands, registry = worker(tmp_path)
    nursery.start_soon(registry.parts.reactor.run)
    here, there = socket.socketpair()
    with here, there:
        came = trio.Event()

        def on_event(_: int) -> None:
            registry.parts.reactor.remove(here.fileno())
            came.set()

        await commands.run("suspend", {})
        assert all(pool.is_paused for pool in registry.pools.values())
        registry.parts.reactor.add(here.fileno(), on_event)
        there.send(b"x")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not came.is_set()
        await commands.run("resume", {})
        await came.wait()
        assert not any(pool.is_paused for pool in registry.pools.values())


async def test_a_worker_that_leaves_while_suspended_lets_its_clients_end_what_they_do(tmp_path: Path) -> None:
    """Nobody can RESUME it for them any more. What was paused for itself stays so."""
    commands, registry = worker(tmp_path)
    await commands.run("pause", {"database": "a"})
    await commands.run("suspend", {})
    commands.wake()
    assert [pool.is_paused for pool in registry.pools.values()] == [True, False]


async def test_a_setting_holds_in_workers_that_start_later_and_until_the_next_reload(tmp_path: Path) -> None:
    first, registry = worker(tmp_path)
    await first.run("set", {"key": "query_wait_timeout", "value": "250ms"})
    await first.run("set", {"key": "max_client_conn", "value": "17"})
    later, other = worker(tmp_path)
    later.recall()
    for each in (registry, other):
        assert each.settings.pool.query_wait_timeout_seconds == 0.25
        assert each.settings.pool.max_client_conn == 17
        assert each.settings.pool.default_pool_size == SETTINGS.pool.default_pool_size
        assert each.set_here == {"query_wait_timeout": "250ms", "max_client_conn": "17"}
    rows = {row["key"]: row for row in config_rows(registry.settings, registry.set_here)}
    assert [rows[key]["source"] for key in ("max_client_conn", "pool_mode")] == ["runtime", "default"]
    first.reloaded()
    after, fresh = worker(tmp_path)
    after.recall()
    assert (registry.set_here, fresh.set_here, fresh.settings) == ({}, {}, SETTINGS)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("query_wait_timeout", "soon", "query_wait_timeout: .*is not a duration"),
    ("default_pool_size", "0", "default_pool_size: .*greater than or equal to 1"),
    ("default_pool_size", "9" * 6000, "default_pool_size: "),
    ("server_reset_query_always", "maybe", "server_reset_query_always: "),
    ("pool_mode", "tx", "pool_mode: .*'transaction'"),
    ("query_wait_timeot", "1s", r"did you mean query_wait_timeout\?.*config file, then say RELOAD"),
    ("auth_type", "trust", "auth_type cannot be SET.*config file, then say RELOAD"),
    ("track_extra_parameters", "x", "cannot change while the fleet runs"),
])
async def test_what_cannot_be_set_is_refused_with_what_to_do(
    tmp_path: Path, key: str, value: str, says: str
) -> None:
    commands, registry = worker(tmp_path)
    with pytest.raises(LinkRefused, match=says):
        await commands.run("set", {"key": key, "value": value})
    assert (registry.settings, registry.set_here) == (SETTINGS, {})


def test_what_stands_is_forgotten_with_the_fleet(tmp_path: Path) -> None:
    Standing(tmp_path).keep(Stands(paused=frozenset("a")))
    tmp_path.chmod(0o700)
    RunDir.take(tmp_path, "f").close()
    assert not (tmp_path / STANDING_FILE).exists()


@pytest.mark.parametrize("content", [
    "", "[]", "{}", '{"paused": [], "disabled": [], "settings": [7]}', '{"paused": 3, "disabled": []}'])
def test_a_standing_file_that_cannot_be_read_pauses_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / STANDING_FILE).write_text(content)
    assert Standing(tmp_path).read() == Stands()


@pytest.mark.parametrize(("name", "args"), [("pause", {"database": "none"}), ("keep", {}), ("disable", {})])
async def test_what_a_worker_does_not_know_is_refused(
    tmp_path: Path, name: str, args: dict[str, Any]
) -> None:
    commands, registry = worker(tmp_path)
    with pytest.raises(LinkRefused):
        await commands.run(name, args)
    assert not registry.paused


async def test_a_command_that_may_not_have_reached_every_worker_is_not_told_as_done() -> None:
    async def away(op: str, args: dict[str, Any]) -> Any:
        raise FleetUnreachable("this host's coordinator is unreachable")

    nothing: Any = None
    permits: Any = SimpleNamespace(fleet=away)
    view = FleetView(nothing, permits, nothing, nothing)
    for args in ({}, {"database": "none"}):
        with pytest.raises(FleetUnreachable, match="PAUSE may hold on none or some of the workers"):
            await view.command("pause", args)


def test_help_lists_what_is_carried_out_and_nothing_else(tmp_path: Path) -> None:
    commands, _ = worker(tmp_path)
    lines = [line for line in help_text().splitlines()[1:] if not line.startswith("SHOW ")]
    verbs = {line.split()[0].lower() for line in lines}
    assert verbs == commands.names | SUPERVISORS
    for line in lines:
        for text in (re.sub(r"\[.*]", "", line), re.sub(r"\[(\w+).*]", r"\1", line)):
            (command,) = parse_commands(text, version="")
            assert isinstance(command, Act | Show), text


class Killable:
    """As much of a client as KILL_CLIENT touches."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def break_off(self, sqlstate: str, text: str) -> None:
        self.ended.append(sqlstate)


async def test_a_client_is_killed_by_the_number_it_has_in_the_whole_fleet(tmp_path: Path) -> None:
    clients, made = [], []
    answers: list[dict[str, Any]] = []
    for ordinal in (3, 4):
        commands, registry = worker(tmp_path)
        client: Any = Killable()
        registry.numbers.give(client, ordinal)
        clients.append(client)
        made.append((commands, registry.numbers.number(client)))
    assert made[0][1] != made[1][1]

    async def ask(op: str, args: dict[str, Any]) -> list[dict[str, Any]]:
        answers.clear()
        for index, (commands, _) in enumerate(made):
            try:
                await commands.run(args["name"], args["args"])
                answers.append({"worker": index, "value": {}})
            except LinkRefused as refused:
                answers.append({"worker": index, "error": refused.message})
        return answers

    nothing: Any = None
    view = FleetView(nothing, SimpleNamespace(fleet=ask), nothing, nothing)  # type: ignore[arg-type]
    found = await view.command("kill_client", {"client": str(made[1][1])})
    assert (found.done, found.failed) == (["1"], {})
    assert [client.ended for client in clients] == [[], ["57P01"]]
    for wrong in ("1", "x", "-4", "9" * 6000):
        found = await view.command("kill_client", {"client": wrong})
        assert (found.done, len(set(found.failed.values()))) == ([], 1)
    assert [client.ended for client in clients] == [[], ["57P01"]]


def test_a_number_in_use_is_given_to_nobody_else() -> None:
    numbers: ClientNumbers[str] = ClientNumbers()
    numbers.give("stays", 1)
    first = numbers.number("stays")
    numbers._count = (1 << COUNT_BITS) - 1  # all the others have come and gone
    numbers.give("later", 1)
    numbers.give("latest", 1)
    assert len({first, numbers.number("later"), numbers.number("latest")}) == 3
    numbers.drop("stays")
    assert (numbers.find(first), numbers.number("stays")) == (None, 0)


class Workers:
    """Two workers by their answers to the console's looks, one after the other; the last one stays."""

    def __init__(self, *looks: Any) -> None:
        self.looks = list(looks)
        self.ordered: list[tuple[str, Any]] = []

    async def fleet(self, op: str, args: dict[str, Any]) -> list[dict[str, Any]]:
        if op == "command":
            self.ordered.append((args["name"], args["args"]))
            return [{"worker": index, "value": {}} for index in (0, 1)]
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        return [each if "error" in each else {"worker": index, "value": {"rows": [
            {"database": "a", "paused": 1, "in_use": 0, "to_close": 0} | each,
            {"database": "b", "paused": 0, "in_use": 9, "to_close": 9},
        ]}} for index, each in enumerate(look)]


def view_of(workers: Workers) -> FleetView:
    nothing: Any = None
    asked: Any = workers
    return FleetView(nothing, asked, nothing, nothing)


AWAY = FleetUnreachable("this host's coordinator is unreachable")


@pytest.mark.parametrize(("name", "figure"), [("pause", "in_use"), ("wait_close", "to_close")])
async def test_the_wait_lasts_until_the_last_worker_is_still_however_long(
    name: str, figure: str, autojump_clock: trio.testing.MockClock
) -> None:
    busy, half = [{figure: 1}, {figure: 1}], [{}, {figure: 1}]
    late = [{}, {"error": "late", "worker": 1}]
    workers = Workers(*[busy] * 5000, *[half] * 5000, AWAY, [{}], late, [{}, {}])
    found = await view_of(workers).command(name, {"database": "a"})
    assert (found.done, found.failed) == (["0", "1"], {})
    assert workers.looks == [[{}, {}]]
    assert workers.ordered == [(name, {"database": "a"})]
    assert trio.current_time() > 3600


async def test_a_resume_meanwhile_is_not_told_as_a_pause(autojump_clock: trio.testing.MockClock) -> None:
    resumed = [{"paused": 0}, {"paused": 0}]
    starting = [{"in_use": 1}, {"paused": 0}]  # a worker that was replaced takes the pause over in a moment
    with pytest.raises(WaitEndedByResume):
        await view_of(Workers(starting, resumed)).command("pause", {"database": "a"})


async def test_a_worker_that_tells_nothing_for_too_long_is_named(
    autojump_clock: trio.testing.MockClock
) -> None:
    with pytest.raises(FleetUnreachable, match=r"PAUSE holds, but .*worker 1: it is not linked"):
        await view_of(Workers([{}])).command("pause", {"database": "a"})
    with pytest.raises(FleetUnreachable, match=r"coordinator is unreachable.*say WAIT_CLOSE again"):
        await view_of(Workers(AWAY)).command("wait_close", {"database": "a"})
    assert trio.current_time() < 30


class Supervisor:
    """Answers what it was told to."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def call(self, op: str, /, **args: Any) -> Any:
        self.calls.append((op, args))
        return self.answer


async def test_a_reload_tells_what_waits_for_a_restart() -> None:
    nothing: Any = None
    link: Any = Supervisor({"refused": False, "problems": ["http changed: it keeps its old value"]})
    found = await FleetView(nothing, nothing, nothing, link).command("reload", {})
    assert (found.failed, found.notices) == ({}, ["http changed: it keeps its old value"])


@pytest.mark.parametrize(("mode", "drain"), [("now", False), ("wait_for_servers", True)])
async def test_a_shutdown_waits_only_where_it_was_told_to(mode: str, drain: bool) -> None:
    nothing: Any = None
    link: Any = Supervisor({})
    await FleetView(nothing, nothing, nothing, link).command("shutdown", {"mode": mode})
    assert [args["drain"] for _, args in link.calls] == [drain]
