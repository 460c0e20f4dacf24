"""Faults that were reported about poolers: start-up packets and the settings of sessions."""

from __future__ import annotations

import pytest

from pooler.demo.client import SYNC, RawClient, ServerSaid, query, startup
from tests.differential.compare import same
from tests.differential.conftest import Rig
from tests.differential.script import Write
from tests.differential.scripts import group

pytestmark = [pytest.mark.postgres, pytest.mark.etcd, pytest.mark.slow]


def refused_login(rig: Rig, **startup: str) -> str:
    """The SQLSTATE that a login ends with."""
    base = rig.database
    with RawClient("127.0.0.1", rig.fleet.ports.listen, 10) as client, pytest.raises(ServerSaid) as said:
        client.login(base.user, base.password, base.dbname, **startup)
    return said.value.sqlstate


def shown(client: RawClient, *names: str) -> list[str | None]:
    return [client.query(f"show {name}")[0][0] for name in names]


STARTUP = {
    "extra_float_digits": "3", "statement_timeout": "12345", "search_path": "pg_catalog", "work_mem": "7MB",
    "application_name": "mine", "client_encoding": "LATIN1", "datestyle": "german", "timezone": "Asia/Tokyo",
}


def test_start_up_parameters_are_honoured_on_every_session(rig: Rig) -> None:
    """R28."""
    with rig.straight(**STARTUP) as client:
        expected = shown(client, *STARTUP)
    with rig.pooled(**STARTUP) as one, rig.pooled() as other:
        assert shown(one, *STARTUP) == expected
        one.query("begin")
        other.query("begin")  # each has had both sessions after this
        other.query("commit")
        one.query("commit")
        assert shown(one, *STARTUP) == expected
        other.query("begin")
        assert shown(one, *STARTUP) == expected
        other.query("commit")
    with rig.pooled() as other:
        assert shown(other, "statement_timeout", "search_path", "work_mem") == ["0", '"$user", public', "4MB"]


def test_an_unknown_start_up_parameter_is_refused_before_anything_runs(rig: Rig) -> None:
    """R28."""
    assert refused_login(rig, nonsense="1") == "42704"


