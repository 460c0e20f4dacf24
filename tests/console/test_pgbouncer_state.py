"""What PgBouncer refuses because of the state it is in."""

from __future__ import annotations

import pytest

from pooler.console.pgbouncer_state import State, why_not

HALTED, NAMED = State(halted=True), State(paused={"app"})


@pytest.mark.parametrize(("command", "database", "state", "said"), [
    ("pause", None, State(), ""),
    ("pause", None, HALTED, "already suspended/paused"),
    ("pause", "app", HALTED, "already suspended/paused"),
    ("pause", "app", NAMED, ""),
    ("kill", "app", HALTED, "already suspended/paused"),
    ("suspend", None, HALTED, "already suspended/paused"),
    ("suspend", None, NAMED, "cannot suspend with paused databases"),
    ("suspend", None, State(), ""),
    ("resume", None, State(), "pooler is not paused/suspended"),
    ("resume", None, HALTED, ""),
    ("resume", None, State(halted=True, leaving=True), "pooler is shutting down"),
    ("resume", "app", HALTED, "database app is not paused"),
    ("resume", "app", NAMED, ""),
    ("resume", "pgbouncer", State(), "database pgbouncer is not paused"),
    ("pause", "pgbouncer", State(), "cannot pause admin db: pgbouncer"),
    ("enable", "pgbouncer", State(), "cannot disable admin db: pgbouncer"),
    ("wait_close", "pgbouncer", State(), "cannot wait in admin db: pgbouncer"),
    ("reconnect", "app", HALTED, ""),
])
def test_it_is_refused_in_the_states_in_which_pgbouncer_refuses_it(
    command: str, database: str | None, state: State, said: str
) -> None:
    assert why_not(command, database, state) == said
