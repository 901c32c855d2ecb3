"""What a person sees of a run."""

from __future__ import annotations

import io
import math

from rich.console import Console

from conformance.reports.terminal import SHOWN, machine, show
from conformance.rules import Outcome
from conformance.runner import Result


def result(
    case: str, outcome: Outcome = "pass", worst: float | None = 0.0, message: str = ""
) -> Result:
    name, rule = case.rsplit(":", 1)
    return Result(case, name.split("/")[0], "2.2", rule, outcome, worst, message)


def shown(results: list[Result], name: str = "mine.py") -> str:
    console = Console(file=io.StringIO(), width=160)
    show(console, name, results, 1.25)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


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
            result("elementary/exp/a:ulp(4)", "fail", 2.0, "8 ulp"),
            result("kernel/norm/a:gauge", "fail", math.inf, "infinite"),
            result("kernel/norm/b:gauge", "cannot evaluate", None, "no"),
        ]
    )
    assert "mine.py against the specification" in text
    assert row(text, "kernel/linear", "bits") == ["1", "-", "-", ""]
    assert row(text, "kernel/linear", "gauge") == ["2", "-", "-", "0.500"]
    assert row(text, "kernel/rope", "bits") == ["-", "-", "1", ""]
    assert row(text, "elementary/exp", "ulp(4)") == ["-", "1", "-", "2"]
    assert row(text, "kernel/norm", "gauge") == ["-", "2", "-", "inf"]
    assert machine() in text
    last = text.splitlines()[-1]
    assert last == "3 passed, 2 failed, 1 not implemented, 1 cannot evaluate in 1.2 s"


def test_a_clean_run_says_so_in_a_line() -> None:
    assert shown([result("a/b/c:bits")]).splitlines()[-1] == "1 passed, 0 failed in 1.2 s"


def test_each_failure_with_the_line_that_repeats_it() -> None:
    text = shown([result("kernel/linear/a:bits", "fail", 0.5, "y: 1 of 2 [differ]")], "m[1].py")
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("FAIL kernel/linear/a:bits  (SPEC 2.2)")
    assert lines[at + 1] == "y: 1 of 2 [differ]"
    assert lines[at + 2] == "bitforbit check m[1].py --case 'kernel/linear/a:bits'"


def test_many_failures_are_cut_and_counted() -> None:
    text = shown([result(f"a/b/{i}:bits", "fail", 1.0, "wrong") for i in range(SHOWN + 7)])
    assert text.count("FAIL ") == SHOWN
    assert "... and 7 more; --json FILE has all" in text


def test_what_a_backend_says_is_no_markup() -> None:
    assert "[red]odd[/red] [/]" in shown([result("a/b/c:bits", "fail", None, "[red]odd[/red] [/]")])
