"""What is read out of certificates, against what OpenSSL says of them."""

from __future__ import annotations

import hashlib
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pooler.net.certificate import certificate_blocks, certificates_in, read_certificate

KEYS = [
    (["rsa:2048"], ["-sha256"], "sha256"), (["rsa:2048"], ["-sha384"], "sha384"),
    (["rsa:2048"], ["-sha512"], "sha512"), (["rsa:2048"], ["-sha224"], "sha224"),
    (["rsa:2048"], ["-sha1"], "sha256"),
    (["rsa:2048"], ["-sha384", "-sigopt", "rsa_padding_mode:pss"], "sha384"),
    (["ec", "-pkeyopt", "ec_paramgen_curve:P-256"], ["-sha256"], "sha256"),
    (["ec", "-pkeyopt", "ec_paramgen_curve:P-384"], ["-sha512"], "sha512"), (["ed25519"], [], ""),
]


@pytest.mark.parametrize(("key", "signed", "expected"), KEYS)
def test_the_hash_for_channel_binding_is_that_of_the_signature(
    tmp_path: Path, key: list[str], signed: list[str], expected: str
) -> None:
    text = make(tmp_path, key, signed)
    [der] = certificates_in(f"what is said before it\n{text}and after it\n")
    found = read_certificate(der)
    assert found.hash_name == expected
    assert found.end_point == (hashlib.new(expected, der).digest() if expected else b"")
    assert certificate_blocks(f"ü {text} ü").strip() == text.strip()


@pytest.mark.parametrize("days", [1, 40_000])  # the second ends in a year that two digits do not hold
def test_its_time_is_read(tmp_path: Path, days: int) -> None:
    found = read_certificate(certificates_in(make(tmp_path, ["ed25519"], [], days))[0])
    assert (found.not_after - found.not_before).days == days
    assert abs((datetime.now(UTC) - found.not_before).total_seconds()) < 60


def test_what_is_no_certificate_is_refused_whatever_it_is(tmp_path: Path) -> None:
    der = certificates_in(make(tmp_path, ["ed25519"], []))[0]
    for cut in range(len(der)):
        try:
            read_certificate(der[:cut])
        except ValueError:
            continue
        pytest.fail(f"{cut} bytes of {len(der)} were taken for a certificate")
    with pytest.raises(ValueError, match=r"base64|character"):
        certificates_in("-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----")


def make(folder: Path, key: list[str], signed: list[str], days: int = 10) -> str:
    out = folder / "made.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", *key, "-nodes", *signed, "-subj", "/CN=x", "-days", str(days),
         "-keyout", str(folder / "made.key"), "-out", str(out)], check=True, capture_output=True)
    return out.read_text()
