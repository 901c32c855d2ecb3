"""What a person sees of a run."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from conformance.diagnosis import Explanation
from conformance.diagnosis.differences import differences
from conformance.reports.record import Record, machine, record
from conformance.reports.terminal import SHOWN, show, worst_element
from conformance.reports.track import compare
from conformance.results import Result
from conformance.rules import OWN_DISTANCE
from tests.conformance.reports.runs import FAULT, RUN, everything, golden, of, result


def text_of(data: Record) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(console, data)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(results: list[Result], name: str = "mine.py") -> str:
    return text_of(of(results, backend=name, again=f"check {name}"))


def row(text: str, *cells: str) -> list[str]:
    for line in text.splitlines():
        found = [cell.strip() for cell in line.split("│")[1:-1]]
        if found[: len(cells)] == list(cells):
            return found[len(cells) :]
    raise AssertionError(f"no row {cells} in\n{text}")


def test_the_machine_in_a_line() -> None:
    assert "numpy " in machine()
    assert "\n" not in machine()


def test_a_table_by_area_and_rule() -> None:
    text = shown(
        [
            result("kernel/linear/a:bits"),
            result("kernel/linear/a:gauge", worst=0.25),
            result("kernel/linear/b:gauge", worst=0.5),
            result("kernel/rope/a:bits", "not implemented", None),
            result("kernel/rope/b:bits"),
            result("elementary/exp/a:ulp(4)", "fail", 2.0, "8 ulp"),
            result("kernel/norm/a:gauge", "fail", math.inf, "infinite"),
            result("kernel/norm/b:gauge", "cannot evaluate", None, "no"),
        ]
    )
    assert "mine.py against the specification" in text
    assert row(text, "kernel/linear", "bits") == ["1", "-", "-", ""]
    assert row(text, "kernel/linear", "gauge") == ["2", "-", "-", "0.500"]
    assert row(text, "kernel/rope", "bits") == ["1", "-", "1", ""]
    assert row(text, "elementary/exp", "ulp(4)") == ["-", "1", "-", "2"]
    assert row(text, "kernel/norm", "gauge") == ["-", "2", "-", "inf"]
    assert machine() in text
    last = text.splitlines()[-1]
    assert last == "4 passed, 2 failed, 1 not implemented, 1 cannot evaluate in 1.2 s"


def test_what_is_not_judged_is_no_failure_and_its_reason_is_told() -> None:
    text = shown(
        [
            result("kernel/linear/a:gauge"),
            result("kernel/linear/b:gauge", "not judged", None, "an operand is beyond 65504"),
            result("kernel/norm/a:gauge", "not judged", None, "an operand is beyond 65504"),
            result("model/forward/a:gauge", "not judged", None, "other experts"),
        ]
    )
    assert row(text, "kernel/linear", "gauge") == ["1", "-", "-", "0.000"]
    reason = "an operand is beyond 65504"
    assert f"not judged, as declared: kernel/linear (1), kernel/norm (1): {reason}" in text
    assert "not judged, as declared: model/forward (1): other experts" in text
    assert "not implemented" not in text
    assert text.splitlines()[-1] == "1 passed, 0 failed, 3 not judged in 1.2 s"


def test_what_a_backend_has_nothing_of_is_one_line() -> None:
    text = shown(
        [
            result("kernel/linear/a:gauge"),
            *[result(f"kernel/rope/{i}:gauge", "not implemented", None) for i in range(3)],
            result("kernel/rope/0:bias(1)", "not implemented", None),
            result("cache/paging/a:bits", "not implemented", None),
        ]
    )
    assert "not implemented: kernel/rope (4), cache/paging (1)\n" in text
    assert "│ kernel/rope" not in text
    nothing = shown([result("kernel/rope/a:gauge", "not implemented", None)])
    assert "not implemented: kernel/rope (1)" in nothing
    assert "passed ┃" not in nothing
    assert "not implemented: " not in shown([result("kernel/linear/a:gauge")])


def test_a_margin_that_is_no_measure_hides_no_other() -> None:
    own = f"worst margin 1: 99% {OWN_DISTANCE}"
    text = shown(
        [
            result("kernel/linear/a:gauge", worst=0.25),
            result("kernel/linear/b:gauge", worst=1.0, message=own),
            result("kernel/rope/b:gauge", worst=1.0, message=own),
        ]
    )
    assert row(text, "kernel/linear", "gauge") == ["2", "-", "-", "0.250*"]
    assert row(text, "kernel/rope", "gauge") == ["1", "-", "-", "*"]
    assert f"* without 2 margins: most {OWN_DISTANCE}" in text
    assert "*" not in shown([result("kernel/linear/a:gauge", worst=0.25)])


def test_a_clean_run_says_so_in_a_line() -> None:
    assert shown([result("a/b/c:bits")]).splitlines()[-1] == "1 passed, 0 failed in 1.2 s"


def test_each_failure_with_the_line_that_repeats_it() -> None:
    text = shown([result("kernel/linear/a:bits", "fail", 0.5, "y: 1 of 2 [differ]")], "m[1].py")
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("FAIL kernel/linear/a:bits  (SPEC 2.2)")
    assert lines[at + 1] == "y: 1 of 2 [differ]"
    assert lines[at + 2] == "bitforbit check m[1].py --case 'kernel/linear/a:bits'"


def test_many_failures_are_cut_and_counted() -> None:
    text = shown([result(f"a/b/{i}:bits", "fail", 1.0, f"at {i}") for i in range(SHOWN + 7)])
    assert text.count("FAIL ") == SHOWN
    assert "... and 7 more: 7 of a/b; --json FILE has all" in text


def test_failures_that_read_the_same_are_shown_once() -> None:
    same = [result(f"a/b/{i}:bits", "fail", None, "no [y]") for i in range(SHOWN + 7)]
    other = result("a/b/other:bits", "fail", None, "no z")
    lines = [line.strip() for line in shown([*same, other]).splitlines()]
    first = lines.index("FAIL a/b/0:bits  (SPEC 2.2)")
    assert lines[first + 1 : -1] == [
        "no [y]",
        "bitforbit check mine.py --case 'a/b/0:bits'",
        f"and {SHOWN + 6} more cases with the same message: "
        "a/b/1:bits, a/b/2:bits, a/b/3:bits, ...",
        "FAIL a/b/other:bits  (SPEC 2.2)",
        "no z",
        "bitforbit check mine.py --case 'a/b/other:bits'",
    ]
    assert "and 1 more case with the same message: a/b/1:bits\n" in shown(same[:2])


def test_failures_of_one_message_and_other_explanations_are_told_apart() -> None:
    results = [result(f"a/b/{i}:bits", "fail", 1.0, "wrong") for i in range(3)]
    results[2] = replace(results[2], outcome="cannot evaluate")
    data = record(RUN, results, {"a/b/1:bits": Explanation((FAULT,))})
    text = text_of(data)
    assert text.count("FAIL ") == 2
    assert text.count("CANNOT EVALUATE ") == 1


def test_what_is_cut_is_counted_in_cases() -> None:
    results = [result(f"a/b/{i}:bits", "fail", 1.0, f"at {i // 2}") for i in range(2 * SHOWN + 3)]
    text = shown(results)
    assert text.count("FAIL ") == text.count("and 1 more case with the same message") == SHOWN
    assert "... and 3 more: 3 of a/b; --json FILE has all" in text


def test_what_a_backend_says_is_no_markup() -> None:
    assert "[red]odd[/red] [/]" in shown([result("a/b/c:bits", "fail", None, "[red]odd[/red] [/]")])


def test_the_worst_element_and_the_nearest_fault_of_a_failure() -> None:
    lines = [line.strip() for line in text_of(everything()).splitlines()]
    at = lines.index("FAIL kernel/rope/half:gauge  (SPEC 2.2)")
    assert lines[at + 1] == "at [0]: far"
    assert lines[at + 2].startswith("worst y[3, 0, 0]: ")
    assert "nan (0x7fc00000) got; error inf, bound " in lines[at + 2]
    assert " ".join(lines[at + 3 : at + 5]).startswith(FAULT)


def test_the_worst_of_several_outputs_is_shown() -> None:
    y, z = np.ones(4, np.float32), np.ones(4, np.float32)
    several = replace(golden(y), outputs={"y": y, "z": z})
    answer = {"y": y * np.float32(1.001), "z": z * np.float32(1.1)}
    wrong = differences(several, answer, 2.0**-24)
    for order in (wrong, wrong[::-1]):
        data = record(RUN, [result("a/b/c:bits", "fail", 1.0, "no")], None, {"a/b/c:bits": order})
        assert "worst z[0]: 1.0 (0x3f800000) expected" in text_of(data)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("", "1 (0x3f800000) expected, 2 (0x40000000) got; error 1, bound 0.5"),
        (
            "y: 1 of 4 elements differ, first at [3]: 1 (0x3f800000) expected, 2 (0x40000000) got",
            "error 1, bound 0.5",
        ),
        ("at [3]: 1 (0x3f800000) expected, 2 (0x40000000) got; error 1, bound 0.5", ""),
        (
            "at [2]: 1 (0x3f800000) expected, 2 (0x40000000) got; error 1, bound 0.5",
            "1 (0x3f800000) expected, 2 (0x40000000) got; error 1, bound 0.5",
        ),
    ],
)
def test_what_the_message_says_of_the_worst_element_is_not_said_again(said: str, left: str) -> None:
    worst = {"index": [3], "error": 1.0, "bound": 0.5, "margin": 2.0}
    worst |= {"expected": "1", "expected_hex": "0x3f800000", "got": "2", "got_hex": "0x40000000"}
    case = {"message": said, "outputs": [{"name": "y", "unit": "bound", "worst": worst}]}
    assert worst_element(case) == (f"worst y[3]: {left}" if left else "")


def test_of_integers_the_worst_element_has_no_bound() -> None:
    y = np.array([1, 2, 3])
    wrong = differences(golden(y), {"y": np.array([1, 9, 4])}, 2.0**-24)
    data = record(RUN, [result("a/b/c:bits", "fail", 0.5, "no")], None, {"a/b/c:bits": wrong})
    line = next(line for line in text_of(data).splitlines() if "worst y" in line)
    assert line.strip() == (
        "worst y[1]: 2 (0x0000000000000002) expected, 9 (0x0000000000000009) got"
    )


def test_what_changed() -> None:
    old = of([result("a/b/c:gauge", worst=0.1), result("a/b/d:bits"), result("a/b/e:bits")])
    now = of([result("a/b/c:gauge", worst=0.5), result("a/b/d:bits", "fail", 1.0, "no")])

    def changes(before: Record, after: Record) -> list[str]:
        data: dict[str, Any] = {**after, "track": compare(before, after, lambda case: True)}
        lines = [line.strip() for line in text_of(data).splitlines()]
        start = next(i for i, line in enumerate(lines) if line.startswith("against the run of"))
        return lines[start:-1]

    assert changes(old, now) == [
        "against the run of 2026-05-04T03:02:01+00:00 of mine.py: 3 passed, 0 failed",
        "1 newly failing",
        "a/b/d:bits",
        "1 margin grew",
        "a/b/c:gauge  0.1 -> 0.5",
        "1 gone",
        "a/b/e:bits",
    ]
    assert changes(old, old)[1:] == ["nothing changed"]
    many = of([result(f"a/b/{i}:bits", "fail", 1.0, "no") for i in range(SHOWN + 3)])
    fine = of([result(f"a/b/{i}:bits") for i in range(SHOWN + 3)])
    assert changes(fine, many)[-1] == "... and 3 more"
    assert changes(many, fine)[1:] == [f"{SHOWN + 3} newly passing"]


def failing(area: str, count: int, diagnosis: str = "") -> Record:
    results = [result(f"{area}/c{i}:gauge", "fail", 9.0, f"{area} {i}") for i in range(count)]
    explanations = {r.id: Explanation((diagnosis,)) for r in results} if diagnosis else {}
    return record(RUN, results, explanations)


def test_one_mistake_does_not_hide_another() -> None:
    """Operations take turns for the places that there are, and what is left out is counted."""
    many, few = failing("kernel/attention", SHOWN + 12), failing("kernel/rms_norm", 3)
    text = text_of(many | {"cases": many["cases"] + few["cases"]})
    for i in range(3):
        assert f"FAIL kernel/rms_norm/c{i}:gauge" in text
    assert text.count("FAIL ") == SHOWN
    assert "... and 15 more: 15 of kernel/attention; --json FILE has all" in text


def test_the_nearest_faults_of_all_failures_are_told_at_the_end() -> None:
    one = "within the bound of the reference with `eps-outside`, all 4 values (eps is added later)"
    two = "equals the reference with any of `a`, `b`, all 9 values: they cannot be told apart here"
    first, second = failing("kernel/rms_norm", 2, two), failing("kernel/linear", 3, one)
    text = text_of(first | {"cases": first["cases"] + second["cases"]})
    _, _, end = text.partition("nearest known faults, by the failures that name them first\n")
    assert end.splitlines()[:2] == ["    3  eps-outside  eps is added later", "    2  a or b"]
    assert "nearest known faults" not in text_of(failing("kernel/linear", 1, one))
    assert "nearest known faults" not in text_of(failing("kernel/linear", 2))


def test_one_case_that_is_not_asked() -> None:
    text = text_of(of([result("a/b/c:gauge")], not_asked=["a/b/c:bits"], contract="bounds"))
    assert "1 case of bits is not asked of a backend that rounds" in text
