"""Our verifiers of passwords beside those that PostgreSQL makes, SASLprep and all."""

from __future__ import annotations

import random
import secrets

import psycopg
import pytest
from psycopg import sql

from pooler.wire.scram import Verifier
from tests.support.postgres import Database

pytestmark = pytest.mark.postgres

CHOSEN = [
    "a", "pässword", "I\u00adX", "\u2168", "ª", "x\u00a0y", "\u3000wide", "\u00ad", "\u0627\u0031",
    "\u0627\u0628", "a\u0627", "tab\there", "\u0007bell", "é\u0007", "e\u0301", "\ufb01", "\u200b",
    "z\u200dw", "\U0001f600",
    "\u0221", "\u0390\u1fd3", "\ufeff", "\u2028", "o\u0340", "\ue000", "\U000e0001", "ﷺ", "x" * 2_000 + "é",
]
ALPHABET = ("a 1é\u00ad\u00a0\u2168\u0627\u0628\u05d0\u0301\u0340\u0341\u1680\u200b\u2060\u3000\ufb01\ufe0f"
            "\ufffd\u0221\U0001d156\U0001f600")


def test_a_password_has_the_verifier_that_postgresql_makes_of_it(postgres: Database) -> None:
    chance = random.Random(4013)
    drawn = ["".join(chance.choices(ALPHABET, k=chance.randint(1, 6))) for _ in range(300)]
    name = f"scram_{secrets.token_hex(4)}"
    role = sql.Identifier(name)
    differ = []
    with psycopg.connect(postgres.server.dsn("postgres", "postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {}").format(role))
        for password in [*CHOSEN, *drawn]:
            connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(role, sql.Literal(password)))
            row = connection.execute(
                "SELECT rolpassword FROM pg_authid WHERE rolname = %s", [name]).fetchone()
            assert row is not None
            theirs = Verifier.parse(row[0])
            if Verifier.derive(password.encode(), theirs.salt, theirs.iterations) != theirs:
                differ.append(ascii(password))
    assert differ == []
