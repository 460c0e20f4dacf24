"""What clients send, for every feature of the protocol that a session of any pool keeps.

Those in BOUND leave something on their session that a pool of transactions does not keep for its client on
purpose (see docs/compatibility.md): they are for session pooling alone.
"""

from __future__ import annotations

import struct

from pooler.demo.client import FLUSH, SYNC, TERMINATE, bind, close, describe, execute, message, parse, query
from tests.differential.script import Steps, Write

SETUP = "create table if not exists u (a int primary key); create table if not exists w (a text)"
TABLES = ("u", "w")

GROUP = parse("select 1") + bind() + describe() + execute()
COPY_DONE = message(b"c")
COPY_FAIL = message(b"f", b"no\0")
ROLLBACK = query("rollback")


def data(text: str | bytes) -> bytes:
    """A CopyData."""
    return message(b"d", text if isinstance(text, bytes) else text.encode())


def group(text: str, name: str = "", *values: str) -> bytes:
    """Parse to Execute, no Sync."""
    return parse(text, name) + bind(values, name) + execute()


def run(name: str, *values: str | None) -> bytes:
    """Bind to Sync of a prepared statement."""
    return bind(values, name) + execute() + SYNC


def call(oid: int, *arguments: bytes, binary: bool = True) -> bytes:
    """A FunctionCall with arguments and a result in binary."""
    body = struct.pack("!ihhh", oid, 1, int(binary), len(arguments))
    body += b"".join(struct.pack("!i", len(each)) + each for each in arguments)
    return message(b"F", body + struct.pack("!h", int(binary)))


def bind_raw(
    formats: list[int], values: list[bytes | None], results: list[int], name: str = "", portal: str = ""
) -> bytes:
    """A Bind with everything given."""
    body = portal.encode() + b"\0" + name.encode() + b"\0"
    body += struct.pack(f"!h{len(formats)}hH", len(formats), *formats, len(values))
    for value in values:
        body += struct.pack("!i", -1) if value is None else struct.pack("!i", len(value)) + value
    return message(b"B", body + struct.pack(f"!h{len(results)}h", len(results), *results))


PI = call(1610)
INT8 = 20
LO_CREAT, LO_OPEN, LO_WRITE, LO_READ, LO_CLOSE = 957, 952, 955, 954, 953
BINARY_COPY = b"PGCOPY\n\xff\r\n\0" + bytes(8) + struct.pack("!hii", 1, 4, 7) + struct.pack("!h", -1)

