"""SCRAM-SHA-256 against the RFC's own exchange, a second implementation, and everything a liar may send."""

from __future__ import annotations

from base64 import b64decode, b64encode

import pytest
import scramp
from hypothesis import given
from hypothesis import strategies as st

from pooler.errors import LoginRefused, PoolerError, ProtocolViolation
from pooler.wire import scram
from pooler.wire.scram import ClientExchange, Keys, ServerExchange, Verifier

# RFC 7677, section 3 (its user name is in the message, ours is always empty, so the bare message is replaced)
RFC_CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
RFC_SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
RFC_SALT = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
RFC_CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
RFC_SERVER_FIRST = (b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
                    b"s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096")
RFC_CLIENT_FINAL = (b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
                    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
RFC_SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="

SALT = b"0123456789abcdef"
SECRET = Verifier.derive(b"pencil", SALT)
RIGHT = Keys.from_salted(scram.salted_password(b"pencil", SALT, 4096))


def server(nonce: str = "servernonce") -> ServerExchange:
    return ServerExchange(nonce=nonce, salt=SALT, iterations=4096)


def run(client_keys: Keys, verifier: Verifier = SECRET) -> tuple[bytes, Keys] | None:
    client, ours = ClientExchange(nonce="clientnonce"), server()
    client.challenge(ours.first(client.first()))
    proven = ours.final(client.final(client_keys), verifier)
    if proven is not None:
        client.finish(proven[0])
    return proven


def test_the_servers_half_of_the_rfc_exchange() -> None:
    exchange = ServerExchange(nonce=RFC_SERVER_NONCE, salt=RFC_SALT, iterations=4096)
    assert exchange.first(RFC_CLIENT_FIRST) == RFC_SERVER_FIRST
    proven = exchange.final(RFC_CLIENT_FINAL, Verifier.derive(b"pencil", RFC_SALT))
    assert proven is not None
    assert proven[0] == RFC_SERVER_FINAL


def test_the_clients_half_of_the_rfc_exchange() -> None:
    exchange = ClientExchange(nonce=RFC_CLIENT_NONCE)
    exchange._first_bare = b"n=user,r=rOprNGfwEbeRWgbNEkqO"
    salt, iterations = exchange.challenge(RFC_SERVER_FIRST)
    keys = Keys.from_salted(scram.salted_password(b"pencil", salt, iterations))
    assert exchange.final(keys) == RFC_CLIENT_FINAL
    exchange.finish(RFC_SERVER_FINAL)


@pytest.mark.parametrize("password", ["pencil", "I\u00adX", "ªöß", "pass\u00a0word"])
def test_a_second_implementation_logs_in_to_ours(password: str) -> None:
    verifier = Verifier.derive(password.encode(), SALT)
    client = scramp.ScramClient(["SCRAM-SHA-256"], "ann", password)
    ours = server()
    client.set_server_first(ours.first(client.get_client_first().encode()).decode())
    proven = ours.final(client.get_client_final().encode(), verifier)
    assert proven is not None
    client.set_server_final(proven[0].decode())


def test_ours_logs_in_to_a_second_implementation() -> None:
    mechanism = scramp.ScramMechanism("SCRAM-SHA-256")
    salt, stored, key, rounds = mechanism.make_auth_info("pencil", salt=SALT)
    theirs = mechanism.make_server(lambda _user: (salt, stored, key, rounds))
    client = ClientExchange(nonce="clientnonce")
    theirs.set_client_first("n,,n=ann,r=clientnonce")
    client._first_bare = b"n=ann,r=clientnonce"  # it insists on a user name, PostgreSQL ignores it
    client.challenge(theirs.get_server_first().encode())
    theirs.set_client_final(client.final(RIGHT).decode())
    client.finish(theirs.get_server_final().encode())


def test_the_clients_key_is_recovered_and_logs_in_elsewhere() -> None:
    proven = run(RIGHT)
    assert proven is not None
    assert proven[1] == RIGHT
    assert run(proven[1]) is not None


def test_a_wrong_password_and_an_unknown_user_fail_in_the_same_step() -> None:
    wrong = Keys.from_salted(scram.salted_password(b"pen", SALT, 4096))
    assert run(wrong) is None
    assert run(RIGHT, scram.mock_verifier(b"mock", "nobody")) is None


def test_the_mock_is_the_same_for_the_same_name_only() -> None:
    assert scram.mock_verifier(b"k", "a") == scram.mock_verifier(b"k", "a")
    assert scram.mock_verifier(b"k", "a").salt != scram.mock_verifier(b"k", "b").salt
    assert scram.mock_verifier(b"k", "a").salt != scram.mock_verifier(b"l", "a").salt


def test_a_stored_secret_reads_back_and_shows_nothing() -> None:
    assert Verifier.parse(SECRET.secret()) == SECRET
    shown = repr(SECRET) + repr(RIGHT)
    assert not any(b64encode(key).decode() in shown or repr(key) in shown
                   for key in (SECRET.stored_key, SECRET.server_key, RIGHT.client_key))


@pytest.mark.parametrize("secret", [
    "SCRAM-SHA-256$4096:c2FsdA==$x", "SCRAM-SHA-256$0:c2FsdA==$a:b", "SCRAM-SHA-1$4096:c2FsdA==$a:b",
    "SCRAM-SHA-256$99999999999:c2FsdA==$a:b", "SCRAM-SHA-256$4096:c2FsdA==$YQ==:YQ==", "SCRAM-SHA-256$",
    "SCRAM-SHA-256$000000001999999:c2FsdA==$a:b"])
def test_a_broken_stored_secret_is_refused_without_being_shown(secret: str) -> None:
    with pytest.raises(ValueError, match="SCRAM-SHA-256") as refused:
        Verifier.parse(secret)
    assert secret not in str(refused.value)


def test_a_password_that_saslprep_refuses_is_used_as_it_is() -> None:
    for raw in (b"\xff\xfe", "a\u0007é".encode(), "\u00ad".encode()):
        assert scram.prepared(raw) == raw
    assert scram.prepared("Ⅸ".encode()) == b"IX"


BAD_FIRST = [
    b"", b"n", b"n,", b"n,,", b"x,,n=,r=abc", b"p=tls-unique,,n=,r=abc", b"n,,n=,r=", b"n,,r=abc",
    b"n,,m=x,n=,r=abc", b"n,,n=,r=a\x7fb", b"n,,n=,r=" + b"a" * 65_000, b"n,,n=,r=\xff", b"n,,n=,r",
]


@pytest.mark.parametrize("message", BAD_FIRST)
def test_a_malformed_first_message_is_a_violation(message: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        server().first(message)


def test_an_authorization_identity_is_refused() -> None:
    with pytest.raises(LoginRefused):
        server().first(b"n,a=other,n=,r=abc")


BAD_FINAL = [
    b"", b"c=biws", b"c=biws,r=abcservernonce", b"c=biws,r=abc,p=AAAA", b"c=eSws,r=abcservernonce,p=AAAA",
    b"c=biws,r=abcservernonce,p=AAAA", b"c=biws,r=abcservernonce,p=*", b"c=biws,r=abcservernonce,p=",
    b"r=abcservernonce,c=biws,p=AAAA", b"\xff",
]


@pytest.mark.parametrize("message", BAD_FINAL)
def test_a_malformed_last_message_is_a_violation(message: bytes) -> None:
    exchange = server()
    exchange.first(b"n,,n=,r=abc")
    with pytest.raises(ProtocolViolation):
        exchange.final(message, SECRET)


def test_a_client_that_could_bind_the_channel_is_let_in() -> None:
    exchange, client = server(), ClientExchange(nonce="abc")
    client.challenge(exchange.first(b"y,,n=,r=abc"))
    message = client.final(RIGHT)
    with pytest.raises(ProtocolViolation, match="binding"):  # it said y before and n now
        exchange.final(message, SECRET)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_garbage_is_an_outcome(first: bytes, final: bytes) -> None:
    exchange = server()
    try:
        exchange.first(b"n,,n=,r=" + first)
        assert exchange.final(final, SECRET) is None
    except PoolerError:
        return


@pytest.mark.parametrize("message", [
    b"r=other,s=c2FsdA==,i=4096", b"r=clientnonce,s=c2FsdA==,i=4096", b"r=clientnonceX,s=*,i=4096",
    b"r=clientnonceX,s=c2FsdA==,i=0", b"r=clientnonceX,s=c2FsdA==,i=99999999", b"e=other-error", b"",
    b"r=clientnonceX,s=c2FsdA==,i=-1", b"m=x,r=clientnonceX,s=c2FsdA==,i=4096"])
def test_a_server_that_lies_in_its_challenge_is_left(message: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        ClientExchange(nonce="clientnonce").challenge(message)


@pytest.mark.parametrize("message", [b"v=AAAA", b"e=invalid-proof", b"v=", b"x"])
def test_a_server_that_does_not_know_the_password_is_left(message: bytes) -> None:
    client, ours = ClientExchange(nonce="clientnonce"), server()
    with pytest.raises(ProtocolViolation):
        client.finish(message)  # and nobody may skip the proof
    client.challenge(ours.first(client.first()))
    client.final(RIGHT)
    with pytest.raises(ProtocolViolation):
        client.finish(message)


END_POINT = bytes(range(32))


def bound(client: ClientExchange, *, end_point: bytes = END_POINT, binds: bool = True) -> bytes | None:
    """One exchange over a connection with that end point; the server's last words."""
    ours = ServerExchange(
        nonce="servernonce", salt=SALT, iterations=4096, end_point=end_point, binds=binds)
    client.challenge(ours.first(client.first()))
    proven = ours.final(client.final(RIGHT), SECRET)
    return None if proven is None else proven[0]


def test_a_bound_exchange_succeeds_over_the_connection_it_is_bound_to() -> None:
    client = ClientExchange(nonce="clientnonce", end_point=END_POINT)
    last_words = bound(client)
    assert last_words is not None
    client.finish(last_words)


def test_a_second_implementation_binds_to_ours() -> None:
    client = scramp.ScramClient(
        ["SCRAM-SHA-256-PLUS"], "ann", "pencil", channel_binding=("tls-server-end-point", END_POINT))
    ours = ServerExchange(nonce="servernonce", salt=SALT, iterations=4096, end_point=END_POINT, binds=True)
    client.set_server_first(ours.first(client.get_client_first().encode()).decode())
    proven = ours.final(client.get_client_final().encode(), SECRET)
    assert proven is not None
    client.set_server_final(proven[0].decode())


def test_an_exchange_bound_to_another_connection_is_refused() -> None:
    with pytest.raises(LoginRefused, match="channel binding check failed") as refused:
        bound(ClientExchange(nonce="clientnonce", end_point=bytes(32)))
    assert refused.value.code == "28000"


def test_a_client_that_thinks_we_cannot_bind_when_we_offered_it_is_refused() -> None:
    with pytest.raises(LoginRefused, match="negotiation error"):
        bound(ClientExchange(nonce="clientnonce", could_bind=True), binds=False)
    assert bound(ClientExchange(nonce="clientnonce", could_bind=True), end_point=b"", binds=False)


def test_a_client_that_cannot_bind_logs_in_although_we_offered_it() -> None:
    assert bound(ClientExchange(nonce="clientnonce"), binds=False)


@pytest.mark.parametrize(("first", "binds"), [
    (b"p=tls-server-end-point,,n=,r=abc", False),
    (b"p=tls-unique,,n=,r=abc", True),
    (b"n,,n=,r=abc", True),
    (b"y,,n=,r=abc", True),
])
def test_a_flag_that_does_not_fit_the_mechanism_is_a_violation(first: bytes, binds: bool) -> None:
    ours = ServerExchange(nonce="s", salt=SALT, iterations=4096, end_point=END_POINT, binds=binds)
    with pytest.raises(ProtocolViolation, match="SCRAM"):
        ours.first(first)
