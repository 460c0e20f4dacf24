"""The config file: what is read, what is refused and how it is said."""

from __future__ import annotations

import socket
from pathlib import Path

import msgpack
import pytest

from pooler.errors import UsageFault
from pooler.settings import ConfigFaults, Settings, coordinator_spec, find_config, load, warnings_of

POLICY = "schema: dbAdmissionPolicy.v1\ndatabase: orders-primary/write\ngeneration: 1\n"
SOUND = """
fleet: {name: orders, workers: 2, listen: "127.0.0.1:6432", run_dir: run, proxy_protocol_from: [127.0.0.1]}
services:
  primary: {worker_ports: 6440, database_role: write, pool_mode: transaction}
  default: {worker_ports: 6480, database_role: write, pool_mode: session}
etcd: embedded
databases:
  orders:
    hosts: ["10.0.0.11:5432", "10.0.0.12:5432"]
    policy: policies/orders.yaml
    query_wait_timeout: 750ms
    monitor: {user: watcher, password: "file:monitor"}
auth: {file: userlist.txt}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/orders.yaml").write_text(POLICY)
    (tmp_path / "userlist.txt").write_text('"alice" "secret"\n')
    (tmp_path / "monitor").write_text("hush-hush\n")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    file = folder / "pooler.yaml"
    file.write_text(text)
    return file


def faults_of(folder: Path, text: str) -> dict[str, str]:
    with pytest.raises(ConfigFaults) as refused:
        load(write(folder, text))
    return {fault.path: fault.text for fault in refused.value.faults}


@pytest.mark.parametrize(("text", "told"), [
    ("fleet:\n  name: a\n   listen: b\n", "line 3, column 10: mapping values are not allowed here: indent"),
    ("fleet:\n  name: a\n listen: b\n", "line 3, column 2: expected <block end>, but found"),
    ("fleet:\n\tname: a\n", "line 2, column 1: found character '\\t' that cannot start any token: indent"),
    ("fleet: {name: a\n", "line 2, column 1: expected ',' or '}', but got '<stream end>': a [ or {"),
    ("fleet: *x\n", "line 1, column 8: found undefined alias 'x'"),
    ("fleet: \x00\n", "unacceptable character #x0000"),
])
def test_what_is_no_yaml_is_told_by_its_line_and_what_to_do(folder: Path, text: str, told: str) -> None:
    assert faults_of(folder, text)[""].startswith(f"it is not YAML: {told}")


def test_of_what_is_no_yaml_no_text_is_shown_for_it_may_be_a_secret(folder: Path) -> None:
    (folder / "policies/orders.yaml").write_text("a: b: hunter2\n")
    assert "hunter2" not in str(faults_of(folder, SOUND))
    assert "line 1, column 5" in faults_of(folder, SOUND)["databases.orders.policy"]
    assert "hunter2" not in str(faults_of(folder, "auth: password: hunter2\n"))


def test_a_sound_file_is_read_with_units_defaults_and_paths_of_its_own_folder(folder: Path) -> None:
    settings = load(write(folder, SOUND))
    assert settings.fleet.run_dir == folder / "run"
    assert settings.auth.file == folder / "userlist.txt"
    assert settings.databases["orders"].query_wait_timeout_seconds == 0.75
    assert settings.databases["orders"].ledger == "orders-primary/write"
    assert settings.pool.server_lifetime_seconds == 3600
    assert settings.pool_size("orders") == 20
    assert settings.pool_mode("orders", "default") == "session"
    assert settings.etcd.embedded


def test_every_fault_of_a_file_is_told_at_once_with_path_value_and_what_is_allowed(folder: Path) -> None:
    text = (
        SOUND.replace("name: orders", "name: Or!")
        .replace("workers: 2", "workers: 99")
        .replace("policy: policies/orders.yaml", "pool_mode: tx\n    pool_size: '5'")
        .replace("query_wait_timeout: 750ms", "query_wait_timeout: 5 parsecs")
        .replace("6480", "99999")
    )
    assert faults_of(folder, text) == {
        "fleet.name": '"Or!" must match ^[a-z0-9-]{1,24}$',
        "fleet.workers": "99 must be at most 16",
        "services.default.worker_ports": "99999 must be at most 65535",
        "databases.orders.policy": "is required (`pooler init --dsn …` writes a policy that fits a server)",
        "databases.orders.pool_mode": '"tx" is not one of session, transaction, statement',
        "databases.orders.pool_size": '"5" must be a whole number',
        "databases.orders.query_wait_timeout": (
            '"5 parsecs" is not a duration: write 250ms, 5s, 2m, 1h or plain seconds'
        ),
    }


@pytest.mark.parametrize(
    ("wrong", "path", "near"),
    [
        ("pool: {defualt_pool_size: 1}", "pool.defualt_pool_size", "default_pool_size"),
        ("pool: {query_wait_timeout_seconds: 1}", "pool.query_wait_timeout_seconds", "query_wait_timeout"),
        ("tenants: [{match: {usr: x}}]", "tenants.0.match.usr", "user"),
        ("pools: {}", "pools", "pool"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_known_name(
    folder: Path, wrong: str, path: str, near: str
) -> None:
    assert faults_of(folder, SOUND + wrong) == {path: f'no such setting; did you mean "{near}"?'}


def test_an_unknown_key_of_a_database_is_named_by_the_keys_of_a_database(folder: Path) -> None:
    faults = faults_of(folder, SOUND.replace("hosts:", "host:"))
    assert faults["databases.orders.host"] == 'no such setting; did you mean "hosts"?'
    assert faults["databases.orders.hosts"] == "is required"


def test_a_fault_in_one_section_does_not_hide_a_contradiction_among_others(folder: Path) -> None:
    text = SOUND.replace("worker_ports: 6480", "worker_ports: 6441") + "log: {level: loud}\n"
    faults = faults_of(folder, text)
    assert set(faults) == {"log.level", "services.default.worker_ports"}
    assert "6441 is also taken by services.primary.worker_ports" in faults["services.default.worker_ports"]


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        ("worker_ports: 6440", "worker_ports: 6432", "services.primary.worker_ports"),
        ("worker_ports: 6440", "worker_ports: 9600", "http.worker_ports"),
        ("worker_ports: 6440", "worker_ports: 65535", "services.primary.worker_ports"),
        ("policies/orders.yaml", "policies/none.yaml", "databases.orders.policy"),
        ("file: userlist.txt", "file: none.txt", "auth.file"),
        ("auth: {file: userlist.txt}", "", "auth.file"),
        ("etcd: embedded", "etcd: {}", "etcd.endpoints"),
        ("etcd: embedded\n", "", "etcd"),
        ("run_dir: run", "run_dir: " + "x" * 120, "fleet.run_dir"),
        ("file:monitor", "file:none", "databases.orders.monitor.password"),
        ("file:monitor", "env:POOLER_TEST_UNSET", "databases.orders.monitor.password"),
        ("[127.0.0.1]", "[localhost]", "fleet.proxy_protocol_from.0"),
        ("pool_mode: session}", "haproxy_port: 5433}", "services.default.haproxy_port"),
    ],
)
def test_one_fault_is_told_at_its_path_and_nothing_else_is(
    folder: Path, before: str, after: str, path: str
) -> None:
    assert set(faults_of(folder, SOUND.replace(before, after))) == {path}


@pytest.mark.parametrize("url", [
    "db:8008", "ftp://db:8008", "http://", "http://a:word@db:8008", "http://db/cluster", "http://db:99999"])
def test_a_url_of_patronis_is_a_host_and_a_port_and_nothing_more(folder: Path, url: str) -> None:
    text = SOUND + f'failover: {{detect: patroni, patroni: ["https://db1:8008", "{url}"]}}\n'
    assert set(faults_of(folder, text)) == {"failover.patroni[1]"}


def test_a_key_written_twice_is_a_fault(folder: Path) -> None:
    assert "written twice" in faults_of(folder, SOUND + "log: {}\nlog: {}\n")[""]


@pytest.mark.parametrize("text", ["x: " + "[" * 20_000, "#" * (1 << 20) + "x"])
def test_what_is_nested_too_deeply_or_too_long_is_one_fault_of_the_file(folder: Path, text: str) -> None:
    told = faults_of(folder, text)
    assert list(told) == [""]
    assert "it is not YAML: " in told[""]


def test_no_fault_has_a_terminals_escapes_in_it(folder: Path) -> None:
    text = SOUND + 'log: {format: "\\e[2J", "\\e[2Jx": 1, "\\e[2Jx": 2}\n"\\e[2Jy": 1\n'
    told = faults_of(folder, text)
    assert len(told) > 2
    assert all(each.isprintable() for fault in told.items() for each in fault), told


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [", "a: !!python/object:x {}", "{[1]: 2}", "\x01", "[" * 5000])
def test_what_is_no_config_is_one_clear_fault(folder: Path, text: str) -> None:
    assert set(faults_of(folder, text)) <= {"", "fleet", "etcd", "databases"}


def test_a_secret_never_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLER_TEST_TOKEN", "hush-token")
    settings = load(write(folder, SOUND + 'http: {token: "env:POOLER_TEST_TOKEN"}'))
    assert settings.http.token is not None
    assert settings.http.token.get_secret_value() == "hush-token"
    assert "hush" not in repr(settings)
    for wrong in ("password: {hush: 1}", "password: [hush]", "monitor: host=hush"):
        broken = SOUND.replace('monitor: {user: watcher, password: "file:monitor"}', f"user: u\n    {wrong}")
        assert "hush" not in str(faults_of(folder, broken))


def test_settings_survive_the_link_unchanged(folder: Path) -> None:
    settings = load(write(folder, SOUND))
    for file in (folder / "policies/orders.yaml", folder / "userlist.txt", folder / "monitor"):
        file.unlink()
    assert Settings.from_wire(msgpack.unpackb(msgpack.packb(settings.to_wire()))) == settings


def test_a_host_goes_by_the_name_it_is_given(folder: Path) -> None:
    named = load(write(folder, SOUND.replace("fleet: {", "fleet: {host_name: rack-1.b, ")))
    assert coordinator_spec(named)["host"] == "rack-1.b"
    assert coordinator_spec(load(write(folder, SOUND)))["host"] == socket.gethostname()


@pytest.mark.parametrize("name", ["", "two words", "a/b", "x" * 65])
def test_a_hosts_name_is_one_word(folder: Path, name: str) -> None:
    with pytest.raises(ConfigFaults, match=r"fleet\.host_name"):
        load(write(folder, SOUND.replace("fleet: {", f'fleet: {{host_name: "{name}", ')))


def test_the_coordinator_is_told_everything_it_needs(folder: Path) -> None:
    spec = coordinator_spec(load(write(folder, SOUND)))
    assert set(spec) == {
        "fleet",
        "prefix",
        "host",
        "machine_id",
        "run_dir",
        "socket",
        "lease_ttl_seconds",
        "log",
        "etcd",
        "http_fd",
        "databases",
        "reconcile",
        "node_identity",
        "patroni",
        "fence_command",
        "drain_timeout_seconds",
        "orphan_connect_grace_seconds",
        "unknown_terminate_after_seconds",
    }
    assert spec["etcd"]["embedded"] is True
    assert spec["databases"] == [
        {
            "db": "orders-primary/write",
            "name": "orders",
            "dbname": "orders",
            "role": "write",
            "policy": POLICY,
            "max_replica_lag_seconds": None,
            "users": ["alice"],
            "hosts": ["10.0.0.11:5432", "10.0.0.12:5432"],
            "monitor": {"user": "watcher", "password": "hush-hush", "tls": {"sslmode": "prefer"}},
        }
    ]


def test_two_entries_may_share_a_ledger_but_not_with_another_role(folder: Path) -> None:
    second = '  again: {hosts: "10.0.0.11:5432", dbname: orders, policy: policies/orders.yaml, role: ROLE}\n'
    both = SOUND.replace("auth:", second + "auth:")
    assert (
        load(write(folder, both.replace("ROLE", "write"))).databases["again"].ledger == "orders-primary/write"
    )
    assert set(faults_of(folder, both.replace("ROLE", "read"))) == {"databases.again.policy"}


def test_a_service_finds_the_database_of_its_role_and_the_shared_port_goes_by_name(folder: Path) -> None:
    settings = load(write(folder, SOUND))
    assert settings.database_for("orders", "primary") == "orders"
    assert settings.database_for("orders", None) == "orders"
    assert settings.database_for("nothing", None) is None


def test_no_monitor_is_a_warning(folder: Path) -> None:
    without = SOUND.replace('monitor: {user: watcher, password: "file:monitor"}', "pool_size: 5")
    assert any("databases.orders.monitor" in line for line in warnings_of(load(write(folder, without))))
    assert warnings_of(load(write(folder, SOUND))) == []


def test_the_config_is_looked_for_in_order_and_the_error_lists_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = (Path("pooler.yaml"), tmp_path / "etc/pooler.yaml")
    monkeypatch.setattr("pooler.settings_load.CONFIG_PLACES", places)
    monkeypatch.delenv("POOLER_CONFIG", raising=False)
    with pytest.raises(UsageFault, match=r"-c .*POOLER_CONFIG.*pooler[.]yaml.*/etc/pooler[.]yaml"):
        find_config()
    here = write(tmp_path, "")
    assert find_config() == Path("pooler.yaml")
    by_environment = tmp_path / "env.yaml"
    by_environment.write_text("")
    monkeypatch.setenv("POOLER_CONFIG", str(by_environment))
    assert find_config() == by_environment
    assert find_config(here) == here
    with pytest.raises(UsageFault, match="named by -c"):
        find_config(tmp_path / "none.yaml")