SIMPLE: dict[str, Steps] = {
    "simple": [query("select 1"), query("select 'two', null, ''"), query("")],
    "empty texts": [query(";"), query("  -- nothing\n"), query(";;select 1;;")],
    "several statements": [query("select 1; select 2; insert into u values (1); delete from u")],
    "several with an error": [query("insert into u values (1); select 1/0; select 2"), query("table u")],
    "several with a block": [query("begin; select 1"), query("select 1/0; select 2"), ROLLBACK],
    "begin and end in one text": [query("select 1; begin; select 2; commit; select 3")],
    "commit in the middle": [query("begin"), query("select 1; commit; begin"), ROLLBACK],
    "transaction": [query("begin"), query("insert into u values (1)"), ROLLBACK, query("table u")],
    "failed transaction": [query("begin"), query("select 1/0"), query("select 2"), query("commit")],
    "savepoint": [query("begin; savepoint s"), query("select 1/0"), query("rollback to s"), query("commit")],
    "chained": [query("begin isolation level serializable"), query("commit and chain"),
                query("show transaction_isolation"), query("rollback and chain"), query("commit")],
    "no block to end": [query("commit"), query("rollback"), query("begin; begin"), ROLLBACK],
    "prepared for two phases, refused": [query("begin"), query("prepare transaction 'x'"), ROLLBACK],
    "syntax errors": [query("selec"), query("select 'unfinished"), query("select $1"), query("select 1")],
    "errors with every field": [
        query("insert into u values (1), (1)"), query("insert into u values (null)"), query("table nowhere"),
        query("do $$ begin raise exception 'a' using detail='b', hint='c', errcode='U1234', "
              "column='d', constraint='e', datatype='f', table='g', schema='h'; end $$")],
    "notices": [query("do $$ begin raise notice 'hello'; raise warning 'so'; raise info 'i'; end $$"),
                query("drop table if exists nowhere"), query("select 1")],
    "a notice inside rows": [
        query("create or replace function pg_temp.n(i int) returns int language plpgsql as "
              "$$ begin raise notice '%', i; return i; end $$; "
              "select pg_temp.n(i) from generate_series(1,3) i")],
    "long error": [query("do $$ begin raise exception '%', repeat('x', 3000000); end $$"), query("select 1")],
    "fetch": [query("begin"), query("declare c cursor for select generate_series(1, 5)"),
              query("fetch 2 from c"), query("fetch all from c"), query("close c"), query("commit")],
    "binary cursor": [query("begin"), query("declare c binary cursor for select 1::int8"),
                      query("fetch all from c"), query("commit")],
    "pipelined queries": [query("select 1") + query("begin") + query("select 2") + query("commit")],
    "pipelined with an error": [query("select 1/0") + query("select 2") + query("selec") + query("select 3")],
    "tags": [query("create table tags (a int)"), query("insert into tags values (1), (2)"),
             query("update tags set a = 3"), query("delete from tags"), query("drop table tags"),
             query("explain (costs off) select 1"), query("lock table u"), query("checkpoint"),
             query("values (1), (2)"), query("table u"), query("select where false"), query("analyze u")],
    "terminate": [query("select 1"), TERMINATE],
    "leaves without a word": [query("begin"), query("insert into u values (98)"), b""],
    "parameter status": [query("set application_name = 'mine'"), query("show application_name"),
                         query("set datestyle = 'german'; select 1"), query("show datestyle")],
    "parameter status before ready": [
        query("select set_config('application_name', 'x', false), set_config('datestyle', 'sql', false); "
              "select 2"), query("show datestyle")],
    "parameter status taken back": [
        query("begin"), query("set timezone = 'Asia/Tokyo'"), ROLLBACK, query("show timezone"),
        query("begin"), query("set local timezone = 'Asia/Tokyo'"), query("show timezone"), query("commit"),
        query("show timezone")],
    "its own notification": [query("begin; listen ch; notify ch, 'x'; notify ch, 'x'; commit")],
}

