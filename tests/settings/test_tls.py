"""The TLS sections: what they accept, and one clear line for whatever OpenSSL would refuse."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from pooler.settings import ConfigFaults, Settings, coordinator_spec, load, warnings_of
from tests.support.certificates import Authority, Pair

POLICY = "database: app/write\n"
Load = Callable[..., Settings]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.host("db.test")


@pytest.fixture
def load_with(tmp_path: Path) -> Load:
    def make(**sections: Any) -> Settings:
        (tmp_path / "policy.yaml").write_text(POLICY)
        config = {
            "fleet": {"name": "t", "run_dir": str(tmp_path / "run")}, "etcd": "embedded",
            "auth": {"type": "trust"},
            "databases": {"app": {
                "hosts": ["127.0.0.1:1"], "policy": "policy.yaml", "monitor": {"user": "m"}}},
            **sections}
        path = tmp_path / "pooler.yaml"
        path.write_text(yaml.safe_dump(config))
        return load(path)
    return make


def fault(load_with: Load, **sections: Any) -> tuple[str, str]:
    """The one fault: where, and what."""
    with pytest.raises(ConfigFaults) as refused:
        load_with(**sections)
    [found] = refused.value.faults
    assert "\n" not in found.text
    return found.path, found.text


def test_clients_are_offered_none_and_servers_are_asked_unless_something_is_said(load_with: Load) -> None:
    settings = load_with()
    assert (settings.client_tls.sslmode, settings.server_tls.sslmode) == ("disable", "prefer")


def test_every_setting_is_accepted_and_survives_the_link_with_the_files_content(
    load_with: Load, authority: Authority, pair: Pair
) -> None:
    files = {"ca_file": "tls/ca.pem", "cert_file": "tls/host.crt", "key_file": "tls/host.key"}
    words = {"protocols": "tlsv1.2", "ciphers": "HIGH:!aNULL"}
    settings = load_with(
        client_tls={"sslmode": "verify-full", **files, **words, "ecdhcurve": "prime256v1",
                    "dheparams": "legacy"},
        server_tls={"sslmode": "verify-ca", **files, **words})
    pair.key.write_text("changed meanwhile")
    again = Settings.from_wire(settings.to_wire())
    assert again == settings
    assert again.client_tls.key_file is not None
    assert "PRIVATE KEY" in again.client_tls.key_file.text
    assert "PRIVATE KEY" not in repr(again)
    monitor = coordinator_spec(again)["databases"][0]["monitor"]
    assert monitor["tls"] == {"sslmode": "verify-ca", "sslrootcert": str(authority.file),
                              "sslcert": str(pair.cert), "sslkey": str(pair.key)}


@pytest.mark.parametrize("mode", ["allow", "prefer", "require", "verify-ca", "verify-full"])
def test_a_mode_that_encrypts_needs_a_certificate_to_show(load_with: Load, mode: str) -> None:
    path, text = fault(load_with, client_tls={"sslmode": mode})
    assert path == "client_tls.sslmode"
    assert text == f"{mode} needs cert_file and key_file: what clients are shown"


@pytest.mark.parametrize("section", ["client_tls", "server_tls"])
@pytest.mark.parametrize("mode", ["verify-ca", "verify-full"])
def test_a_mode_that_verifies_needs_an_authority(
    load_with: Load, pair: Pair, section: str, mode: str
) -> None:
    own = {"cert_file": str(pair.cert), "key_file": str(pair.key)}
    path, text = fault(load_with, **{section: {"sslmode": mode, **own}})
    assert path == f"{section}.sslmode"
    assert text.startswith(f"{mode} needs ca_file")


def offer(pair: Pair, **more: str) -> dict[str, str]:
    return {"sslmode": "require", "cert_file": str(pair.cert), "key_file": str(pair.key), **more}


WORDS = [
    ("protocols", "tlsv9", "is not one of"), ("protocols", "tlsv1.1,tlsv1.3", "leaves out"),
    ("ciphers", "no such", "OpenSSL knows no cipher"), ("ecdhcurve", "no such", "OpenSSL knows no curve"),
    ("dheparams", "4096", "is not one of auto, legacy, none"),
    ("tls13_ciphers", "no such", "ciphers of TLS 1.3|knows no cipher"),
    ("sslmode", "maybe", '"maybe" is not one of disable, allow, prefer'),
]


@pytest.mark.parametrize(("setting", "value", "says"), WORDS)
def test_a_word_that_means_nothing_is_named(
    load_with: Load, pair: Pair, setting: str, value: str, says: str
) -> None:
    path, text = fault(load_with, client_tls=offer(pair, **{setting: value}))
    assert path == f"client_tls.{setting}"
    assert any(each in text for each in says.split("|")), text


def test_files_that_cannot_serve_are_named(
    load_with: Load, authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    other = authority.host("other.test", file="other")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    encrypted = tmp_path / "encrypted.key"
    subprocess.run(["openssl", "pkey", "-in", str(pair.key), "-aes256", "-passout", "pass:secret", "-out",
                    str(encrypted)], check=True, capture_output=True)
    other_kind = Authority(tmp_path / "rsa", trustme.KeyType.RSA).host("db.test")
    cases = [
        ("key_file", str(other_kind.key), "is not the key of the certificate"),
        ("key_file", str(other.key), "is not the key of the certificate"),
        ("key_file", str(pair.cert), "there is no private key in it"),
        ("key_file", str(encrypted), "it is encrypted"),
        ("key_file", str(tmp_path / "gone"), "cannot read"),
        ("cert_file", str(pair.key), "there is no certificate in it"),
        ("cert_file", str(empty), "is not a PEM file"),
        ("cert_file", str(broken), "a certificate in it is broken"),
        ("ca_file", str(pair.key), "there is no certificate in it"),
        ("ca_file", str(broken), "a certificate in it is broken"),
    ]
    for setting, value, says in cases:
        path, text = fault(load_with, client_tls=offer(pair, **{setting: value}))
        assert (path, says in text) == (f"client_tls.{setting}", True), (setting, value, path, text)
        assert value in text or setting == "sslmode"
    path, text = fault(load_with, server_tls={"cert_file": str(pair.cert)})
    assert (path, "belong together" in text) == ("server_tls.cert_file", True)


def test_a_certificate_that_expired_is_a_warning(load_with: Load, authority: Authority) -> None:
    """A fleet must come up again at night though its clients do not verify what has just expired."""
    old = authority.host("db.test", file="old", days=-1)
    [line] = warnings_of(load_with(client_tls=offer(old)))[-1:]
    assert line.startswith(f"client_tls.cert_file: {old.cert}: a certificate expired at 20")
    fresh = authority.host("db.test", file="fresh")
    assert not [line for line in warnings_of(load_with(client_tls=offer(fresh))) if "tls" in line]
