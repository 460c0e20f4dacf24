"""Durations, sizes and addresses take what people write and refuse the rest by name."""

from __future__ import annotations

import pytest

from pooler.settings_units import Address, parse_duration_seconds, parse_size_bytes


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("250ms", 0.25),
        ("5s", 5.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        (5, 5.0),
        (0.5, 0.5),
        ("15", 15.0),
        ("1.5 s", 1.5),
        ("0", 0.0),
        ("100us", 0.0001),
        ("1d", 86400.0),
    ],
)
def test_a_duration_takes_units_and_a_plain_number_is_seconds(written: object, seconds: float) -> None:
    assert parse_duration_seconds(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", ["5 parsecs", "-1", -1, True, None, "", "s", float("inf"), float("nan"), [5]]
)
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration_seconds(written)


@pytest.mark.parametrize(
    ("written", "size"), [(4096, 4096), ("64kB", 65536), ("256MB", 1 << 28), ("1GiB", 1 << 30)]
)
def test_a_size_takes_units_in_powers_of_1024(written: object, size: int) -> None:
    assert parse_size_bytes(written) == size


@pytest.mark.parametrize("written", ["64 kilo", -1, True, 1.5, "", "MB"])
def test_what_is_no_size_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size_bytes(written)


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("127.0.0.1:6432", Address("127.0.0.1", 6432)),
        ("[::1]:5432", Address("::1", 5432)),
        ("*:6432", Address("0.0.0.0", 6432)),
        ("db.example.org:1", Address("db.example.org", 1)),
    ],
)
def test_an_address_is_host_and_port(written: str, address: Address) -> None:
    assert Address.parse(written) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "written", ["127.0.0.1", ":5432", "h:0", "h:65536", "h:x", 5432, None, "a b:1", "h:٣"]
)
def test_what_is_no_address_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"address|port"):
        Address.parse(written)


@pytest.mark.parametrize(
    ("one", "two", "overlap"),
    [
        ("127.0.0.1:1", "127.0.0.1:1", True),
        ("localhost:1", "127.0.0.1:1", True),
        ("*:1", "10.0.0.1:1", True),
        ("127.0.0.1:1", "10.0.0.1:1", False),
        ("*:1", "*:2", False),
    ],
)
def test_addresses_overlap_when_both_cannot_be_listened_on(one: str, two: str, overlap: bool) -> None:
    assert Address.parse(one).overlaps(Address.parse(two)) is overlap
