"""What clients send, step by step: each step waits for the answers to the one before."""

from __future__ import annotations

from pooler.demo.client import FLUSH, SYNC, bind, close, describe, execute, message, parse, query

GROUP = parse("select 1") + bind() + describe() + execute()
COPY_DONE = message(b"c")
COPY_FAIL = message(b"f", b"no\0")


def copy_data(text: str) -> bytes:
    """A CopyData."""
    return message(b"d", text.encode())


def call(oid: int = 1) -> bytes:
    """A FunctionCall without arguments."""
    return message(b"F", oid.to_bytes(4, "big") + b"\0\0\0\0\0\0")


def group(text: str, name: str = "", *values: str) -> bytes:
    """Parse to Execute, no Sync."""
    return parse(text, name) + bind(values, name) + execute()


def run(name: str, *values: str) -> bytes:
    """Bind, Execute and Sync of a prepared statement."""
    return bind(values, name) + execute() + SYNC


SCRIPTS: dict[str, list[bytes]] = {
    "simple": [query("select 1"), query("select 2")],
    "empty": [query("")],
    "multi": [query("select 1; insert a; select 2")],
    "multi_error": [query("select 1; select 1/0; select 2"), query("select 3")],
    "transaction": [query("begin"), query("insert a"), query("commit")],
    "rolled_back": [query("begin"), query("insert a"), query("rollback")],
    "failed": [query("begin"), query("select 1/0"), query("select 2"), query("commit"), query("select 3")],
    "pipelined_simple": [query("select 1") + query("begin") + query("insert a") + query("commit")],
    "extended": [GROUP + SYNC],
    "groups": [(GROUP + SYNC) * 3],
    "group_error": [group("select 1/0") + group("select 2") + SYNC + group("select 3") + SYNC],
    "implicit_rollback": [group("insert a") + group("select 1/0") + SYNC, query("select 1")],
    "bind_error": [bind((), "nope") + execute() + SYNC, query("select 1")],
    "parse_error": [parse("bad", "s") + bind((), "s") + SYNC, parse("select 1", "s") + run("s")],
    "parse_error_unnamed": [parse("bad") + SYNC, bind() + execute() + SYNC, GROUP + SYNC],
    "error_then_query": [parse("bad") + query("select 1") + SYNC, query("select 2")],
    "error_late_query": [parse("bad") + FLUSH, query("select 1"), SYNC, query("select 2")],
    "error_flush_groups": [parse("bad") + FLUSH, GROUP + FLUSH, SYNC + GROUP + SYNC],
    "query_then_group": [query("select 1") + GROUP + SYNC],
    "group_then_query": [GROUP + query("select 2")],
    "flush": [parse("rows 3 1") + describe("S") + FLUSH, bind() + FLUSH, execute() + FLUSH, SYNC],
    "flush_between": [GROUP + SYNC + GROUP + FLUSH, SYNC],
    "flush_alone": [FLUSH + query("select 1")],
    "sync_alone": [SYNC, SYNC + SYNC, query("select 1")],
    "sync_first": [SYNC + query("select 1")],
    "sync_in_transaction": [query("begin"), SYNC, query("commit")],
    "begin_extended": [
        parse("begin", "b") + describe("S", "b") + bind((), "b") + describe() + execute() + SYNC,
        group("insert a") + SYNC, group("commit") + SYNC],
    "begin_flush": [parse("begin", "b") + describe("S", "b") + FLUSH, run("b"), query("rollback")],
    "named": [parse("select $1", "s") + SYNC, run("s", "1"), run("s", "2"), close("S", "s") + SYNC],
    "named_gone": [parse("select 1", "s") + SYNC, close("S", "s") + SYNC, run("s"), query("select 2")],
    "close_missing": [close("S", "nope") + close("P", "nope") + SYNC],
    "describe_missing": [describe("S", "nope") + parse("select 1") + SYNC, query("select 1")],
    "reparse": [parse("select 1", "s") + SYNC, close("S", "s") + parse("select 2", "s") + SYNC, run("s")],
    "close_skipped": [
        parse("select 1", "s") + SYNC, bind((), "nope") + close("S", "s") + SYNC, run("s")],
    "parse_skipped": [bind((), "nope") + parse("select 1", "s") + SYNC, run("s"), query("select 2")],
    "portal_named_as_statement": [
        parse("select 3", "n") + SYNC, bind((), "n", "n") + close("P", "n") + SYNC, run("n")],
    "forgotten_and_new_at_once": [
        parse("select 1", "s") + SYNC, query("DEALLOCATE ALL") + parse("select 2", "s") + run("s"), run("s")],
    "named_behind_the_first_forgetting": [
        query("DEALLOCATE ALL") + parse("select 2", "s") + SYNC, run("s"), query("DISCARD ALL"), run("s")],
    "a_name_twice_at_once": [
        parse("select 1", "x") + close("S", "x") + SYNC,
        parse("select 1", "s") + parse("select 2", "s") + GROUP + SYNC, run("s")],
    "forgotten_in_a_group": [
        parse("select 1", "s") + SYNC, group("DEALLOCATE ALL") + parse("select 2", "s") + run("s"), run("s")],
    "forgotten_behind_an_error": [
        parse("select 1", "s") + SYNC,
        group("select 1/0") + group("DEALLOCATE ALL") + SYNC + run("s") + query("DISCARD ALL") + run("s")],
    "unnamed_not_dropped_by_a_skipped_query": [
        parse("select 1") + SYNC, parse("select 2") + bind((), "nope") + query("select 3") + SYNC,
        bind() + execute() + SYNC],
    "unnamed_not_replaced_by_a_skipped_parse": [
        parse("select 1") + SYNC, bind((), "nope") + parse("select 2") + SYNC, bind() + execute() + SYNC],
    "unnamed_not_dropped_by_a_skipped_close": [
        parse("select 1") + SYNC, bind((), "nope") + close("S") + SYNC, bind() + execute() + SYNC],
    "closed_and_prepared_in_a_skipped_group": [
        parse("select 1", "s") + SYNC, bind((), "nope") + close("S", "s") + parse("select 2", "s") + SYNC,
        run("s")],
    "prepared_again_behind_a_skipped_parse": [
        bind((), "nope") + parse("select 1", "s") + SYNC + parse("select 2", "s") + SYNC + run("s")],
    "forgotten_behind_a_copy": [
        parse("select 1", "s") + SYNC, query("copy in; DEALLOCATE ALL") + copy_data("1\n") + COPY_DONE],
    "unnamed_kept": [parse("select $1") + SYNC, run("", "1"), run("", "2")],
    "unnamed_dropped_by_query": [parse("select 1") + SYNC, query("select 2"), GROUP + SYNC],
    "function": [call(), query("begin"), call(), query("commit")],
    "copy_in": [query("copy in"), copy_data("1\n") + copy_data("2\n") + COPY_DONE, query("select 1")],
    "copy_in_at_once": [query("copy in") + copy_data("1\n") + COPY_DONE + query("select 1")],
    "copy_fail": [query("copy in"), copy_data("1\n") + COPY_FAIL, query("select 1")],
    "copy_bad_row": [query("copy in"), copy_data("bad\n"), copy_data("2\n") + COPY_DONE, query("select 1")],
    "copy_bad_at_once": [query("copy in") + copy_data("bad\n") * 3 + COPY_DONE + query("select 1")],
    "copy_out": [query("copy out 5"), group("copy out 3") + SYNC],
    "copy_extended": [group("copy in") + SYNC, copy_data("1\n") + COPY_DONE + SYNC, query("select 1")],
    "copy_syncs": [
        group("copy in") + SYNC, copy_data("1\n") + SYNC + FLUSH + copy_data("2\n") + COPY_DONE + SYNC,
        query("select 1")],
    "copy_extended_at_once": [
        group("copy in") + SYNC + copy_data("1\n") + COPY_DONE + SYNC + query("select 1")],
    "copy_extended_aborted_by_pipeline": [
        group("copy in") + SYNC + GROUP + SYNC + GROUP + SYNC, query("select 1")],
    "copy_extended_bad_row": [
        group("copy in") + SYNC, copy_data("bad\n") + COPY_DONE + SYNC, query("select 1")],
    "copy_stray": [copy_data("1\n") + COPY_DONE + query("select 1")],
    "statuses": [query("SET TimeZone='Asia/Tokyo'"), query("show TimeZone")],
    "big_rows": [query("rows 40 9000")],
    "big_query": [query("select " + "x" * 200_000)],
    "big_bind": [parse("select $1", "s") + SYNC, run("s", "y" * 200_000)],
    "big_parse": [parse("select " + "z" * 150_000) + bind() + execute() + SYNC],
    "two_copies": [query("copy in;"), copy_data("1\n") + COPY_DONE],
}