OPTIONS = {
    "all forms": "-c geqo=off -cwork_mem=7MB --search-path=zz",
    "an escaped blank": r"-c application_name=a\ b\\c",
    "the last one wins": "-c work_mem=5MB -c work_mem=6MB",
    "nothing": "",
    "blanks": "   -c   work_mem=5MB   ",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_what_they_mean_to_the_server(rig: Rig, name: str) -> None:
    """R30."""
    wanted = ("geqo", "work_mem", "search_path", "application_name")
    with rig.straight(options=OPTIONS[name]) as client:
        expected = shown(client, *wanted)
    with rig.pooled(options=OPTIONS[name]) as client:
        assert shown(client, *wanted) == expected


def test_an_unknown_name_in_options_is_refused(rig: Rig) -> None:
    """R30."""
    assert refused_login(rig, options="-c nonsense=1") == "42704"


VERSIONS = [(3 << 16) | 2, (3 << 16) | 9999]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_newer_minor_version_is_negotiated(newest: Rig, version: int) -> None:
    """R29. NegotiateProtocolVersion is answered as by the server, and the login goes on."""
    told = []
    for pooled in (False, True):
        base = newest.database
        client = RawClient("127.0.0.1", newest.fleet.ports.listen if pooled else base.port, 10)
        client.send(startup({"user": base.user, "database": base.dbname, "_pq_.foo": "1"}, version))
        told.append(client.receive())
        assert client.receive().type == "R"
        client.close()
    assert told[0].type == told[1].type == "v"
    assert told[0].body == told[1].body


@pytest.mark.parametrize("version", [4 << 16, 2 << 16])
def test_another_major_version_is_refused(newest: Rig, version: int) -> None:
    """R29."""
    base = newest.database
    with RawClient("127.0.0.1", newest.fleet.ports.listen, 10) as client:
        client.send(startup({"user": base.user, "database": base.dbname}, version))
        said = client.receive().error()
        assert (said.fields["S"], said.sqlstate) in (("FATAL", "0A000"), ("FATAL", "08P01"))
        assert client.is_closed()


def test_settings_stay_with_the_client_that_made_them(rig: Rig) -> None:
    """R31."""
    names = ("statement_timeout", "search_path", "default_transaction_read_only")
    with rig.pooled("_one") as one, rig.pooled("_one") as two:
        fresh = shown(two, *names)
        for text in ("set statement_timeout = 1234", "set search_path = pg_catalog",
                     "set default_transaction_read_only = on"):
            one.query(text)
        for _ in range(3):
            assert shown(two, *names) == fresh
            two.query("begin; create table r31 (a int); rollback")
            assert shown(one, *names) == ["1234ms", "pg_catalog", "on"]


VALUES = [
    ("search_path", '"$user", public, "My ""Odd"" schema"'), ("search_path", ""),
    ("search_path", '"O\'Brien"'),
    *[("application_name", value) for value in ("", "O'Brien", "back\\slash", "a  b", "'; select 1 --")]]


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_values_come_back_as_they_were_however_often_they_move(
    rig: Rig, name: str, value: str
) -> None:
    """R33."""
    quoted = value.replace("'", "''")
    with rig.pooled("_one") as one, rig.pooled("_one") as two:
        one.query(f"select set_config('{name}', $v${value}$v$, false)")
        expected = shown(one, name)
        with rig.straight() as straight:
            straight.query(f"select set_config('{name}', '{quoted}', false)")
            assert shown(straight, name) == expected
        for _ in range(10):
            two.query("select 1")
            assert shown(one, name) == expected


def test_set_local_and_set_transaction_end_with_the_transaction(rig: Rig) -> None:
    """R34. And no warning comes of it."""
    with rig.pooled("_one") as one, rig.pooled("_one") as two:
        heard = []
        for text in ("begin", "set local statement_timeout = 11111",
                     "set transaction isolation level serializable",
                     "select 1", "set work_mem = '9MB'", "commit"):
            one.send(query(text))
            heard += one.until_ready()
        two.query("select 1")
        one.send(query("select 2"))
        heard += one.until_ready()
        assert not {"N", "E"} & {said.type for said in heard}
        two.query("select 1")
        assert shown(one, "statement_timeout", "transaction_isolation", "work_mem") == [
            "0", "read committed", "9MB"]
        assert shown(two, "work_mem") == ["4MB"]


def test_several_statuses_in_one_answer_pass_and_are_known(rig: Rig) -> None:
    """R35."""
    change = group("select set_config('application_name', 'x', false), set_config('datestyle', 'sql', false)")
    same(rig, [change + group("select 2") + SYNC, group("show datestyle") + SYNC,
               query("show application_name")])
    same(rig, [Write(change + SYNC, 0), Write(query("show datestyle"), 1), Write(query("show datestyle"), 0)])


def test_a_tenants_own_setting_never_shows_a_stranger_its_rows(rig: Rig) -> None:
    """R36. What a stranger finds is NULL or, as PostgreSQL leaves it behind a RESET, an empty string."""
    with rig.straight() as owner:
        owner.query("create table if not exists r36 (tenant text)")
        owner.query("truncate r36")
        owner.query("insert into r36 values ('t1'), ('t2')")
    mine = "select count(*) from r36 where tenant = current_setting('app.tenant_id', true)"
    for set_ in ("set app.tenant_id = 't1'", "select set_config('app.tenant_id', 't1', false)"):
        with rig.pooled("_one") as one, rig.pooled("_one") as two:
            one.query(set_)
            assert one.query(mine) == [["1"]]
            assert two.query(mine) == [["0"]]
            assert two.query("select coalesce(current_setting('app.tenant_id', true), '')") == [[""]]
        with rig.pooled("_one") as next_:
            assert next_.query(mine) == [["0"]]


RESETS = ["reset all", "discard all", "reset application_name", "set application_name to default"]


@pytest.mark.parametrize("reset", RESETS)
def test_a_reset_never_shows_the_poolers_own_name(newest: Rig, reset: str) -> None:
    for pool in ("_session", "_one"):
        with newest.pooled(pool, application_name="mine") as client:
            client.query("set application_name = 'other'")
            client.send(query(reset))
            told = [said.body for said in client.until_ready() if said.type == "S"]
            client.query("select 1")
            assert client.session.parameters["application_name"] == "mine"
            assert not [body for body in told if b"pooler" in body]
