"""What each way to log in needs of the config."""

from __future__ import annotations

from typing import Any

import pytest

from pooler.settings_auth import auth_faults
from pooler.settings_models import AuthSettings, DatabaseSettings
from pooler.settings_tls import ClientTlsSettings
from pooler.settings_units import PolicyFile


def database(**more: Any) -> DatabaseSettings:
    return DatabaseSettings.model_validate(
        {"hosts": ["127.0.0.1:1"], "policy": PolicyFile.__new__(PolicyFile), **more})


def faults(auth: dict[str, Any], **databases: DatabaseSettings) -> dict[str, str]:
    context = {"resolved": True, "base": "/"}
    return dict(auth_faults(AuthSettings.model_validate(auth, context=context), databases))


@pytest.mark.parametrize("auth", [
    {"type": "scram-sha-256", "file": "/x"}, {"type": "md5", "user": "asker"}, {"type": "trust"},
    {"type": "plain", "file": "/x"}, {"type": "cert"}, {"type": "peer", "map": "m", "ident_file": "/x"},
    {"type": "hba", "hba_file": "/x"}, {"type": "pam"},
    {"user": "asker", "password": "p", "query": "select name, secret from f($1)", "dbname": "d"},
])
def test_a_sound_section_has_no_fault(auth: dict[str, Any]) -> None:
    assert faults(auth, d=database()) == {}


@pytest.mark.parametrize(("auth", "path", "words"), [
    ({"type": "md5"}, "auth.file", "auth.user"),
    ({"type": "hba"}, "auth.hba_file", "is required"),
    ({"type": "peer", "map": "m"}, "auth.map", "auth.ident_file"),
    ({"type": "trust", "password": "p"}, "auth.password", "auth.user"),
    ({"user": "asker", "query": "select 1"}, "auth.query", "$1"),
    ({"user": "asker", "dbname": "gone"}, "auth.dbname", '"gone"'),
    ({"type": "any"}, "databases.d.user", "is required"),
])
def test_what_is_missing_is_named(auth: dict[str, Any], path: str, words: str) -> None:
    assert words in faults(auth, d=database())[path]


def test_certificates_need_somebody_who_signs_them() -> None:
    found = dict(auth_faults(AuthSettings.model_validate({"type": "cert"}), {}, ClientTlsSettings()))
    assert found.keys() == {"client_tls.ca_file"}


def test_a_database_with_an_asker_of_its_own_needs_no_file() -> None:
    assert faults({"type": "md5"}, d=database(auth_user="asker")) == {}
    assert faults({"type": "trust"}, d=database(auth_query="select", auth_dbname="gone")).keys() == {
        "databases.d.auth_query", "databases.d.auth_dbname"}


def test_ldap_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(ValueError, match="ldap is not served: `pam` reaches a directory"):
        AuthSettings.model_validate({"type": "ldap"})
