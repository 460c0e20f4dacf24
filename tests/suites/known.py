"""What cannot pass through a pooler, and why: every entry stands in docs/compatibility.md, "Driver suites".

A pattern (as of a shell, in the words of the suite's runner) covers what it has to and no more: a difference
that none covers is a fault to be mended, or a reason to be written down there first.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from tests.suites import node_names, regress_names
from tests.suites.outcomes import Difference, Explained
from tests.suites.rig import Pool


class Reason(StrEnum):
    """The words of the table in docs/compatibility.md."""

    PROCESS_ID = "process id"
    TEMPORARY = "temporary tables"
    LISTEN = "LISTEN"
    HELD = "cursors WITH HOLD"
    PREPARE = "SQL PREPARE"
    NAMES = "names of statements in SQL"
    SAME_SESSION = "one session in turns"
    LOCKS = "session advisory locks"
    USED_BEFORE = "a session used before"
    SEQUENCES = "currval and lastval"
    IN_C = "memory of functions in C"
    COUNTS = "counts of a session"
    IDLE_END = "a session ended while idle"
    STAYS = "sessions outlive clients"
    ALTERED = "prepared before an ALTER"
    CHANCE = "chance"


class Known(NamedTuple):
    """Tests of the suites that `suite` (a pattern) names, through these pools."""

    suite: str
    pools: tuple[Pool, ...]
    reason: Reason
    tests: tuple[str, ...]


_BOTH: Final[tuple[Pool, ...]] = ("session", "transaction")
_SESSION: Final[tuple[Pool, ...]] = ("session",)
_TRANSACTION: Final[tuple[Pool, ...]] = ("transaction",)
_ASYNCPG_LISTENS: Final = ("tests/test_listeners.py::TestListeners::test_listen_*",)
_PSYCOPG2_LISTENS: Final = (
    "tests/test_async.py::AsyncTests::test_notify",
    "tests/test_notify.py::NotifiesTests::test_many_notifies",
    "tests/test_notify.py::NotifiesTests::test_notifies_received_on_*",
    "tests/test_notify.py::NotifiesTests::test_notify_attributes",
    "tests/test_notify.py::NotifiesTests::test_notify_payload",
)
_REGRESS: Final = (
    *(Known(suite, _BOTH, Reason.USED_BEFORE, regress_names.USED_BEFORE)
      for suite in ("pg_regress", "pg_regress-pin")),
    Known("pg_regress-once", _SESSION, Reason.COUNTS, regress_names.COUNTS),
    Known("pg_regress", _TRANSACTION, Reason.TEMPORARY, regress_names.TEMPORARY),
    Known("pg_regress", _TRANSACTION, Reason.PREPARE, regress_names.PREPARE),
    Known("pg_regress", _TRANSACTION, Reason.HELD, regress_names.HELD),
    Known("pg_regress", _TRANSACTION, Reason.LOCKS, regress_names.LOCKS),
    Known("pg_regress*", _TRANSACTION, Reason.SEQUENCES, regress_names.SEQUENCES),
    Known("pg_regress*", _TRANSACTION, Reason.IN_C, regress_names.IN_C),
    Known("pg_regress*", _TRANSACTION, Reason.COUNTS, regress_names.COUNTS),
)
_NODE: Final = (
    Known("node-postgres", _TRANSACTION, Reason.TEMPORARY, node_names.TEMPORARY),
    Known("node-postgres", _TRANSACTION, Reason.LISTEN, node_names.LISTEN),
    Known("node-postgres*", _TRANSACTION, Reason.IDLE_END, node_names.IDLE_END),
    Known("postgres-js", _TRANSACTION, Reason.TEMPORARY, node_names.JS_TEMPORARY),
    Known("postgres-js", _TRANSACTION, Reason.LISTEN, node_names.JS_LISTEN),
)
KNOWN: Final = (
    *_REGRESS, *_NODE,
    Known("asyncpg", _BOTH, Reason.IDLE_END, (
        "tests/test_pool.py::TestPool::test_pool_min_size_restored_after_idle_connection_loss",)),
    Known("asyncpg", _TRANSACTION, Reason.LISTEN, _ASYNCPG_LISTENS),
    Known("asyncpg", _TRANSACTION, Reason.TEMPORARY, (
        "tests/test_copy.py::TestCopyTo::test_copy_records_to_table_generator_error",
        "tests/test_copy.py::TestCopyTo::test_copy_records_to_table_unprintable_error")),
    Known("asyncpg", _TRANSACTION, Reason.NAMES, (
        "tests/test_copy.py::TestCopyTo::test_copy_records_to_table_no_stmt_cache",
        "tests/test_prepare.py::TestPrepare::test_prepare_explicitly_named")),
    Known("asyncpg", _TRANSACTION, Reason.SAME_SESSION, (
        "tests/test_pool.py::TestPool::test_pool_remote_close",)),
    Known("asyncpg", _BOTH, Reason.STAYS, (
        "tests/test_cache_invalidation.py::TestCacheInvalidation::test_type_cache_invalidation_in_pool",)),
    Known("asyncpg", _TRANSACTION, Reason.ALTERED, (
        "tests/test_prepare.py::TestPrepare::test_prepare_statement_invalid",)),
    Known("asyncpg", _BOTH, Reason.CHANCE, (
        "tests/test_execute.py::TestExecuteMany::test_executemany_server_failure_during_writes",)),
    Known("pg8000", _TRANSACTION, Reason.TEMPORARY, (
        "test/*/test_query.py::test_transactions", "test/native/test_query.py::test_alter",
        "test/native/test_query.py::test_create", "test/native/test_query.py::test_insert_returning",
        "test/native/test_query.py::test_parametrized", "test/native/test_query.py::test_row_count_*",
        "test/native/test_typeconversion.py::test_enum_*_round_trip",
        "test/native/test_typeconversion.py::test_insert_null",
        "test/native/test_typeconversion.py::test_timestamp_mismatch")),
    Known("pg8000", _TRANSACTION, Reason.LISTEN, (
        "test/native/test_connection.py::test_notify",
        "test/native/test_connection.py::test_notify_with_payload")),
    Known("pg8000", _TRANSACTION, Reason.PREPARE, (
        "test/native/test_query.py::test_sql_prepared_statement",)),
    Known("pg8000", _TRANSACTION, Reason.NAMES, ("test/*/test_query.py::test_close_prepared_statement",)),
    Known("pg8000", _TRANSACTION, Reason.SAME_SESSION, (
        "test/native/test_connection.py::test_broken_pipe_flush",
        "test/native/test_connection.py::test_broken_pipe_read")),
    Known("psycopg2", _TRANSACTION, Reason.PROCESS_ID, (
        "tests/test_connection.py::TestConnectionInfo::test_backend_pid",)),
    Known("psycopg2", _TRANSACTION, Reason.LISTEN, (
        *_PSYCOPG2_LISTENS, "tests/test_async.py::AsyncTests::test_poll_conn_for_notification",
        "tests/test_notify.py::NotifiesTests::test_notify_deque",
        "tests/test_notify.py::NotifiesTests::test_notify_object")),
    Known("psycopg2", _TRANSACTION, Reason.TEMPORARY, (
        "tests/test_async.py::AsyncTests::test_async_after_async",
        "tests/test_async.py::AsyncTests::test_async_iter",
        "tests/test_async.py::AsyncTests::test_async_scroll", "tests/test_async.py::AsyncTests::test_error",
        "tests/test_async.py::AsyncTests::test_commit_while_async",
        "tests/test_extras_dictcursor.py::ExtrasDictCursor*Tests::test*",
        "tests/test_extras_dictcursor.py::NamedTupleCursorTest::test_*",
        "tests/test_transaction.py::TransactionTests::test_*")),
    Known("psycopg2", _TRANSACTION, Reason.HELD, (
        "tests/test_cursor.py::NamedCursorTests::test_withhold*",)),
    Known("psycopg2", _TRANSACTION, Reason.SAME_SESSION, (
        "tests/test_cursor.py::CursorTests::test_external_close_async",)),
    Known("sqlalchemy-*", _TRANSACTION, Reason.TEMPORARY, (
        "test/dialect/test_suite.py::ComponentReflectionTest_*ObjectScope.ANY-*",
        "test/dialect/test_suite.py::ComponentReflectionTest_*ObjectScope.TEMPORARY-*",
        "test/dialect/test_suite.py::ComponentReflectionTest_*::test_get_temp_*",
        "test/dialect/test_suite.py::ComponentReflectionTest_*::test_reflect_table_temp_table",
        "test/dialect/test_suite.py::HasTableTest_*::test_has_table_temp_*")),
)


def known(suite: str, pool: Pool) -> list[Explained]:
    """What is known of one suite through one pool."""
    return [Explained(pattern, entry.reason) for entry in KNOWN
            if pool in entry.pools and fnmatchcase(suite, entry.suite) for pattern in entry.tests]


def by_reason(found: Sequence[Difference], explained: Sequence[Explained]) -> dict[str, list[Difference]]:
    """Each difference under its first reason; "" for those that have none."""
    sorted_out: dict[str, list[Difference]] = {}
    for each in found:
        reason = next((entry.reason for entry in explained if fnmatchcase(each.test, entry.pattern)), "")
        sorted_out.setdefault(reason, []).append(each)
    return sorted_out
