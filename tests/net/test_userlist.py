"""PgBouncer's userlist: what it may hold, and how its faults are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pooler.errors import UsageFault
from pooler.net.userlist import parse_userlist, read_userlist
from pooler.wire.auth import Method, Secret, md5_secret
from pooler.wire.scram import Verifier

VERIFIER = Verifier.derive(b"pw", b"saltsaltsalt")


def test_every_form_a_line_may_have() -> None:
    users = parse_userlist(b'\n'.join([
        b'; a comment',
        b'"ann" "secret"',
        b'  "quo""te" "pa""ss"  ignored "rest"\r',
        b'"bob""" ""',
        b'',
        b'"md5" "' + md5_secret(b"pw", "md5") + b'"',
        b'"scram" "' + VERIFIER.secret().encode() + b'"',
        b'"caf\xe9" "x;y"',
        b'"ann" "later wins"',
    ]), "f").users
    assert users == {
        "ann": Secret(plain=b"later wins"),
        'quo"te': Secret(plain=b'pa"ss'),
        'bob"': Secret(plain=b""),
        "md5": Secret(md5=md5_secret(b"pw", "md5")),
        "scram": Secret(scram=VERIFIER),
        "caf\udce9": Secret(plain=b"x;y"),
    }


def test_every_fault_is_named_with_its_line_and_no_secret() -> None:
    content = b'"ok" "x"\nann "topsecret"\n"bob"\n"bob" topsecret\n"bob" "topsecret""\n"" "topsecret"\n' \
              b'"s" "SCRAM-SHA-256$topsecret"\n'
    with pytest.raises(UsageFault) as fault:
        parse_userlist(content, "users.txt")
    lines = str(fault.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == [f"users.txt:{n}:" for n in (2, 3, 4, 5, 6, 7)]
    assert "topsecret" not in str(fault.value)


def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "users.txt"
    for secret in (b"one", b"two"):
        path.write_bytes(b'"ann" "' + secret + b'"\n')
        users = read_userlist(path)
        assert users.find("ann") == Secret(plain=secret)
        assert users.find("bob") is None


def test_a_missing_file_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r"nowhere: cannot be read: No such file"):
        read_userlist(tmp_path / "nowhere")


def test_unknown_users_are_asked_what_most_are_asked() -> None:
    scram = b'"s" "' + VERIFIER.secret().encode() + b'"\n'
    assert parse_userlist(b"", "f").usual_method is Method.SCRAM
    assert parse_userlist(scram, "f").usual_method is Method.SCRAM
    assert parse_userlist(scram + b'"a" "x"\n"b" "y"\n', "f").usual_method is Method.MD5


def test_a_userlist_shows_no_secret() -> None:
    assert "secret" not in repr(parse_userlist(b'"ann" "secret"', "f"))