EXTENDED: dict[str, Steps] = {
    "extended": [GROUP + SYNC],
    "groups": [(GROUP + SYNC) * 3],
    "many syncs": [SYNC * 5 + GROUP + SYNC * 5],
    "sync alone": [SYNC, SYNC + SYNC],
    "flush alone": [FLUSH + query("select 1"), FLUSH, query("select 1")],
    "empty": [group("") + SYNC, parse("") + describe("S") + bind() + describe() + execute() + SYNC],
    "a group undone by its error": [
        group("insert into u values (1)") + group("insert into u values (1)") + SYNC, query("table u")],
    "an error and the next group": [
        group("select 1/0") + group("select 2") + SYNC + group("select 3") + SYNC],
    "an error in every group": [(group("select 1/0") + GROUP + SYNC + GROUP + SYNC) * 3],
    "an error skips a query": [parse("bad") + query("select 1") + SYNC, query("select 2")],
    "an error skips all kinds": [
        parse("bad") + FLUSH, query("select 1") + data("x") + COPY_DONE + COPY_FAIL + PI + GROUP + FLUSH,
        SYNC, query("select 2")],
    "query then group": [query("set statement_timeout = 30000") + GROUP + SYNC],
    "group then query": [GROUP + query("select 2"), query("select 3")],
    "query in a group": [parse("select 1", "q") + query("select 2") + bind((), "q") + execute() + SYNC],
    "group in a block by query": [query("begin"), group("insert into u values (1)") + query("commit"),
                                  query("delete from u")],
    "portions": [(parse("select generate_series(1, 5)") + describe("S") + FLUSH),
                 bind((), "", "cur") + describe("P", "cur") + FLUSH, execute("cur", 2) + FLUSH,
                 execute("cur", 2) + FLUSH, execute("cur") + SYNC],
    "portions in one write": [parse("select generate_series(1, 5)") + bind((), "", "cur") + execute("cur", 2)
                              + execute("cur", 2) + execute("cur", 2) + execute("cur", 2) + SYNC],
    "portions in a block": [query("begin"), parse("select generate_series(1, 5)") + bind((), "", "cur")
                            + execute("cur", 2) + SYNC, execute("cur", 2) + SYNC, query("commit"),
                            execute("cur", 2) + SYNC],
    "a portal ends with its group": [parse("select 1", "n") + bind((), "n", "cur") + SYNC,
                                     execute("cur") + SYNC],
    "a portal is closed": [parse("select 1") + bind((), "", "cur") + close("P", "cur") + execute("cur")
        + SYNC],
    "a portal twice": [parse("select 1") + bind((), "", "cur") + bind((), "", "cur") + SYNC, GROUP + SYNC],
    "two portals side by side": [
        parse("select generate_series(1, 4)", "g") + bind((), "g", "x") + bind((), "g", "y")
        + execute("x", 1) + execute("y", 2) + execute("x", 2) + execute("y") + execute("x") + SYNC],
    "a portal without rows twice": [parse("insert into u values (1)") + bind() + execute() + execute() + SYNC,
                                    query("delete from u")],
    "describe both ways": [parse("select $1::int8 as a, 'x'::text as b", "s") + describe("S", "s")
        + bind(["1"], "s")
                           + describe() + execute() + SYNC,
                           parse("insert into u values ($1)") + describe("S") + bind(["1"]) + describe()
                               + SYNC],
    "describe what is not there": [describe("S", "nope") + SYNC, describe("P", "nope") + SYNC,
                                   describe("S") + SYNC, describe("P") + SYNC],
    "begin by the extended protocol": [
        parse("begin", "b") + describe("S", "b") + bind((), "b") + describe() + execute() + SYNC,
        group("insert into u values (1)") + SYNC, group("rollback") + SYNC],
    "begin in a pipeline": [group("begin") + group("insert into u values (1)") + group("commit") + GROUP
        + SYNC,
                            query("delete from u")],
    "a failed block by the extended protocol": [
        group("begin") + SYNC, group("select 1/0") + SYNC, GROUP + SYNC, group("rollback") + SYNC],
    "set by the extended protocol": [group("set application_name = 'ext'") + GROUP + SYNC,
                                     group("show application_name") + SYNC],
    "types declared": [parse("select $1, $2", "", [20, 25]) + describe("S") + bind(["1", "x"]) + execute()
        + SYNC,
                       parse("select $1", "", [99999]) + SYNC],
    "null and empty": [parse("select $1::text is null, $2::text") + bind([None, ""]) + execute() + SYNC],
    "formats mixed": [
        parse("select $1::int8, $2::text, $3::bytea")
        + bind_raw([1, 0, 1], [struct.pack("!q", 5), b"t", b"\0\1"], [0, 1, 1]) + execute() + SYNC],
    "one format for all": [parse("select $1::int8, $2::int8")
                           + bind_raw([1], [struct.pack("!q", 5)] * 2, [1]) + describe() + execute() + SYNC],
    "formats of results without parameters": [parse("select 1, 2") + bind_raw([], [], [1, 0]) + execute()
        + SYNC],
    "a thousand parameters": [
        parse("select " + ",".join(f"${n}::int" for n in range(1, 1001)))
        + bind([str(n) for n in range(1000)]) + execute() + SYNC],
    "too few parameters": [parse("select $1::int") + bind() + execute() + SYNC, GROUP + SYNC],
    "too many parameters": [parse("select 1") + bind(["1"]) + execute() + SYNC, GROUP + SYNC],
    "a bad value": [parse("select $1::int") + bind(["x"]) + execute() + SYNC],
    "a bad format code": [parse("select $1::int") + bind_raw([7], [b"1"], []) + execute() + SYNC],
    "function calls": [PI, query("begin"), PI, query("commit"), PI + GROUP + SYNC + PI],
    "function calls that fail": [call(1), call(1610, b"x"), query("begin"), call(1), PI, ROLLBACK],
    "large objects": [
        query("begin"), query("select lo_create(4711)"), call(LO_OPEN, struct.pack("!I", 4711),
                                                              struct.pack("!i", 0x60000)),
        call(LO_WRITE, bytes(4), b"hello"), call(LO_CLOSE, bytes(4)),
        call(LO_OPEN, struct.pack("!I", 4711), struct.pack("!i", 0x40000)),
        call(LO_READ, bytes(4), struct.pack("!i", 100)), ROLLBACK],
    "rolled back to a savepoint in a pipeline": [
        group("begin") + group("savepoint s") + SYNC + group("select 1/0") + SYNC + group("rollback to s")
        + group("select 7") + SYNC, group("commit") + SYNC],
}

