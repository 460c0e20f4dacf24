"""Every setting of PgBouncer is in the config that an ini becomes, or is told to be missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pooler.cli.named_files import file_faults
from pooler.dropin.carry import Carried, Circumstances, carry
from pooler.dropin.fields import allowed_words, field_at
from pooler.dropin.files import write_config
from pooler.dropin.ini import IniRefused, parse_ini
from pooler.dropin.known import BY_NAME, CHOICES, LATER, RUNTIME, SETTINGS, Known
from pooler.dropin.reading import Bouncer, read_bouncer
from pooler.settings import Settings, load

HERE = Path(__file__).parent
DATABASES = "[databases]\napp = host=10.0.0.1\n"


def bouncer_of(text: str) -> Bouncer:
    return read_bouncer(parse_ini("f.ini", lambda name: text))


def carried_of(text: str, folder: Path, **more: Any) -> Carried:
    (folder / "userlist.txt").write_text('"app" "secret"\n')
    given = Circumstances(base=folder, fleet="f", auth_file=folder / "userlist.txt", **more)
    return carry(bouncer_of(text), given)


def loaded(carried: Carried, folder: Path) -> Settings:
    found = load(write_config(folder, carried, "# head\n", overwrite=True))
    assert file_faults(found) == ()
    return found


def told(carried: Carried) -> dict[str, str]:
    return {note.about: str(note) for note in carried.notes}


def reads(found: Settings, path: str) -> Any:
    value: Any = found
    for step in path.split("."):
        fields = type(value).model_fields
        value = getattr(value, next(name for name, f in fields.items() if (f.alias or name) == step))
    return value


def test_the_table_has_every_setting_once_and_the_ones_that_set_changes() -> None:
    assert len(BY_NAME) == len(SETTINGS) == 98
    assert [known.name for known in SETTINGS] == sorted(BY_NAME)
    assert BY_NAME.keys() | LATER.keys() >= RUNTIME
    assert all(known.why or field_at(known.ours) is not None for known in SETTINGS)


def test_pgbouncer_itself_has_these_defaults() -> None:
    """As a console of 1.18 shows them; what later versions changed is named."""
    shown = dict(line.split("\t") for line in (HERE / "defaults_1_18.txt").read_text().splitlines())
    changed = {"max_prepared_statements", "client_tls_ciphers", "server_tls_ciphers", "server_tls_sslmode",
               "auth_query", "server_check_query", "tcp_defer_accept", "unix_socket_dir",
               "client_tls_dheparams", "auth_type", "verbose"}
    for name, default in shown.items():
        if name in BY_NAME and name not in changed:
            assert (BY_NAME[name].default or "") == default, name


def test_an_ini_without_settings_has_pgbouncers_defaults(tmp_path: Path) -> None:
    carried = carried_of(DATABASES, tmp_path)
    found = loaded(carried, tmp_path)
    assert (found.pool.pool_mode, found.auth.type, found.pool.session_state) == ("session", "md5", "allow")
    assert found.fleet.listen == ()
    assert str(found.fleet.unix_socket) == "/tmp/.s.PGSQL.6432"
    assert carried.grave == ()


VALUES = {
    "whole": st.integers(0, 100_000).map(str),
    "flag": st.sampled_from(["0", "1"]),
    "time": st.one_of(st.integers(0, 5_000).map(str), st.sampled_from(["0.5", "2.25"])),
    "milliseconds": st.integers(0, 100_000).map(str),
    "words": st.lists(st.sampled_from(["a", "b1", "c_c"]), unique=True).map(", ".join),
    "text": st.sampled_from(["x", "some text", "'q'"]),
}
SENSIBLE = {"auth_query": st.just("select * from lookup($1)"), "auth_dbname": st.just("app"),
            **{f"{side}_tls_protocols": st.sampled_from(["secure", "all"]) for side in ("client", "server")},
            **{f"{side}_tls_ciphers": st.just("default") for side in ("client", "server")},
            **{f"{side}_tls13_ciphers": st.just("TLS_AES_128_GCM_SHA256") for side in ("client", "server")}}
OWN = {"listen_addr", "listen_port", "unix_socket_dir", "conffile", "min_pool_size"}
PLAIN = [known for known in (*SETTINGS, *LATER.values()) if known.kind in VALUES and known.name not in OWN]


@pytest.mark.parametrize("known", PLAIN, ids=lambda known: known.name)
def test_every_setting_survives_or_is_told(known: Known, tmp_path: Path) -> None:
    @given(SENSIBLE.get(known.name, VALUES[known.kind]))
    @settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    def check(text: str) -> None:
        carried = carried_of(f"{DATABASES}[pgbouncer]\n{known.name} = {text}\n", tmp_path)
        found = loaded(carried, tmp_path)
        notes = told(carried)
        if field_at(known.ours) is None:
            assert notes[known.name].startswith("f.ini:4: ")
        elif known.name not in notes and known.name not in ("verbose", "default_pool_size"):
            value = reads(found, known.ours)
            wanted = bouncer_of(f"[pgbouncer]\n{known.name} = {text}\n").value(known.name)
            if known.name == "server_check_query" and text == "<empty>":
                wanted = ""
            assert value == wanted or (not value and not wanted)

    check()


@pytest.mark.parametrize("name", ["pool_mode", "auth_type"])
def test_every_word_of_a_choice_survives_or_is_grave(name: str, tmp_path: Path) -> None:
    (tmp_path / "hba").write_text("host all all 0.0.0.0/0 md5\n")
    target = field_at(BY_NAME[name].ours)
    assert target is not None
    for word in CHOICES[name]:
        text = f"{DATABASES[:-1]} user=u\n[pgbouncer]\n{name} = {word.upper()}\nauth_hba_file = hba\n"
        carried = carried_of(text, tmp_path)
        if word in ("cert", "pam"):  # they need a CA file and a package more
            assert carried.config["auth"]["type"] == word
        elif word in allowed_words(target):
            assert reads(loaded(carried, tmp_path), BY_NAME[name].ours) == word
        elif word != "plain":
            assert any(note.about == name for note in carried.grave)


def test_a_database_entry_survives_whole(tmp_path: Path) -> None:
    text = ("[databases]\nx = host=10.0.0.1 port=7 dbname='my db' user=u password=p pool_size=3 "
            "reserve_pool=2 min_pool_size=9 pool_mode=statement server_lifetime=5 "
            "connect_query='select 1' max_db_connections=4\n")
    entry = loaded(carried_of(text, tmp_path), tmp_path).databases["x"]
    assert [str(host) for host in entry.hosts] == ["10.0.0.1:7"]
    assert (entry.dbname, entry.user, entry.pool_size, entry.reserve_pool_size) == ("my db", "u", 3, 2)
    assert (entry.min_pool_size, entry.pool_mode, entry.server_lifetime_seconds) == (3, "statement", 5.0)
    assert entry.connect_query == "select 1"
    assert entry.password is not None
    assert entry.password.get_secret_value() == "p"
    assert yaml.safe_load(entry.policy.text)["serverSessionPermits"] == 4


def test_the_fallback_database_serves_any_name(tmp_path: Path) -> None:
    found = loaded(carried_of("[databases]\n* = host=10.0.0.1 pool_size=2\n", tmp_path), tmp_path)
    assert found.database_for("whatever", None) == "whatever"
    assert found.pool_size("whatever") == 2


def test_names_that_look_alike_have_ledgers_of_their_own(tmp_path: Path) -> None:
    text = "[databases]\nA = host=h\na = host=h\na.b = host=h\na_b = host=h\nany = host=h\n* = host=h\n"
    found = loaded(carried_of(text, tmp_path), tmp_path)
    assert len({entry.ledger for entry in found.databases.values()}) == 6


def test_permits_of_a_database_without_a_limit_are_each_users_pool(tmp_path: Path) -> None:
    text = "[databases]\na = host=h pool_size=5\nb = host=h user=x\n[pgbouncer]\nreserve_pool_size = 1\n"
    found = loaded(carried_of(text, tmp_path, users=3), tmp_path)
    permits = [yaml.safe_load(e.policy.text)["serverSessionPermits"] for e in found.databases.values()]
    assert permits == [18, 21]


def test_what_is_less_safe_than_the_ini_is_grave(tmp_path: Path) -> None:
    text = DATABASES + "[pgbouncer]\nserver_tls_sslmode = verify-full\nauth_type = pam\n"
    carried = carried_of(text, tmp_path)
    missing = {name for name in ("server_tls_sslmode", "auth_type")
               if BY_NAME[name].ours == "" or (field := field_at(BY_NAME[name].ours)) is None
               or ("pam" if name == "auth_type" else "verify-full") not in allowed_words(field)}
    assert {note.about for note in carried.grave} == missing


def test_addresses_and_sockets(tmp_path: Path) -> None:
    text = DATABASES + "[pgbouncer]\nlisten_addr = *\nlisten_port = 7000\nunix_socket_dir = here\n"
    fleet = loaded(carried_of(text, tmp_path, has_ipv6=True), tmp_path).fleet
    assert [str(address) for address in fleet.listen] == ["0.0.0.0:7000", "[::]:7000"]
    assert fleet.unix_socket == tmp_path / "here" / ".s.PGSQL.7000"


@pytest.mark.parametrize(("line", "says"), [
    ("[pgbouncer]\nmax_clientconn = 1", "f.ini:2: unknown parameter max_clientconn: did you mean max_cl"),
    ("[databases]\na = hots=x", "f.ini:2: a: unrecognized parameter hots: did you mean host?"),
    ("[databases]\npgbouncer = host=x", 'f.ini:2: database name "pgbouncer" is reserved'),
    ("[peers]\nx = host=y", 'f.ini:2: peer "x" must be a number'),
    ("[peers]\n1 = port=1", "f.ini:2: peer 1 has no host"),
    ("[pgbouncer]\nunix_socket_mode = 0999", 'unix_socket_mode: "0999" is not a whole number'),
    ("[pgbouncer]\nquery_timeout = soon", 'query_timeout: "soon" is not a time'),
])
def test_a_fault_says_where_what_and_what_to_do(line: str, says: str) -> None:
    with pytest.raises(IniRefused) as refused:
        bouncer_of(line + "\n")
    assert says in str(refused.value)


def test_whole_numbers_are_cs() -> None:
    found = bouncer_of("[pgbouncer]\nunix_socket_mode = 0770\nlisten_port = 0x1000\n")
    assert (found.whole("unix_socket_mode"), found.whole("listen_port")) == (0o770, 0x1000)
