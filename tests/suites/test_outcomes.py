"""How runs of a suite are read and compared."""

from __future__ import annotations

from tests.suites.outcomes import (
    Outcome,
    differences,
    from_junit,
    from_lines,
    losses,
    settled,
    to_lines,
    totals,
)

PASSED, FAILED, SKIPPED = Outcome("passed"), Outcome("failed", "Traceback\n  E: wrong\n"), Outcome("skipped")


def test_only_what_passes_directly_and_not_pooled_is_a_loss() -> None:
    direct = {"a": PASSED, "b": PASSED, "c": FAILED, "d": PASSED, "e": FAILED}
    pooled = {"a": PASSED, "b": FAILED, "c": FAILED, "d": SKIPPED, "e": PASSED}
    assert [each.test for each in losses(direct, pooled)] == ["b", "d"]
    assert [each.test for each in differences(direct, pooled)] == ["b", "d", "e"]


def test_a_test_that_the_pooled_run_lacks_is_a_loss_and_one_that_it_adds_is_not() -> None:
    (lost,) = losses({"a": PASSED}, {})
    assert lost.pooled.verdict == "missing"
    (added,) = differences({}, {"a": PASSED})
    assert not added.is_loss


def test_chance_is_settled_in_favour_of_what_passed_once() -> None:
    first = {"a": PASSED, "b": FAILED, "c": FAILED}
    again = {"a": FAILED, "b": PASSED, "c": SKIPPED}
    assert settled(first, again) == {"a": PASSED, "b": PASSED, "c": SKIPPED}


def test_lines_say_what_the_run_said() -> None:
    run = {"x::y[ü]": FAILED, "z": PASSED}
    assert from_lines(to_lines(run)) == run


def test_a_test_whose_tear_down_fails_has_failed() -> None:
    lines = [*to_lines({"a": PASSED}), *to_lines({"a": FAILED})]
    assert from_lines(lines) == {"a": FAILED}
    assert from_lines(reversed(lines)) == {"a": FAILED}


def test_a_junit_report_is_read_with_errors_as_failures() -> None:
    run = from_junit("""<testsuites><testsuite>
        <testcase classname="m.C" name="one"/>
        <testcase classname="m.C" name="two"><failure message="wrong">at line 3</failure></testcase>
        <testcase name="three"><error message="broken"/></testcase>
        <testcase classname="m.C" name="four"><skipped/></testcase>
        </testsuite></testsuites>""")
    assert {test: outcome.verdict for test, outcome in run.items()} == {
        "m.C::one": "passed", "m.C::two": "failed", "three": "failed", "m.C::four": "skipped"}
    assert run["m.C::two"].reason == "at line 3"
    assert run["three"].reason == "broken"


def test_totals_count_each_verdict() -> None:
    assert totals({"a": PASSED, "b": PASSED, "c": SKIPPED}) == "2 passed, 0 failed, 1 skipped"
