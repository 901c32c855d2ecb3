"""Failing cases made small: on predicates whose smallest case is known."""

from __future__ import annotations

from typing import Any

from conformance.fuzzing.case import Case, Made
from conformance.fuzzing.draw import Asked
from conformance.fuzzing.shrinking import shrunk

ASKED = Asked(exact=False)


def choices(made: Made) -> dict[str, Any]:
    return {choice.name: choice.value for choice in made.choices}


def failing(operation: str, fails: Any) -> Made:
    """The first draw that fails."""
    drawn = (Case(operation, 1, i).draw(ASKED) for i in range(1000))
    return next(made for made in drawn if fails(made))


def test_sizes_go_down_to_the_least_that_fails() -> None:
    def fails(made: Made) -> bool:
        return bool(choices(made)["width"] > 33 and choices(made)["rows"] >= 2)

    least = choices(shrunk(failing("linear", fails), fails, ASKED))
    assert least == {
        "width": 34, "square": False, "rows": 2, "columns": 1,
        "x": "normal", "w": "normal", "bias": False,
    }  # fmt: skip


def test_a_parameter_that_matters_stays() -> None:
    def fails(made: Made) -> bool:
        about = made.recipe.parameters
        return bool(about["softcap"] == 5.0 and made.recipe.inputs["q"].shape[1] >= 4)

    made = shrunk(failing("attention", fails), fails, ASKED)
    assert made.recipe.parameters["softcap"] == 5.0
    assert made.recipe.inputs["q"].shape == (1, 4, 1)
    assert made.recipe.parameters["window"] is None
    assert "sinks" not in made.recipe.inputs


def test_data_matter_too() -> None:
    def fails(made: Made) -> bool:
        return bool((made.recipe.inputs["x"] == 0).any())

    made = shrunk(failing("rms_norm", fails), fails, ASKED)
    assert made.recipe.inputs["x"].size <= 16
    assert choices(made)["x"] in ("whole-numbers", "zeros", "one-hot", "one-sign")


def test_the_least_case_is_repeated_by_its_words() -> None:
    def fails(made: Made) -> bool:
        return bool(choices(made)["rows"] >= 3)

    made = shrunk(failing("rope", fails), fails, ASKED)
    again = Case.read(str(made.case)).draw(ASKED)
    assert choices(again) == choices(made)
    assert again.recipe.make().to_bytes() == made.recipe.make().to_bytes()


def test_tries_and_time_are_limited() -> None:
    tried = []

    def fails(made: Made) -> bool:
        tried.append(made)
        return True

    first = Case("linear", 1, 3).draw(ASKED)
    assert shrunk(first, fails, ASKED, tries=0) is first
    assert shrunk(first, fails, ASKED, seconds=0) is first
    shrunk(first, fails, ASKED, tries=3)
    assert len(tried) == 3


def test_a_case_that_nothing_makes_smaller_is_itself() -> None:
    first = Case("linear", 1, 3).draw(ASKED)
    assert shrunk(first, lambda made: False, ASKED) is first
