"""Our reading of pg_hba.conf beside PostgreSQL's own (pg_hba_file_rules)."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from pooler.errors import UsageFault
from pooler.net.hba import Rule, read_hba
from tests.support.postgres import MakeServer

pytestmark = pytest.mark.postgres

ALIKE = [
    "local all all trust",
    "host all all all md5",
    "host all,\tmore all 10.0.0.0/8 scram-sha-256",
    "host a, b,c d 10.1.2.3/8 reject # end",
    "host all ,a all md5",
    'host "all" "a ""b""" ::1/128 password',
    'host "a"b,c"d e" all 10.0.0.0 255.0.0.0 md5',
    "host all all fd00:: ffff:: md5",
    "hostnossl sameuser all samehost md5",
    "hostnogssenc replication all 127.0.0.1/32 md5",
    "host replication,db all 127.0.0.1/32 md5",
    "host /^a[0-9]+$ /b all md5",
    'host "/^(a|b),c$" all all md5',
    "local all all peer map=m",
    "local all all ident",
    "local all \\",
    "   all trust",
    "host all all 10.0.0.1 255.255.255.255 md5",
    "hosts all all all md5",
    "host all all",
    "local all",
    "host all all all",
    "host all all 10.0.0.0/33 md5",
    "host all all 10.0.0.0/8/8 md5",
    "host all all 10.0.0.1 md5",
    "host all all all peer",
    "host all all all cert",
    "host all all all unheard",
    "host all all all md5 map=x",
    "host all all all md5 nonsense",
    "host all all all md5 clientcert=verify-full",
    "local,host all all trust",
    "local all all trust,md5",
    "host /( all all md5",
    "host all all 1.2.3.4/8,5.6.7.8/8 md5",
]


def ours(path: Path) -> dict[int, Rule]:
    """The rules by line, those of sound lines only."""
    found: dict[int, Rule] = {}
    lines = path.read_text().split("\n")
    for number in range(1, len(lines) + 1):
        alone = path.with_name("alone")
        continued = number > 1 and lines[number - 2].endswith("\\")
        whole = lines[number - 1] + ("\n" + lines[number] if lines[number - 1].endswith("\\") else "")
        alone.write_text("" if continued else whole)
        try:
            found[number] = read_hba(alone).rules[0]
        except UsageFault:
            continue
    return found


def test_lines_are_sound_or_faulty_as_for_postgresql_and_mean_the_same(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(18)
    path = tmp_path / "hba.conf"
    path.write_text("\n".join(ALIKE) + "\n")
    with psycopg.connect(server.dsn("postgres", "postgres")) as connection:
        (server.data / "pg_hba.conf").write_text(path.read_text())  # read by the view, not in force
        rows = connection.execute(
            "SELECT line_number, type, database, user_name, address, auth_method, error "
            "FROM pg_hba_file_rules").fetchall()
    theirs = {row[0]: row for row in rows if row[6] is None}
    mine = ours(path)
    assert {ALIKE[line - 1] for line in theirs.keys() ^ mine.keys()} == set()
    for line, (_, kind, databases, users, address, method, _) in theirs.items():
        rule = mine[line]
        assert rule.kind == kind, ALIKE[line - 1]
        assert rule.method == method, ALIKE[line - 1]
        for names, given in ((rule.databases, databases), (rule.users, users)):
            told = {*names.words, *names.names, *("/" + each.pattern for each in names.patterns)}
            assert told == set(given), ALIKE[line - 1]
        if address is not None and isinstance(rule.networks, str):
            assert rule.networks == address
        assert (address is None) == (kind == "local")
