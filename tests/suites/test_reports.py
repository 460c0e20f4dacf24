"""How what pg_regress and the tests of node-postgres print is read."""

from __future__ import annotations

from tests.suites.node import read_file
from tests.suites.pg_regress import read_run

SAID = """(using postmaster on 127.0.0.1, port 1)
test test_setup                   ... ok          300 ms
parallel group (2 tests):  boolean date
     boolean                      ... ok          101 ms
     collate.icu.utf8             ... ok           99 ms
     random                       ... failed (ignored)      7 ms
     date                         ... FAILED      120 ms
"""
DIFFERENCES = """diff -U3 /a/expected/date.out /b/results/date.out
--- /a/expected/date.out
+++ /b/results/date.out
+1
-2
diff -U3 /a/expected/random.out /b/results/random.out
-3
"""


def test_each_test_of_a_schedule_has_its_verdict_and_its_own_difference() -> None:
    run = read_run(SAID, DIFFERENCES)
    assert {test: outcome.verdict for test, outcome in run.items()} == {
        "test_setup": "passed", "boolean": "passed", "collate.icu.utf8": "passed", "random": "skipped",
        "date": "failed"}
    assert run["date"].reason == "+1", "what came first"
    assert run["boolean"].detail == ""


def test_a_file_that_ends_at_its_first_failure_has_failed_and_what_it_did_before_passed() -> None:
    said = "api-tests.js\n  one ✔\n  two ? - SKIPPED\n  three FAILED!\n\nError: no\n"
    run = read_file("pg/api-tests.js", 255, said)
    assert {test: outcome.verdict for test, outcome in run.items()} == {
        "pg/api-tests.js::one": "passed", "pg/api-tests.js::two": "skipped", "pg/api-tests.js": "failed"}
    assert run["pg/api-tests.js"].reason == "Error: no"
    assert read_file("f", 0, "f\n")["f"].verdict == "passed"