PREPARED: dict[str, Steps] = {
    "named": [parse("select $1::int", "s") + SYNC, run("s", "5"), describe("S", "s") + SYNC,
              close("S", "s") + SYNC, bind(["5"], "s") + SYNC],
    "missing names": [close("S", "nope") + close("P", "nope") + SYNC,
                      describe("S", "nope") + parse("select 1") + SYNC, bind((), "nope") + SYNC,
                      query("select 1")],
    "a failed parse": [parse("selec", "s") + SYNC, bind((), "s") + SYNC, parse("select 1", "s") + SYNC,
        run("s")],
    "a name in use": [parse("select 1", "s") + SYNC, parse("select 2", "s") + SYNC, run("s")],
    "a name in use for the same text": [parse("select 1", "s") + SYNC, parse("select 1", "s") + SYNC,
        run("s")],
    "a name in use in one write": [parse("select 1", "s") + parse("select 2", "s") + GROUP + SYNC, run("s")],
    "wrong number of parameters for a name": [parse("select $1::int", "s") + SYNC, run("s"), run("s", "1",
        "2")],
    "a closed name again": [parse("select 1", "s") + SYNC, close("S", "s") + parse("select 2", "s") + SYNC,
                            run("s")],
    "a skipped close": [parse("select 1", "s") + SYNC, bind((), "nope") + close("S", "s") + SYNC, run("s")],
    "a skipped parse": [bind((), "nope") + parse("select 1", "s") + SYNC, run("s"),
                        parse("select 2", "s") + SYNC, run("s")],
    "a portal named as the statement": [
        parse("select 3", "n") + SYNC, bind((), "n", "n") + close("P", "n") + SYNC, run("n")],
    "a portal whose statement is closed": [
        parse("select generate_series(1, 3)", "n") + bind((), "n", "p") + close("S", "n") + execute("p", 1)
        + execute("p") + SYNC],
    "the unnamed statement": [parse("select $1::int") + SYNC, bind(["1"]) + execute() + SYNC,
                              bind(["2"]) + execute() + SYNC, query("select 1"), bind(["3"]) + SYNC],
    "the unnamed statement closed": [parse("select 1") + SYNC, close("S") + SYNC, bind() + execute() + SYNC],
    "the unnamed statement replaced by a bad one": [parse("select 1") + SYNC, parse("selec") + SYNC,
                                                    bind() + execute() + SYNC],
    "the unnamed statement after an error": [parse("select 1") + SYNC, query("selec"), bind() + execute()
        + SYNC],
    "deallocate all": [parse("select 1", "s") + SYNC, query("deallocate all"), run("s"), parse("select 2",
        "s")
                       + SYNC, run("s")],
    "deallocate all in a group": [parse("select 1", "s") + SYNC, group("deallocate all") + SYNC, run("s")],
    "deallocate all, then the name in one write": [
        parse("select 1", "s") + SYNC, query("deallocate all") + parse("select 2", "s") + run("s")],
    "deallocate all in a block that fails": [
        parse("select 1", "s") + SYNC, query("begin"), query("deallocate all"), ROLLBACK, run("s")],
    "deallocate by name": [parse("select 1", "s") + SYNC, query("deallocate s"), run("s"),
                           parse("select 2", "s") + SYNC, run("s")],
    "deallocate prepare by name": [parse("select 1", "s") + SYNC, query("DEALLOCATE PREPARE S;"), run("s")],
    "deallocate by a quoted name": [parse("select 1", 'a "B"') + SYNC, query('deallocate "a ""B"""'),
                                    run('a "B"')],
    "deallocate in a group": [parse("select 1", "s") + SYNC, group("deallocate s") + SYNC, run("s")],
    "deallocate in a block": [parse("select 1", "s") + SYNC, query("begin"), query("deallocate s"), ROLLBACK,
                              run("s")],
    "deallocate in a failed block": [parse("select 1", "s") + SYNC, query("begin"), query("select 1/0"),
                                     query("deallocate s"), ROLLBACK, run("s")],
    "deallocate what is not there": [query("deallocate nope"), query("select 1")],
    "deallocate, prepared before its name": [
        parse("deallocate s", "d") + parse("select 1", "s") + SYNC, run("d"), run("s"), run("d"),
        parse("select 2", "s") + SYNC, bind((), "nope") + run("d"), run("d"), run("s"),
        parse("deallocate u") + parse("select 1", "u") + bind() + execute() + SYNC, run("u")],
    "deallocate of itself": [parse("deallocate s", "s") + bind((), "s") + execute() + SYNC, run("s"),
                             parse("deallocate s", "s") + run("s"), run("s")],
    "deallocate, with a value": [parse("deallocate s", "d") + group("select 1", "s") + SYNC, run("d", "1")],
    "deallocate twice": [parse("select 1", "s") + SYNC, query("deallocate s"), query("deallocate s"),
                         parse("select 1", "s") + SYNC, run("s")],
    "deallocate of another case": [parse("select 1", "S") + SYNC, query("deallocate s"), run("S")],
    "a changed plan": [
        query("create table p (a int)"), parse("select * from p", "s") + SYNC, run("s"),
        query("alter table p add b int"), run("s"), describe("S", "s") + SYNC, run("s"),
        close("S", "s") + parse("select * from p", "s") + SYNC, run("s"), query("drop table p"), run("s")],
    "a text of another search path": [
        query("create schema s1; create table s1.p (a int); create schema s2; create table s2.p (b text)"),
        query("set search_path = s1"), parse("select * from p", "s") + describe("S", "s") + SYNC, run("s"),
        query("set search_path = s2"), parse("select * from p", "s2") + describe("S", "s2") + SYNC,
        run("s2"), query("set search_path = s1"), run("s"), query("set search_path = public"),
        query("drop schema s1, s2 cascade")],
}

