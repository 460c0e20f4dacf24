"""The demonstration's database: what the load calls, and how the server itself counts it.

Every transaction is one call of a PL/pgSQL function, so that `pg_stat_user_functions` (track_functions = all)
is a count the clients have no hand in.
"""

from __future__ import annotations

from typing import LiteralString

from pooler.demo.postgres import Server

LOOKUP, REPORT, WRITE = "demo_lookup", "demo_report", "demo_write"

_SCHEMA: LiteralString = """
CREATE TABLE items (id int PRIMARY KEY, name text NOT NULL, price int NOT NULL);
INSERT INTO items SELECT n, 'item ' || n, n % 97 FROM generate_series(1, 1000) n;
CREATE TABLE tokens (token text PRIMARY KEY, tenant name DEFAULT current_user, at timestamptz DEFAULT now());
CREATE FUNCTION demo_lookup(wanted int) RETURNS text LANGUAGE plpgsql AS
  $$ BEGIN RETURN (SELECT name FROM items WHERE id = wanted); END $$;
CREATE FUNCTION demo_report(first int) RETURNS bigint LANGUAGE plpgsql AS
  $$ BEGIN RETURN (SELECT sum(price) FROM items WHERE id >= first); END $$;
CREATE FUNCTION demo_write(fresh text) RETURNS text LANGUAGE plpgsql AS
  $$ BEGIN INSERT INTO tokens (token) VALUES (fresh); RETURN fresh; END $$;
GRANT SELECT ON items TO PUBLIC;
GRANT SELECT, INSERT ON tokens TO PUBLIC;
ANALYZE;
"""

SETTINGS = {"track_functions": "all"}


def create_schema(server: Server, dbname: str) -> None:
    """Tables and functions, as superuser."""
    with server.connect(dbname=dbname) as connection:
        connection.execute(_SCHEMA)


def calls(server: Server, dbname: str) -> dict[str, int]:
    """How often the server has run each function. A session reports when it ends or has been idle."""
    rows = server.execute("SELECT funcname::text, calls FROM pg_stat_user_functions", dbname)
    return {name: int(count) for name, count in rows}


def tokens(server: Server, dbname: str) -> dict[str, int]:
    """Every token that is there, and how often."""
    rows = server.execute("SELECT token, count(*) FROM tokens GROUP BY token", dbname)
    return {token: int(count) for token, count in rows}
