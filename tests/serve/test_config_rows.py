"""SHOW CONFIG names every setting as PgBouncer does, with its default, and no secret."""

from __future__ import annotations

from pathlib import Path

from pooler.serve.config_rows import config_rows
from pooler.settings import load

POLICY = """
schema: dbAdmissionPolicy.v1
database: o/write
generation: 1
serverSessionPermits: 10
adminReserve: 1
executionClasses: {interactive: {permits: 10, maxQueue: 8}}
fairness: weighted-deficit-v2
"""
CONFIG = """
fleet: {name: o, run_dir: run}
etcd: {endpoints: ["127.0.0.1:2379"], user: u, password: hush}
auth: {type: trust, user: asker, password: hush}
databases: {o: {hosts: ["127.0.0.1:5432"], policy: o.yaml, password: hush, user: u}}
pool: {query_wait_timeout: 7s, default_pool_size: 3}
"""


def test_every_setting_has_its_value_default_and_source(tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text(POLICY)
    (tmp_path / "pooler.yaml").write_text(CONFIG)
    rows = {str(row["key"]): row for row in config_rows(load(tmp_path / "pooler.yaml"))}
    assert rows["query_wait_timeout"] == {
        "key": "query_wait_timeout", "value": "7", "default": "120", "changeable": "yes", "source": "file"}
    assert rows["server_idle_timeout"]["source"] == "default"
    assert rows["default_pool_size"]["value"] == "3"
    assert rows["listen_port"]["changeable"] == "no"
    assert (rows["server_tls_sslmode"]["value"], rows["client_tls_sslmode"]["default"]) == (
        "prefer", "disable")
    assert {"client_tls_key_file", "client_tls13_ciphers", "server_tls_ca_file"} <= rows.keys()
    assert rows["auth_query"]["value"] == rows["auth_query"]["default"]
    assert (rows["auth_type"]["value"], rows["auth_user"]["value"]) == ("trust", "asker")
    assert "hush" not in str(rows)
    assert list(rows) == sorted(rows)
