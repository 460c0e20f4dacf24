"""pg_hba.conf: every form of a line, the first rule that fits, and what a faulty line is told."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_interface
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooler.errors import UsageFault
from pooler.net.hba import Hba, Visitor, read_hba
from pooler.net.hba_tokens import Files
from pooler.wire.auth import AuthType, Certificate

OWN = (ip_interface("10.1.2.3/16"), ip_interface("fd00::1/64"))
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(name: str, content: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return path

    return make


def memory(files: dict[str, str]) -> Files:
    return Files(lambda path: files[path.name], lambda path: path.name in files, lambda _: [])


def hba(*lines: str, **files: str) -> Hba:
    content = {"hba": "\n".join(lines), **files}
    return read_hba(Path("hba"), own=lambda: OWN, files=memory(content))


def fault(*lines: str) -> str:
    with pytest.raises(UsageFault) as refused:
        hba(*lines)
    return str(refused.value)


def chosen(
    rules: Hba, user: str = "ann", database: str = "db", host: str = "192.0.2.7", *, is_tls: bool = False,
    is_replication: bool = False,
) -> AuthType | None:
    rule = rules.rule_for(Visitor.of(user, database, host, is_tls=is_tls, is_replication=is_replication))
    return None if rule is None else rule.method


def test_the_first_rule_that_fits_decides_and_none_is_a_refusal() -> None:
    rules = hba("# who comes in", "", "host db ann 192.0.2.0/24 md5", "host all all all reject")
    assert chosen(rules) is AuthType.MD5
    assert chosen(rules, user="bob") is AuthType.REJECT
    assert chosen(rules, host="unix") is None


@pytest.mark.parametrize(("kind", "clear", "tls", "unix"), [
    ("host", True, True, False), ("hostssl", False, True, False), ("hostnossl", True, False, False),
    ("local", False, False, True), ("hostgssenc", False, False, False), ("hostnogssenc", True, True, False)])
def test_the_type_of_a_line_is_the_way_a_client_comes(kind: str, clear: bool, tls: bool, unix: bool) -> None:
    rules = hba(f"{kind} all all trust" if kind == "local" else f"{kind} all all all trust")
    found = [chosen(rules), chosen(rules, is_tls=True), chosen(rules, host="unix")]
    assert [method is not None for method in found] == [clear, tls, unix]


@pytest.mark.parametrize(("address", "inside", "outside"), [
    ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
    ("192.0.2.9/24", "192.0.2.1", "192.0.3.1"),
    ("192.0.2.0 255.255.255.0", "192.0.2.1", "192.0.3.1"),
    ("0.0.0.0/0", "203.0.113.1", "::1"),
    ("::/0", "::1", "192.0.2.1"),
    ("fd00::/64", "fd00::ffff", "fd00:0:0:1::1"),
    ("fd00:: ffff:ffff:ffff:ffff::", "fd00::ffff", "fd00:0:0:1::1"),
    ("samehost", "10.1.2.3", "10.1.2.4"),
    ("samenet", "10.1.200.1", "10.2.0.1"),
    ("samenet", "fd00::7", "fd01::7"),
])
def test_an_address_fits_its_network_only(address: str, inside: str, outside: str) -> None:
    rules = hba(f"host all all {address} trust")
    assert chosen(rules, host=inside) is AuthType.TRUST
    assert chosen(rules, host=outside) is None


def test_ipv4_mapped_into_ipv6_is_ipv4_and_a_zone_is_no_part_of_an_address() -> None:
    assert chosen(hba("host all all 192.0.2.0/24 trust"), host="::ffff:192.0.2.7") is AuthType.TRUST
    assert chosen(hba("host all all fe80::/10 trust"), host="fe80::1%eth0") is AuthType.TRUST


@pytest.mark.parametrize(("field", "names", "others"), [
    ("all", ["db", "x"], []),
    ("db", ["db"], ["DB", "db2"]),
    ("a,db, c", ["a", "db", "c"], ["d"]),
    ('"all"', ["all"], ["db"]),
    ('"with blank","with""quote"', ["with blank", 'with"quote'], ["with"]),
    ("/^tenant_[0-9]+$", ["tenant_12"], ["tenant_x", "a_tenant_1"]),
    ('"/^(a|b),c$"', ["a,c"], ["a", "c"]),
    ("sameuser", ["ann"], ["db"]),
])
def test_a_field_of_databases_is_names_patterns_and_words(
    field: str, names: list[str], others: list[str]
) -> None:
    rules = hba(f"host {field} all all trust")
    assert all(chosen(rules, database=name) is AuthType.TRUST for name in names)
    assert not any(chosen(rules, database=name) for name in others)


def test_users_take_names_patterns_and_files_of_them(write: Write) -> None:
    write("people", "ann bob # they\n@more\n")
    write("more", '"carl c"\n')
    path = write("hba.conf", "host all /^app_,@people all trust\n")
    rules = read_hba(path)
    assert all(chosen(rules, user=name) for name in ("app_1", "ann", "bob", "carl c"))
    assert not any(chosen(rules, user=name) for name in ("carl", "c", "@people", "more"))


def test_all_databases_are_not_those_of_physical_replication() -> None:
    rules = hba("host all all all md5", "host replication ann all scram-sha-256")
    assert chosen(rules, database="replication") is AuthType.MD5
    assert chosen(rules, is_replication=True) is AuthType.SCRAM
    assert chosen(rules, user="bob", is_replication=True) is None


def test_files_include_files_in_their_place(write: Write) -> None:
    write("sub/b.conf", "host b all all md5\n")
    write("sub/a.conf", "host a all all trust\ninclude deeper/c\n")
    (write("x", "").parent / "sub" / "deeper").mkdir()
    write("sub/deeper/c", "host c all all password\n")
    write("sub/ignored.txt", "nonsense\n")
    path = write("hba.conf", "include_if_exists nowhere\ninclude_dir sub\nhost all all all reject\n")
    rules = read_hba(path)
    assert [chosen(rules, database=name) for name in "abcd"] == [
        AuthType.TRUST, AuthType.MD5, AuthType.PASSWORD, AuthType.REJECT]


def test_a_file_that_includes_itself_is_refused(write: Write) -> None:
    path = write("hba.conf", "include hba.conf\n")
    with pytest.raises(UsageFault, match="deep"):
        read_hba(path)
    write("names", "@names")
    with pytest.raises(UsageFault, match="deep"):
        read_hba(write("hba.conf", "host all @names all trust"))


def test_options_say_the_map_and_the_certificate() -> None:
    rules = hba("local all all peer map=unix",
                "hostssl all all all scram-sha-256 clientcert=verify-full clientname=DN",
                "hostssl all all ::1/128 cert map=certs")
    local, tls, cert = rules.rules
    assert (local.method, local.ident_map) == (AuthType.PEER, "unix")
    assert (tls.certificate, tls.by_distinguished_name) == (Certificate.NAMED, True)
    assert (cert.method, cert.ident_map, cert.by_distinguished_name) == (AuthType.CERT, "certs", False)


def test_a_line_goes_on_behind_a_backslash_and_ident_of_a_local_line_is_peer() -> None:
    assert hba("local all \\", "  all \\", "ident").rules[0].method is AuthType.PEER


FAULTS = {
    "hosts all all all md5": '"hosts" is not one of local, host,',
    "host all all md5": "too few fields: write host DATABASE USER ADDRESS METHOD",
    "host all all md5 map=x": '"md5" is not an address',
    "host all all": "too few fields: write host DATABASE USER ADDRESS METHOD",
    "local all": "too few fields: write local DATABASE USER METHOD",
    "host all all 10.0.0.0/33 md5": "write a network such as",
    "host all all 10.0.0.0 255.0.255.0 md5": "write a network such as",
    "host all all :: ffff:0:ffff:: md5": "is not a mask",
    "host all all 10.0.0.1 md5": "write a network such as",
    "host all all db.example.org md5": "host names are not looked up",
    "host all +admins all md5": "membership of roles is not known here",
    "host samerole all all md5": "membership of roles is not known here",
    "host all all all gss": 'method "gss" is not served: write one of trust, reject,',
    "host all all all ident": 'method "ident" is not served',
    "host all all all peer": "write local at the beginning",
    "host all all all cert": "write hostssl at the beginning",
    "host all all all md5 map=x": "option map=x is not served",
    "host all all all md5 clientcert=verify-full": "is not served",
    "hostssl all all all md5 clientcert=maybe": "is not served",
    "host all all all md5 nonsense": '"nonsense" is not an option',
    'host "all all all md5': "a double quote is not closed",
    "host /( all all md5": "not a regular expression",
    "host all all all md5,trust": "the method is one word",
    "host all @nowhere all md5": "nowhere",
    "include": "include takes one file",
    "": "has no rule",
}


@pytest.mark.parametrize("line", FAULTS)
def test_a_faulty_line_is_told_where_what_and_what_to_do(line: str, write: Write) -> None:
    path = write("hba.conf", f"{line}\n")
    with pytest.raises(UsageFault) as refused:
        read_hba(path)
    assert FAULTS[line] in str(refused.value)
    has_line = line and "nowhere" not in line
    assert str(refused.value).startswith(f"{path}:1: " if has_line else str(path.parent))


def test_all_faults_of_all_files_are_told_at_once(write: Write) -> None:
    write("more", "host all all all nis\n")
    path = write("hba.conf", "local all\nhost all all all trust\ninclude more\ninclude gone\nhosts\n")
    with pytest.raises(UsageFault) as refused:
        read_hba(path)
    lines = str(refused.value).splitlines()
    assert [line.rpartition("/")[2][:12].partition(" ")[0] for line in lines] == [
        "hba.conf:1:", "more:1:", "gone:", "hba.conf:5:"]


@given(st.text(alphabet='hostlocal "\\,/#@+\n\tmd510.:-=(', max_size=80))
def test_any_text_gives_rules_or_a_fault(content: str) -> None:
    try:
        rules = read_hba(Path("hba"), files=memory({"hba": content, "": ""}))
    except (UsageFault, KeyError):
        return
    assert chosen(rules) in (*AuthType, None)
