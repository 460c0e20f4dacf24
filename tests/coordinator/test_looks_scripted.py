"""A look at a server that answers with something else: it proves nothing, and ends nobody."""

from __future__ import annotations

import pytest

from chaos.script import Asked, Say, Script, Session, Then
from chaos.scripted_server import ScriptedServer
from chaos.words import answered, complete, message, ready
from coordinator.looks import Door, Looker, LookFailed
from coordinator.spec import Monitor

COLUMNS = 14
RIGHT = ["1", "1", "127.0.0.1", "7300000000000000042", "1", "1", "f", "t", "60", "100", "3", "10", "[]", "[]"]
TYPES = [23, 20, 25, 25, 23, 20, 16, 16, 23, 23, 23, 23, 114, 114]


def with_value(at: int, value: str | None, type_oid: int = 0) -> bytes:
    row: list[str | None] = [*RIGHT]
    row[at] = value
    return answered([row], [type_oid if type_oid and n == at else each for n, each in enumerate(TYPES)])


ANSWERS = {
    "one column": answered([["1"]]),
    "no column": message(b"T", b"\0\0") + message(b"D", b"\0\0") + complete("SELECT 1") + ready(),
    "no row": complete("SELECT 0") + ready(),
    "nothing at all": ready(),
    "one column more": answered([[*RIGHT, "1"]], [*TYPES, 25]),
    "all of it text": answered([RIGHT]),
    "a pid that is no number": with_value(0, "x"),
    "a pid that is null": with_value(0, None),
    "a cluster that is a number": with_value(3, "7", 23),
    "a start that is null": with_value(5, None),
    "a start beyond all numbers": with_value(5, "9" * 25),
    "rows that are an object": with_value(12, "{}"),
    "rows that are no JSON": with_value(12, "["),
    "a row of two": with_value(12, "[[1,2]]"),
    "rows that are numbers": with_value(12, "[1]"),
    "pids that are lists": with_value(13, "[[1]]"),
    "an end": b"",
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_what_is_no_answer_to_the_look_is_a_look_that_failed(name: str) -> None:
    lies = [True]

    def look(session: Session, asked: Asked) -> Say | None:
        return Say(ANSWERS[name], Then.GO_ON if ANSWERS[name] else Then.FIN) if lies[0] else None

    door = Door(Monitor("monitor", "x"), "db", "look")
    with ScriptedServer(script=Script([("look", look)])) as server:
        eyes = Looker(lambda address: door)
        with pytest.raises(LookFailed):
            await eyes.look(server.address)
        lies[0] = False
        assert (await eyes.look(server.address)).void is None
        await eyes.close()
