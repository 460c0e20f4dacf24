"""Which question a client gets, and which answers fit."""

from __future__ import annotations

import hashlib

import pytest

from pooler.wire import auth
from pooler.wire.auth import AuthType, Method, Secret, ServerSecret, md5_secret
from pooler.wire.scram import Keys, Verifier

VERIFIER = Verifier.derive(b"pw", b"saltsaltsalt")
PLAIN = Secret(plain=b"pw")
MD5 = Secret(md5=b"md5" + hashlib.md5(b"pwann").hexdigest().encode())
SCRAM = Secret(scram=VERIFIER)
SALT = b"\x01\x02\x03\x04"


def test_the_three_stored_forms_are_told_apart() -> None:
    assert Secret.parse(b"pw") == PLAIN
    assert Secret.parse(auth.md5_secret(b"pw", "ann")) == MD5
    assert Secret.parse(VERIFIER.secret().encode()) == SCRAM
    assert Secret.parse(b"md5short") == Secret(plain=b"md5short")
    with pytest.raises(ValueError, match="SCRAM"):
        Secret.parse(b"SCRAM-SHA-256$broken")


def test_no_secret_is_shown() -> None:
    everything = repr([PLAIN, MD5, SCRAM, ServerSecret.of(PLAIN), ServerSecret.of(MD5)])
    assert "pw" not in everything
    assert MD5.md5 is not None
    assert MD5.md5.decode() not in everything


@pytest.mark.parametrize(("kind", "secret", "method"), [
    (AuthType.TRUST, None, Method.TRUST),
    (AuthType.PASSWORD, SCRAM, Method.CLEARTEXT),
    (AuthType.MD5, PLAIN, Method.MD5),
    (AuthType.MD5, MD5, Method.MD5),
    (AuthType.MD5, SCRAM, Method.SCRAM),
    (AuthType.MD5, None, Method.CLEARTEXT),  # what `unknown` says
    (AuthType.MD5, Secret(plain=b""), Method.CLEARTEXT),  # nor is one whom no password lets in told apart
    (AuthType.SCRAM, PLAIN, Method.SCRAM),
    (AuthType.SCRAM, MD5, Method.SCRAM),
    (AuthType.SCRAM, None, Method.SCRAM),
])
def test_the_question_depends_on_the_stored_secret_only_under_md5(
    kind: AuthType, secret: Secret | None, method: Method
) -> None:
    assert auth.choose_method(kind, secret, Method.CLEARTEXT) is method


@pytest.mark.parametrize("secret", [PLAIN, MD5])
def test_md5_answers(secret: Secret) -> None:
    answer = auth.answer_md5(ServerSecret.of(secret), "ann", SALT)
    assert answer is not None
    assert answer == b"md5" + hashlib.md5(
        hashlib.md5(b"pwann").hexdigest().encode() + SALT).hexdigest().encode()
    assert auth.check_md5(secret, "ann", SALT, answer)
    assert not auth.check_md5(secret, "ann", b"\0\0\0\0", answer)
    assert not auth.check_md5(secret, "ann", SALT, b"md5")


def test_nobody_logs_in_without_a_usable_secret() -> None:
    nothing = auth.md5_answer(auth.md5_secret(b"", "ann"), SALT)  # what an empty password would give
    for secret in (None, Secret(plain=b""), SCRAM):
        assert not auth.check_md5(secret, "ann", SALT, nothing)
    assert auth.answer_md5(ServerSecret(), "ann", SALT) is None


@pytest.mark.parametrize("secret", [PLAIN, MD5, SCRAM])
def test_cleartext_fits_every_stored_form(secret: Secret) -> None:
    assert auth.check_cleartext(secret, "ann", b"pw")
    assert not auth.check_cleartext(secret, "ann", b"pW")
    assert not auth.check_cleartext(secret, "ann", b"")


def test_an_empty_password_never_fits() -> None:
    assert not auth.check_cleartext(Secret(plain=b""), "ann", b"")
    assert not auth.check_cleartext(None, "ann", b"x")


KEYS, OTHER_KEYS = (Keys.derive(password, b"salt", 4096) for password in (b"pw", b"other"))
HELD = ServerSecret
HASH, OTHER_HASH = (md5_secret(password, "ann") for password in (b"pw", b"other"))


@pytest.mark.parametrize(("before", "shown", "after"), [
    (HELD(), HELD(plain=b"pw"), HELD(plain=b"pw")),
    (HELD(plain=b"pw"), HELD(), HELD(plain=b"pw")),
    (HELD(plain=b"pw"), HELD(plain=b""), HELD(plain=b"pw")),
    (HELD(md5=HASH), HELD(plain=b""), HELD(md5=HASH)),
    (HELD(plain=b""), HELD(plain=b"pw"), HELD(plain=b"pw")),
    (HELD(plain=b"pw"), HELD(md5=HASH), HELD(plain=b"pw", md5=HASH)),
    (HELD(plain=b"pw", keys=KEYS), HELD(md5=HASH), HELD(plain=b"pw", md5=HASH, keys=KEYS)),
    (HELD(plain=b"pw", keys=KEYS), HELD(keys=KEYS), HELD(plain=b"pw", keys=KEYS)),
    (HELD(plain=b"pw", keys=KEYS), HELD(plain=b"pw"), HELD(plain=b"pw", keys=KEYS)),
    (HELD(keys=KEYS), HELD(md5=HASH), HELD(md5=HASH, keys=KEYS)),
    (HELD(md5=HASH), HELD(keys=KEYS), HELD(md5=HASH, keys=KEYS)),
    (HELD(md5=HASH), HELD(plain=b"pw"), HELD(plain=b"pw")),
])
def test_a_login_that_shows_less_of_a_password_takes_nothing_away(
    before: ServerSecret, shown: ServerSecret, after: ServerSecret
) -> None:
    """One by trust, and one by MD5 where another was by the password itself."""
    assert before.followed_by(shown, "ann") == after


@pytest.mark.parametrize("shown", [HELD(plain=b"other"), HELD(md5=OTHER_HASH), HELD(keys=OTHER_KEYS)])
@pytest.mark.parametrize("before", [
    HELD(plain=b"pw"), HELD(plain=b"pw", keys=KEYS), HELD(plain=b"pw", md5=HASH)])
def test_another_password_takes_the_place_of_all_that_was_held(
    before: ServerSecret, shown: ServerSecret
) -> None:
    assert before.followed_by(shown, "ann") == shown
