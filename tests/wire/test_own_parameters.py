"""What a text says of the pooler's own parameters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.wire.own_parameters import (
    Own,
    OwnFault,
    checked,
    deadline_seconds,
    read_own,
    shown_deadline,
    take_startup,
    without_own,
)

READ = {
    b"SET pooler.tenant = 'a'": Own("SET", "tenant", "a"),
    b"set session pooler.tenant to a;": Own("SET", "tenant", "a"),
    b"SET LOCAL pooler.deadline TO 50": Own("SET", "deadline", "50"),
    b"SET pooler.deadline = '50ms'": Own("SET", "deadline", "50ms"),
    b"SET pooler.deadline = -1": Own("SET", "deadline", "-1"),
    b"set /* a /* b */ c */ \"Pooler\" . -- x\n \"TENANT\"='it''s'\0": Own("SET", "tenant", "it's"),
    b"SET pooler.tenant = DEFAULT": Own("SET", "tenant", None),
    b"SET pooler.tenant = 'default'": Own("SET", "tenant", "default"),
    b"SET pooler.ticket = $x$t-1$x$": Own("SET", "ticket", "t-1"),
    b"SET pooler.tenant = E'a'": Own("SET", "tenant", "a"),
    b" ; RESET pooler.class ;; ": Own("RESET", "class"),
    b"show POOLER.Class": Own("SHOW", "class"),
    b"select 'pooler.tenant'": None,
    b"select 'set pooler.tenant = 1'": None,
    b"set application_name = 'pooler.tenant'": None,
    b"insert into pooler.tenant values (1)": None,
    b"set pooler_x.tenant = 1": None,
}
FAULTS = {
    b"SET pooler.tenant": "42601",
    b"SET pooler.tenant = 'a', 'b'": "42601",
    b"SET pooler.tenant = 'a' 'b'": "42601",
    b"SET pooler.tenant FROM CURRENT": "42601",
    b"SET pooler.tenant = 50ms": "42601",
    b"SET pooler.tenant = E'\\x41'": "42601",
    b"SHOW pooler.tenant x": "42601",
    b"SET pooler.tenat = 'a'": "42704",
    b"SHOW pooler.tenant.x": "42704",
    b"SET pooler.tenant = 'a'; SELECT 1": "0A000",
    b"SELECT 1; RESET pooler.tenant": "0A000",
    b"SET pooler.tenant = '" + b"a" * 5000 + b"'": "0A000",
}


@pytest.mark.parametrize("text", READ)
def test_a_text_is_read_as_postgresql_lexes_it(text: bytes) -> None:
    assert read_own(text) == READ[text]


@pytest.mark.parametrize("text", FAULTS)
def test_what_is_about_them_and_cannot_be_is_a_fault_and_not_for_a_server(text: bytes) -> None:
    found = read_own(text)
    assert isinstance(found, OwnFault)
    assert found.code == FAULTS[text]


_blank = st.sampled_from([b" ", b"\n", b"\t ", b"/**/", b"/* /* x */ ' */", b"-- '\n", b" -- ;\n "])
_value = st.text("abcXYZ019 _.'-", min_size=1, max_size=30)


@given(st.lists(_blank, min_size=6, max_size=6), _value, st.booleans(),
       st.sampled_from([b"", b"local ", b"session "]))
def test_blanks_and_comments_go_anywhere_between_words(
    blanks: list[bytes], value: str, quoted: bool, scope: bytes
) -> None:
    a, b, c, d, e, f = blanks
    name = b'"poOler"%b.%b"tenant"' % (b, c) if quoted else b"Pooler%b.%bTENANT" % (b, c)
    written = b"'%b'" % value.replace("'", "''").encode()
    text = a + b"SET" + a + scope + name + d + b"=" + e + written + f
    assert read_own(text) == Own("SET", "tenant", value)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_text_is_read_or_is_a_fault(before: bytes, after: bytes) -> None:
    read_own(before + b"set pooler.tenant" + after)


def test_a_name_that_there_is_not_names_the_nearest() -> None:
    found = read_own(b"show pooler.dedline")
    assert isinstance(found, OwnFault)
    assert "pooler.deadline" in found.hint


@pytest.mark.parametrize(("value", "seconds", "shown"), [
    ("50", 0.05, "50ms"), ("50ms", 0.05, "50ms"), ("2s", 2.0, "2s"), ("1.5 s", 1.5, "1500ms"),
    ("0", 0.0, "0ms"), ("1min", 60.0, "60s"), ("250us", 0.00025, "0.25ms"), ("none", math.inf, "none")])
def test_deadlines(value: str, seconds: float, shown: str) -> None:
    assert deadline_seconds(value) == pytest.approx(seconds)
    assert shown_deadline(deadline_seconds(value)) == shown
    assert deadline_seconds(shown) == pytest.approx(seconds)


@pytest.mark.parametrize(("name", "value"), [
    ("deadline", "-1"), ("deadline", "soon"), ("deadline", "5 x"), ("deadline", ""), ("ticket", "a b"),
    ("ticket", "x" * 64), ("tenant", ""), ("tenant", "a\nb"), ("tenant", "é" * 32), ("class", "a\\b")])
def test_a_wrong_value_is_refused_with_what_is_allowed(name: str, value: str) -> None:
    with pytest.raises(OwnFault) as refused:
        checked(name, value)
    assert refused.value.code == "22023"
    assert refused.value.hint.startswith("Available values: ")


def test_a_start_gives_them_up_to_the_pooler() -> None:
    start = {b"pooler.Tenant": b"t", b"POOLER.deadline": b"50", b"application_name": b"a"}
    assert take_startup(start) == {"tenant": "t", "deadline": "50ms"}
    assert start == {b"application_name": b"a"}
    with pytest.raises(OwnFault, match=r"unrecognized .*pooler\.foo"):
        take_startup({b"pooler.foo": b"1"})


@pytest.mark.parametrize(("options", "kept"), [
    ("-c pooler.tenant=a -c x.y=1", "-c x.y=1"), ("--pooler.class=b", ""),
    ("-cPooler.class=b --a=b\\ c", "--a=b\\ c"),
    ("-c a=pooler.x", "-c a=pooler.x"), ("-c  a=1", "-c  a=1")])
def test_options_for_a_walsender_lose_them(options: str, kept: str) -> None:
    assert without_own(options) == kept
