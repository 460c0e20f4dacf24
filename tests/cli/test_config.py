"""`pooler config check`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import CONFIG, POLICY, SOURCES, Pooler


def test_a_sound_config_exits_0(pooler: Pooler, config: Path) -> None:
    done = pooler("config", "check", config)
    assert (done.code, done.err) == (0, "warning: auth.type is trust: any client may log in as any user\n")
    assert done.out == f"{config}: fleet orders, 2 workers, databases orders: ok\n"


def test_every_fault_of_a_config_is_told_and_exits_2(pooler: Pooler, config: Path) -> None:
    config.write_text(CONFIG.replace("workers: 2", "workers: 0") + "pool: {poolmode: x}\n")
    done = pooler("config", "check", config)
    assert done.code == 2
    assert done.err.splitlines() == [
        f"pooler: {config}: 2 faults",
        "  fleet.workers: 0 must be at least 1",
        '  pool.poolmode: no such setting; did you mean "pool_mode"?',
    ]


def test_the_faults_of_its_policies_and_its_userlist_are_its_own(pooler: Pooler, config: Path) -> None:
    (config.parent / "policy.yaml").write_text(POLICY.replace("permits: 10", "permits: 11") + "x: 1\n")
    (config.parent / "users").write_text('"a" "b"\nnonsense\n')
    config.write_text(CONFIG.replace("{type: trust}", "{type: md5, file: users}"))
    done = pooler("config", "check", config, "--json")
    answer = json.loads(done.out)
    assert (done.code, answer["ok"]) == (2, False)
    assert {fault["path"] for fault in answer["faults"]} == {"databases.orders.policy", "auth.file"}


def test_the_faults_of_its_rules_and_maps_are_told_with_their_lines(pooler: Pooler, config: Path) -> None:
    hba, ident = config.parent / "hba.conf", config.parent / "ident.conf"
    hba.write_text("host all all all md5\nhost all +staff all md5\nlocal all all ldap\n")
    ident.write_text("one two\n")
    config.write_text(CONFIG.replace(
        "{type: trust}", "{type: hba, hba_file: hba.conf, ident_file: ident.conf}"))
    done = pooler("config", "check", config)
    assert done.code == 2
    told = sorted(line.replace(str(config.parent), "").strip() for line in done.err.splitlines()[1:])
    assert [line.partition(": ")[0] + line.partition(": ")[2][:12] for line in told] == [
        "auth.hba_file/hba.conf:2:", "auth.hba_file/hba.conf:3:", "auth.ident_file/ident.conf:"]
    assert 'method "ldap" is not served: `pam` reaches a directory' in told[1]


def test_a_method_that_is_not_served_is_told_with_what_to_use_instead(pooler: Pooler, config: Path) -> None:
    config.write_text(CONFIG.replace("{type: trust}", "{type: ldap}"))
    done = pooler("config", "check", config)
    assert done.code == 2
    assert "auth.type: ldap is not served: `pam` reaches a directory" in done.err


def test_json_has_stable_keys(pooler: Pooler, config: Path) -> None:
    answer = json.loads(pooler("config", "check", config, "--json").out)
    assert answer == {
        "file": str(config),
        "ok": True,
        "faults": [],
        "warnings": ["auth.type is trust: any client may log in as any user"],
    }


def test_the_example_config_is_sound(pooler: Pooler) -> None:
    done = pooler("config", "check", SOURCES / "config" / "pooler.yaml")
    assert done.code == 0, done.err
