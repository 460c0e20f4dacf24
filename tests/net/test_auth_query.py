"""Asked secrets: how fresh an answer is, who shares one, and what an answer may look like."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pooler.errors import NotServing
from pooler.net.auth_query import NO_PASSWORD_FITS, AskedSecrets, Place, read_answer
from pooler.wire.auth import Secret, md5_secret
from pooler.wire.scram import Verifier

PLACE = Place("db", "asker", "query")
OLD, NEW = Secret(plain=b"old"), Secret(plain=b"new")


class Server:
    """Answers when it is let to; counts the questions."""

    def __init__(self) -> None:
        self.secrets: dict[str, Secret] = {"ann": OLD}
        self.questions: list[str] = []
        self.answers = trio.Event()
        self.answers.set()
        self.fails = False

    async def ask(self, _place: Place, user: str) -> Secret | None:
        self.questions.append(user)
        found = self.secrets.get(user)
        await self.answers.wait()
        if self.fails:
            raise NotServing("down")
        return found


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def nursery() -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        yield nursery


def asked(server: Server, nursery: trio.Nursery, **more: float) -> AskedSecrets:
    return AskedSecrets(server.ask, nursery.start_soon, trio.current_time, **more)  # type: ignore[arg-type]


async def test_every_login_asks_so_that_a_new_password_counts_at_once(
    server: Server, nursery: trio.Nursery
) -> None:
    secrets = asked(server, nursery)
    assert await secrets.find(PLACE, "ann") == OLD
    server.secrets["ann"] = NEW
    assert await secrets.find(PLACE, "ann") == NEW
    assert await secrets.find(PLACE, "bob") is None
    assert len(secrets) == 0


async def test_logins_that_come_while_it_is_asked_share_the_next_question(
    server: Server, nursery: trio.Nursery
) -> None:
    secrets = asked(server, nursery)
    server.answers = trio.Event()
    found: list[Secret | None] = []

    async def find() -> None:
        found.append(await secrets.find(PLACE, "ann"))

    nursery.start_soon(find)
    await wait_all_tasks_blocked()
    server.secrets["ann"] = NEW  # after the first question read it
    for _ in range(100):
        nursery.start_soon(find)
    await wait_all_tasks_blocked()
    server.answers.set()
    await wait_all_tasks_blocked()
    assert server.questions == ["ann", "ann"]
    assert found == [OLD] + [NEW] * 100


async def test_a_login_that_leaves_takes_the_answer_from_nobody(
    server: Server, nursery: trio.Nursery
) -> None:
    secrets = asked(server, nursery)
    server.answers = trio.Event()
    with trio.move_on_after(0):
        await secrets.find(PLACE, "ann")
    found: list[Secret | None] = []

    async def find() -> None:
        found.append(await secrets.find(PLACE, "ann"))

    nursery.start_soon(find)
    await wait_all_tasks_blocked()
    server.answers.set()
    await wait_all_tasks_blocked()
    assert found == [OLD]


async def test_a_failure_reaches_everybody_who_waits_and_the_next_login_asks_anew(
    server: Server, nursery: trio.Nursery
) -> None:
    secrets = asked(server, nursery)
    server.fails = True
    with pytest.raises(NotServing):
        await secrets.find(PLACE, "ann")
    server.fails = False
    assert await secrets.find(PLACE, "ann") == OLD


async def test_an_answer_that_may_be_kept_serves_for_that_time_only(
    server: Server, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    secrets = asked(server, nursery, keep_seconds=5.0)
    for _ in range(9):
        assert await secrets.find(PLACE, "ann") == OLD
        assert await secrets.find(PLACE, "bob") is None
    assert server.questions == ["ann", "bob"]
    server.secrets["ann"] = NEW
    with trio.move_on_after(5.0):
        await trio.sleep_forever()
    assert await secrets.find(PLACE, "ann") == NEW


async def test_a_kept_answer_found_wrong_is_asked_for_again_once(
    server: Server, nursery: trio.Nursery
) -> None:
    secrets = asked(server, nursery, keep_seconds=60.0)
    assert await secrets.find(PLACE, "ann") == OLD
    server.secrets["ann"] = NEW
    assert await secrets.ask_again(PLACE, "ann", OLD) == NEW
    assert await secrets.find(PLACE, "ann") == NEW
    assert await secrets.ask_again(PLACE, "ann", NEW) is None
    assert len(server.questions) == 3


async def test_what_was_just_asked_for_is_not_asked_for_again(server: Server, nursery: trio.Nursery) -> None:
    secrets = asked(server, nursery)
    assert await secrets.find(PLACE, "ann") == OLD
    assert await secrets.ask_again(PLACE, "ann", OLD) is None
    assert server.questions == ["ann"]


async def test_no_more_answers_are_kept_than_may_be(server: Server, nursery: trio.Nursery) -> None:
    secrets = asked(server, nursery, keep_seconds=60.0, entries_max=10)
    for number in range(50):
        await secrets.find(PLACE, f"u{number}")
    assert len(secrets) == 10
    secrets.forget()
    assert len(secrets) == 0


def test_an_answer_is_a_name_and_a_secret() -> None:
    verifier = Verifier.derive(b"pw", b"salt")
    hashed = md5_secret(b"pw", "ann")
    assert read_answer([]) is None
    assert read_answer([[b"ann", None]]) == NO_PASSWORD_FITS
    assert read_answer([[b"ann", b"pw", b"more"]]) == Secret(plain=b"pw")
    assert read_answer([[b"ann", hashed]]) == Secret(md5=hashed)
    assert read_answer([[b"ann", verifier.secret().encode()]]) == Secret(scram=verifier)


@pytest.mark.parametrize("rows", [
    [[b"ann", b"hidden"], [b"ann", b"hidden"]], [[b"hidden"]], [[b"ann", b"hidden" * 20_000]],
    [[b"ann", b"SCRAM-SHA-256$hidden"]]])
def test_an_answer_of_another_shape_is_refused_and_not_shown(rows: list[list[bytes | None]]) -> None:
    with pytest.raises(ValueError, match=r"rows?|columns|secret") as refused:
        read_answer(rows)
    assert "hidden" not in str(refused.value)
