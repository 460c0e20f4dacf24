"""PgBouncer's ini dialect, read as PgBouncer reads it."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.dropin.connstring import parse_pairs
from pooler.dropin.ini import INCLUDES_DEEP_MAX, Entry, IniRefused, last_of, parse_ini
from tests.dropin.oracle import PGBOUNCER, as_ordinary_user
from tests.support.need import missing


def entries(text: str, **included: str) -> list[Entry]:
    files = {"f.ini": text, **{f"{name}.ini": content for name, content in included.items()}}

    def read(name: str) -> str:
        if name not in files:
            raise FileNotFoundError(2, "No such file or directory", name)
        return files[name]

    return parse_ini("f.ini", read)


def plain(found: list[Entry]) -> list[tuple[str, str, str, int]]:
    return [(each.section, each.key, each.value, each.place.line) for each in found]


def test_sections_comments_blanks_and_empty_values() -> None:
    found = entries("; comment\n# another\n\n  [databases]\n\ta=x y = z  \n"
                    "[pgbouncer]\npidfile = \n * = h\r\nb =c;d #e\n")
    assert plain(found) == [
        ("databases", "a", "x y = z", 5), ("pgbouncer", "pidfile", "", 7), ("pgbouncer", "*", "h", 8),
        ("pgbouncer", "b", "c;d #e", 9)]


def test_the_last_value_of_a_repeated_key_wins_over_sections_that_come_again() -> None:
    found = entries("[users]\na = 1\n[databases]\nb = 2\n[users]\nc = 3\na = 4\n")
    assert {key: entry.value for key, entry in last_of(found, "users").items()} == {"a": "4", "c": "3"}


def test_an_included_file_goes_on_in_the_section_and_leaves_its_own() -> None:
    found = entries("[pgbouncer]\n%include more.ini\nd = 1\n", more="a = 2\n[databases]\n")
    assert plain(found) == [("pgbouncer", "a", "2", 1), ("databases", "d", "1", 3)]
    assert str(found[0].place) == "more.ini:1"


def test_a_quoted_name_may_hold_anything() -> None:
    assert plain(entries('[databases]\n"my ""db""" = host=x\n'))[0][1] == 'my "db"'


def test_every_fault_is_told_with_its_line() -> None:
    text = "early = 1\n[databases\n[other]\nx = 1\n[users]\nno value\n= 2\n%include gone.ini\n"
    with pytest.raises(IniRefused) as refused:
        entries(text)
    assert [fault.split(": ")[0] for fault in refused.value.faults] == [
        "f.ini:1", "f.ini:2", "f.ini:3", "f.ini:6", "f.ini:7", "f.ini:8"]
    assert "cannot read gone.ini: No such file" in refused.value.faults[-1]
    assert refused.value.exit_code == 1


def test_a_file_that_includes_itself_is_refused() -> None:
    with pytest.raises(IniRefused, match=f"deeper than {INCLUDES_DEEP_MAX}"):
        entries("%include f.ini\n")


def test_a_fault_shows_no_value() -> None:
    with pytest.raises(IniRefused) as refused:
        entries("[databases]\na b = password=hunter2\n")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(("text", "pairs"), [
    ("", {}),
    ("  ", {}),
    ("host=a  port = 5", {"host": "a", "port": "5"}),
    ("connect_query='select ''a;, b''; -- #'", {"connect_query": "select 'a;, b'; -- #"}),
    ("auth_query='SELECT $1' x=y'z", {"auth_query": "SELECT $1", "x": "y'z"}),
    ("a=1 a=2", {"a": "2"}),
])
def test_connection_strings(text: str, pairs: dict[str, str]) -> None:
    assert parse_pairs(text) == pairs


@pytest.mark.parametrize("text", ["host", "a='open", "a='x'y", "a=''", "a=", "=b", "a=1 b"])
def test_a_broken_connection_string_is_refused_without_its_values(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse_pairs(f"password=hunter2 {text}")
    assert "hunter2" not in str(refused.value)


WORDS = st.text("abz_.-*019", min_size=1, max_size=6)
VALUES = st.text(st.characters(exclude_categories=("C", "Z")), max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["databases", "users", "pgbouncer"]), WORDS, VALUES), max_size=20))
def test_what_is_written_is_read(lines: list[tuple[str, str, str]]) -> None:
    text = "".join(f"[{section}]\n {key}\t= {value} \n" for section, key, value in lines)
    assert [(each.section, each.key, each.value) for each in entries(text)] == lines


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(IniRefused):
        assert all(entry.place.file == "f.ini" for entry in entries(text))


@given(st.dictionaries(
    st.text("abc_", min_size=1), st.text(st.characters(exclude_characters="\n\0"), min_size=1)))
def test_quoted_pairs_are_read(pairs: dict[str, str]) -> None:
    text = " ".join("{}='{}'".format(key, value.replace("'", "''")) for key, value in pairs.items())
    assert parse_pairs(text) == pairs


SOUND = ("[databases]\na = host=127.0.0.1\n[pgbouncer]\nlisten_port = %d\nunix_socket_dir =\n"
         "listen_addr = 127.0.0.1\n")


@pytest.mark.parametrize("line", [
    "nonsense", "[open", "[other]", "no_such = 1", "pool_mode = all", "listen_backlog = x1",
    "server_lifetime = -1", "server_lifetime = 1x", "[databases]\na = host", "[databases]\na = nix=1",
    "[databases]\na = port=x", "[databases]\npgbouncer = port=1", "[databases]\na = connect_query='x",
    "[users]\na = nix=1", "[users]\na = pool_mode=x", "= 1",
])
def test_what_pgbouncer_refuses_is_refused_at_the_same_place(line: str, tmp_path: Path) -> None:
    from pooler.dropin.reading import read_bouncer

    text = SOUND % 7 + line + "\n"
    with pytest.raises(IniRefused):
        read_bouncer(entries(text))
    if PGBOUNCER is None:
        missing("no pgbouncer to play the same ini on")
    ini = tmp_path / "f.ini"
    ini.write_text(text)
    done = subprocess.run([str(PGBOUNCER), str(ini)], capture_output=True, text=True, timeout=10, check=False,
                          **as_ordinary_user(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "cannot load config file" in done.stderr