COPY: dict[str, Steps] = {
    "copy in": [query("copy u from stdin"), data("1\n") + data("2\n") + COPY_DONE, query("table u"),
                query("delete from u")],
    "copy in pieces": [query("copy u from stdin"), data("1") + data("1\n2") + data("\n") + data("")
        + COPY_DONE,
                       query("table u"), query("delete from u")],
    "copy in one big piece": [query("copy u from stdin"),
                              data("".join(f"{n}\n" for n in range(100_000))) + COPY_DONE,
                              query("select count(*), sum(a) from u"), query("truncate u")],
    "copy of a big row": [query("copy w from stdin"), data("x" * 3_000_000 + "\n") + COPY_DONE,
                          query("select length(a) from w"), query("truncate w")],
    "copy in binary": [query("copy u from stdin (format binary)"), data(BINARY_COPY) + COPY_DONE,
                       query("copy u to stdout (format binary)"), query("delete from u")],
    "copy at once": [query("copy u from stdin") + data("1\n") + COPY_DONE, query("delete from u")],
    "copy and a query at once": [query("copy u from stdin") + data("1\n") + COPY_DONE
        + query("delete from u")],
    "copy of nothing": [query("copy u from stdin"), COPY_DONE],
    "copy fails": [query("copy u from stdin"), data("1\n") + COPY_FAIL, query("table u")],
    "copy of a bad row": [query("copy u from stdin"), data("x\n") + data("1\n") + COPY_DONE,
        query("table u")],
    "copy of a bad row, then silence": [query("copy u from stdin"), data("x\n"), query("table u"),
                                        data("1\n") + COPY_DONE, query("table u")],
    "copy that ends in an error": [query("copy u from stdin"), data("1\n1\n") + COPY_DONE, query("table u")],
    "copy refused": [query("copy nowhere from stdin"), data("1\n") + COPY_DONE, query("select 1")],
    "copies in a row": [query("copy u from stdin; copy w from stdin"), data("1\n") + COPY_DONE,
                        data("a\n") + COPY_DONE, query("table u; table w; truncate u, w")],
    "copy in a block": [query("begin"), query("copy u from stdin"), data("1\n") + COPY_DONE, query("table u"),
                        ROLLBACK, query("table u")],
    "copy that fails in a block": [query("begin"), query("copy u from stdin"), data("1\n") + COPY_FAIL,
                                   query("select 1"), ROLLBACK],
    "a query in copy": [query("copy u from stdin"), data("1\n") + query("select 1"), COPY_DONE,
        query("table u")],
    "a parse in copy": [query("copy u from stdin"), data("1\n") + GROUP + SYNC, query("table u")],
    "copy, extended": [parse("copy u from stdin") + bind() + execute() + SYNC, data("1\n") + COPY_DONE + SYNC,
                       query("delete from u")],
    "copy, extended, described": [parse("copy u from stdin", "c") + describe("S", "c") + bind((), "c")
        + describe()
                                  + execute() + FLUSH, data("1\n") + COPY_DONE + SYNC,
                                      query("delete from u")],
    "copy, extended, in one write": [group("copy u from stdin") + data("1\n") + COPY_DONE + SYNC,
                                     query("delete from u")],
    "copy with syncs and flushes": [group("copy u from stdin") + SYNC,
                                    data("1\n") + SYNC + FLUSH + data("2\n") + COPY_DONE + SYNC,
                                    query("delete from u")],
    "copy in a pipeline": [GROUP + group("copy u from stdin") + FLUSH,
                           data("1\n") + COPY_DONE + GROUP + SYNC, query("delete from u")],
    "copy, extended, fails": [group("copy u from stdin") + FLUSH, data("1\n") + COPY_FAIL + SYNC,
        query("table u")],
    "copy, extended, of a bad row": [group("copy u from stdin") + FLUSH, data("x\n"), data("1\n") + COPY_DONE,
                                     GROUP, SYNC, query("table u")],
    "copy aborted by a pipeline": [group("copy u from stdin") + SYNC + GROUP + SYNC + GROUP + SYNC, SYNC,
                                   query("table u")],
    "copy out": [query("copy (select generate_series(1, 9)) to stdout"), group("copy (select 1) to stdout")
        + SYNC,
                 query("copy (select 1/(5-i) from generate_series(1,9) i) to stdout")],
    "copy out, then in": [query("copy (select 1) to stdout; copy u from stdin; copy (select 2) to stdout"),
                          data("1\n") + COPY_DONE, query("delete from u")],
    "copy out of much": [query("copy (select repeat('y', 2000) from generate_series(1, 3000)) to stdout")],
    "stray copy": [data("1\n") + COPY_DONE + query("select 1"), COPY_FAIL, query("select 1")],
    "copy to both protocols": [query("copy u from stdin"), data("1\n") + COPY_DONE, group("table u") + SYNC,
                               query("delete from u")],
}

