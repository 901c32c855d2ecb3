"""Cases: written and read, drawn for any backend, and made by the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.backends.composed import ComposedBackend
from conformance.fuzzing.case import OPERATIONS, Case
from conformance.fuzzing.draw import Asked, Value
from conformance.golden import read
from conformance.operations import Sessions
from conformance.rules import BITS_FOR_ALL
from conformance.runner import attempt
from reference.errors import RequestError

EXACT: dict[str, Any] = {"accumulator": "exact"}
FMA = {**EXACT, "fma": True}
FLOAT32 = {"accumulator": "float32"}
FLOAT16 = {"accumulator": "float32", "operands": "float16"}

WORDS = st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True).filter(
    lambda word: word not in ("true", "false", "null")
)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS)


@given(
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10**9),
    st.dictionaries(WORDS, VALUES, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_a_case_is_read_as_it_is_written(
    operation: str, seed: int, index: int, given: dict[str, Value]
) -> None:
    case = Case(operation, seed, index, given)
    assert repr(Case.read(str(case))) == repr(case)


@pytest.mark.parametrize(
    "text", ["", "attention", "attention/1", "nothing/1/2", "attention/1/x", "attention/1/2 rows"]
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"^--case: "):
        Case.read(text)


def test_choices_that_a_case_does_not_have_are_named() -> None:
    asked = Asked.of(EXACT)
    assert Case.read("linear/1/2 rows=2 colour=3 width=0").refused(asked) == ["colour", "width"]
    assert Case.read("linear/1/2 rows=2").refused(asked) == []


@pytest.mark.parametrize("numerics", [EXACT, FMA, FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_drawn_for_every_backend(
    operation: str, numerics: dict[str, Any]
) -> None:
    """The golden has the rules of a stored one, and the same bytes when it is made again."""
    asked = Asked.of(numerics)
    for index in range(3):
        made = Case(operation, 11, index).draw(asked)
        golden = made.golden(numerics)
        assert golden.id == f"{OPERATIONS[operation][0]}/{operation}/fuzz_11_{index}"
        assert golden.to_bytes() == made.golden(numerics).to_bytes()
        if numerics is EXACT or operation in BITS_FOR_ALL:
            assert "bits" in golden.rules
        if numerics is FMA:
            assert ("either" in golden.rules) == bool(golden.forms)
        if numerics in (FLOAT32, FLOAT16) and operation not in BITS_FOR_ALL:
            assert "bits" not in golden.rules
        assert ("gauge" in golden.rules) == bool(golden.gauges)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_case_by_its_fewest_choices_is_the_same(operation: str) -> None:
    asked = Asked.of(EXACT)
    made = Case(operation, 5, 0).draw(asked)
    other = Case(operation, 5, 1, {c.name: c.value for c in made.choices}).draw(asked)
    short = other.case
    assert short.draw(asked).choices == other.choices
    assert set(short.given) <= {choice.name for choice in other.choices}
    assert Case.read(str(short)).draw(asked).recipe.make().to_bytes() == (
        other.recipe.make().to_bytes()
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_composed_steps_give_the_same_bits(operation: str) -> None:
    """Another implementation of each operation, so that what is drawn lies in its domain."""
    backend = ComposedBackend()
    for index in range(4):
        golden = Case(operation, 12, index).draw(Asked()).golden(EXACT)
        for rule in golden.rules:
            verdict, _ = attempt(backend, Sessions(backend), golden, rule, 2.0**-24)
            assert verdict.outcome == "pass", (index, rule, verdict.message)


def test_a_golden_survives_its_file(tmp_path: Any) -> None:
    golden = Case("attention", 3, 4).draw(Asked()).golden(EXACT)
    path = tmp_path / "one.safetensors"
    path.write_bytes(golden.to_bytes())
    again = read(path)
    assert again.note == "drawn: attention/3/4"
    assert np.array_equal(again.inputs["q"], golden.inputs["q"], equal_nan=True)
