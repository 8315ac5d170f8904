"""What do the results of a program's tests say of the program?"""

from __future__ import annotations

from oncurve.sandbox.program_results import ProgramVerdict, TestResult

PASSED, WRONG = TestResult("passed"), TestResult("wrong", "returned 3")


def test_a_program_is_correct_if_all_its_tests_passed_and_there_are_some() -> None:
    assert ProgramVerdict((PASSED, PASSED)).is_correct
    assert not ProgramVerdict((PASSED, WRONG)).is_correct
    assert not ProgramVerdict(()).is_correct
    assert not ProgramVerdict((), broken="no test in the row").is_correct


def test_a_verdict_names_the_first_test_that_did_not_pass() -> None:
    verdict = ProgramVerdict((PASSED, WRONG, TestResult("timeout")))
    assert (verdict.num_passed, verdict.kind) == (1, "wrong")
    assert verdict.summary == "1 of 3 tests passed; test 2: wrong: returned 3"
    assert ProgramVerdict(()).passed_fraction == 0.0