BIG: dict[str, Steps] = {
    "big values out": [query("select repeat('x', 3000000)"),
                       query("select repeat('y', 2000) from generate_series(1, 2000)")],
    "big query": [query("select length('" + "x" * 2_000_000 + "')")],
    "big bind": [parse("select length($1)") + bind(["y" * 20_000_000]) + execute() + SYNC],
    "big bind of a name": [parse("select length($1)", "s") + SYNC, run("s", "y" * 5_000_000)],
    "big parse": [parse("select 1 -- " + "z" * 1_000_000) + bind() + execute() + SYNC],
    "big name": [parse("select 1", "n" * 60) + SYNC, run("n" * 60)],
    "most parameters": [
        parse("select cardinality(array[" + ",".join(f"${n}::text" for n in range(1, 65_536)) + "])", "s")
            + SYNC,
        bind_raw([], [b"1"] * 65_535, [], "s") + execute() + SYNC],
    "many small answers": [GROUP * 2000 + SYNC],
    "many small queries": [query("select 1") * 2000],
}

BOUND: dict[str, Steps] = {
    "settings": [query("set work_mem = '9MB'"), query("show work_mem"), query("reset work_mem"),
                 query("show work_mem"), query("reset datestyle")],
    "temporary tables": [query("create temp table tt (a int)"), query("insert into tt values (1)"),
                         query("table tt"), query("discard temp"), query("table tt")],
    "prepared by text": [query("prepare q as select 5"), query("execute q"), run("q"),
                         parse("select 6", "r") + SYNC, query("execute r"), query("deallocate all"),
                             run("q")],
    "held cursors": [query("begin; declare h cursor with hold for select generate_series(1, 3); commit"),
                     query("fetch 1 from h"), query("fetch all from h"), query("close h")],
    "listening": [query("listen ch"), query("notify ch, 'x'"), query("unlisten *"), query("notify ch, 'y'")],
    "advisory locks": [query("select pg_advisory_lock(1)"), query("select pg_advisory_unlock(1)"),
                       query("select pg_advisory_unlock(1)")],
}

TWO: dict[str, Steps] = {
    "same names": [
        Write(parse("select 1", "s") + SYNC, 0), Write(parse("select 2", "s") + SYNC, 1),
        *[Write(run("s"), n % 2) for n in range(20)]],
    "one deallocates all": [
        Write(parse("select 1", "s") + SYNC, 0), Write(parse("select 1", "s") + SYNC, 1),
        Write(query("deallocate all"), 1), Write(run("s"), 0), Write(run("s"), 1),
        Write(group("deallocate all") + SYNC, 0), Write(run("s"), 0)],
    "one deallocates a name": [
        Write(parse("select 1", "s") + SYNC, 0), Write(parse("select 1", "s") + SYNC, 1),
        Write(query("deallocate s"), 1), Write(run("s"), 0), Write(run("s"), 1)],
    "unnamed statements": [
        Write(parse("select $1::int + 1") + SYNC, 0), Write(parse("select $1::int + 2") + SYNC, 1),
        Write(bind(["1"]) + execute() + SYNC, 0), Write(bind(["1"]) + execute() + SYNC, 1),
        Write(query("select 1"), 0), Write(bind(["1"]) + execute() + SYNC, 1), Write(bind(["1"]) + SYNC, 0)],
    "one reads in portions": [
        Write(parse("select generate_series(1, 5)") + describe("S") + FLUSH, 0), Write(GROUP + SYNC, 1),
        Write(bind((), "", "cur") + describe("P", "cur") + FLUSH, 0), Write(execute("cur", 2) + FLUSH, 0),
        Write(execute("cur", 2) + FLUSH, 0), Write(execute("cur") + SYNC, 0), Write(query("select 3"), 1)],
    "one copies": [
        Write(query("copy u from stdin"), 0), Write(query("select 2"), 1), Write(data("1\n"), 0),
        Write(COPY_DONE, 0), Write(query("delete from u"), 0), Write(query("select 3"), 1)],
    "one is in a block": [
        Write(query("begin"), 0), Write(GROUP + SYNC, 1), Write(query("select 1/0"), 0),
        Write(query("select 3"), 0), Write(ROLLBACK, 0), Write(GROUP + SYNC, 1)],
    "encodings and zones": [
        Write(query("set timezone = 'Asia/Tokyo'"), 0), Write(query("show timezone"), 1),
        Write(query("set client_encoding = 'latin1'"), 1), Write(query("select 'ä'"), 0),
        Write(query("show timezone; show client_encoding"), 0),
            Write(query("show timezone; show client_encoding"), 1)],
    "one is left by an error in a group": [
        Write(parse("bad") + FLUSH, 0), Write(query("select 1"), 1), Write(GROUP + FLUSH, 0), Write(SYNC, 0),
        Write(query("select 2"), 1)],
}

EVERYWHERE = {**SIMPLE, **EXTENDED, **PREPARED, **COPY, **BIG}
