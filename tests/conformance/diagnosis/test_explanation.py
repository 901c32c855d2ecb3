"""Diagnosis names the right fault, and none where there is none (SPEC 19)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.diagnosis import Explanation, Heard, Inquiry, explain, unit_of
from conformance.diagnosis.explanation import CLAIMED, LARGEST, SAME, Nearest, gap, suspects
from conformance.faults import AnyFault, applied, fault
from conformance.golden import Golden, read_all
from conformance.operations import Outputs, Sessions, call
from conformance.paths import data_folder
from conformance.results import Answers
from conformance.rules import bound
from conformance.runner import run
from conformance.selection import Selection

FOLDER = data_folder("goldens")
U = 2.0**-24


@cache
def golden(name: str) -> Golden:
    return next(iter(read_all(FOLDER, {name})))


def explained(backend: ComposedBackend, pattern: str) -> dict[str, Explanation]:
    answers: Answers = {}
    results = list(run(backend, FOLDER, Selection(patterns=(pattern,)), answers))
    return explain(results, answers, FOLDER, backend.numerics)


def changed(one: Golden, index: int, value: float) -> Outputs:
    outputs = {n: a.copy() for n, a in one.outputs.items()}
    outputs["y"].flat[index] = value
    return outputs


def test_the_same_bits_have_no_gap() -> None:
    one = golden("kernel/rms_norm/k33")
    assert gap(one, one.outputs, one.outputs, U) == SAME


def test_a_gap_is_measured_in_bounds() -> None:
    one = golden("kernel/rms_norm/k33")
    bound = unit_of(one, "y", U).flat[7]
    size = abs(float(one.outputs["y"].flat[7])) * 4 * U
    off = changed(one, 7, float(one.outputs["y"].flat[7]) + 10 * (bound + size))
    found = gap(one, off, one.outputs, U)
    assert found.worst == pytest.approx(10, rel=0.01)
    assert found.outside == 1
    assert found.typical == pytest.approx(10 / np.sqrt(one.outputs["y"].size), rel=0.01)


def test_another_zero_is_not_the_same() -> None:
    one = golden("kernel/rms_norm/zero_row")
    zero = int(np.flatnonzero(one.outputs["y"] == 0)[0])
    turned = changed(one, zero, -float(np.copysign(1, one.outputs["y"].flat[zero])) * 0.0)
    found = gap(one, turned, one.outputs, U)
    assert found != SAME
    assert found.outside == 0


def test_a_value_that_is_not_finite_is_far_from_one_that_is() -> None:
    one = golden("kernel/rms_norm/k33")
    assert gap(one, changed(one, 0, np.nan), one.outputs, U).worst == LARGEST
    assert gap(one, {"y": np.zeros(3, np.float32)}, one.outputs, U).worst == LARGEST


def test_another_nan_is_near_and_another_integer_far() -> None:
    one = golden("kernel/rms_norm/k33")
    nan, other = changed(one, 0, np.nan), changed(one, 0, np.nan)
    other["y"].view(np.uint32).flat[0] = 0xFFC00000
    assert gap(one, nan, other, U).outside == 0
    codes = replace(one, outputs={"y": np.array([1, 2, 3], np.int8)}, gauges={})
    found = gap(codes, {"y": np.array([1, 2, 4], np.int8)}, codes.outputs, U)
    assert (found.worst, found.outside) == (1000, 1)


def test_what_has_no_gauge_is_measured_in_units_of_its_size() -> None:
    one = golden("kernel/rms_norm/k33")
    size = np.abs(one.outputs["y"]).astype(np.float64)
    for u in (U, 2.0**-53):
        plain = unit_of(replace(one, gauges={}), "y", u)
        assert np.array_equal(plain, 8 * U * size + 2.0**-147)
    both = replace(one, outputs={**one.outputs, "z": one.outputs["y"]})
    assert np.array_equal(unit_of(both, "z", 2.0**-8), 8 * 2.0**-8 * size + 2.0**-147)
    assert np.array_equal(unit_of(both, "y", U), bound(one, U) + 2.0**-149)


def test_answers_of_another_shape_than_the_golden_are_far_apart_or_the_same() -> None:
    """A generation that ends too early has fewer rows, and no bound is for so few."""
    one = golden("generation/generate/to_the_end")
    early = {name: array[:-1] for name, array in one.outputs.items()}
    other = {name: array + array.dtype.type(1) for name, array in early.items()}
    assert gap(one, early, early, U) == SAME
    assert gap(one, early, other, U).worst == LARGEST
    assert gap(one, early, one.outputs, U).worst == LARGEST
    assert Inquiry([Heard(one, early)], [fault("model-context-ends-early")], U).nearest(
        Heard(one, early)
    )


@pytest.mark.parametrize("name", ["ending-one-token-late", "ending-token-dropped"])
def test_a_fault_that_ends_a_text_elsewhere_is_named_though_logits_are_rounded(name: str) -> None:
    """What the golden has, too, is compared in its bounds."""
    one, backend = golden("generation/complete/second_id"), applied(fault(name), OwnOrderBackend)
    answer = call(backend, Sessions(backend), "complete", {**one.parameters, **one.inputs})
    assert answer["tokens"].shape != one.outputs["tokens"].shape
    failed = Heard.of(one, "tokens", answer)
    assert Inquiry([failed], suspects("complete"), U).nearest(failed)[0].fault == name
    assert gap(one, answer, {**answer, "tokens": answer["tokens"] + 1}, U).worst == LARGEST


@pytest.mark.parametrize("rule", ["gauge", "tokens"])
def test_a_fault_of_serving_is_named_though_texts_part_and_counts_differ(rule: str) -> None:
    one, name = golden("generation/speculate/repetitive"), "speculation-rejected-stay"
    backend = applied(fault(name), OwnOrderBackend)
    answer = call(backend, Sessions(backend), "speculate", {**one.parameters, **one.inputs})
    assert answer["accepted"].shape != one.outputs["accepted"].shape
    assert (answer["tokens"] != one.outputs["tokens"]).any()
    failed = Heard.of(one, rule, answer)
    assert Inquiry([failed], suspects("speculate"), U).nearest(failed)[0].fault == name


@pytest.mark.parametrize(
    "name",
    [
        "norm-epsilon-1e-5",
        "rope-pairs-interleaved",
        "linear-tail-dropped",
        "attention-sink-counted-twice",
        "int4-nibbles-swapped",
    ],
)
def test_an_exact_backend_with_a_fault_equals_it(name: str) -> None:
    known = fault(name)
    operation = known.operations[0]
    found = explained(applied(known, ComposedBackend), f"kernel/{operation}/*:bits")
    assert found
    firsts = [e.nearest[0] for e in found.values() if e.nearest]
    assert firsts
    assert all(f"equals the reference with `{name}`, all" in first for first in firsts)


@pytest.mark.parametrize(
    "name",
    ["norm-epsilon-1e-5", "rope-inverse-frequency-bfloat16", "attention-sink-counted-twice"],
)
def test_a_float32_backend_with_a_fault_is_told_by_its_bound(name: str) -> None:
    known = fault(name)
    found = explained(applied(known, OwnOrderBackend), f"kernel/{known.operations[0]}/*:gauge")
    assert found
    assert all(f"`{name}`" in e.nearest[0] for e in found.values())


def test_a_float32_backend_without_a_fault_is_not_accused() -> None:
    found = explained(OwnOrderBackend(), "kernel/rms_norm/k*:bits")
    assert found
    for explanation in found.values():
        assert not any("with `" in line for line in explanation.nearest), explanation
    assert any("within the bound of float32" in e.nearest[0] for e in found.values() if e.nearest)


def test_a_fault_that_brings_no_value_within_its_bound_is_not_named() -> None:
    """It is nearer than the golden by far, and yet explains not one value."""
    one = golden("kernel/rms_norm/k33")
    known = fault("norm-weight-plus-one")
    arguments: dict[str, Any] = {**one.inputs, **one.parameters}
    theirs = applied(known, ComposedBackend).rms_norm(**arguments)
    away = {"y": theirs * np.float32(1.001)}
    assert gap(one, away, {"y": theirs}, U).outside == theirs.size
    heard = Heard(one, away)
    assert Inquiry([heard], [known], U).nearest(heard) == []
    away["y"][0, :9] = theirs[0, :9]  # nine are explained
    (named,) = Inquiry([heard], [known], U).nearest(heard)
    assert f": 9 of {theirs.size} values within its bound" in str(named)


@pytest.mark.parametrize(("share", "named"), [(0.5, False), (0.7, False), (0.8, True), (1.2, True)])
def test_a_fault_that_explains_less_than_three_quarters_of_an_error_is_not_named(
    share: float, named: bool
) -> None:
    """Though it brings a value within its bound that was not."""
    one, known = golden("kernel/rms_norm/k33"), fault("norm-epsilon-1e-5")
    y = one.outputs["y"]
    theirs, away = ({"y": y * np.float32(1 + error)} for error in (share / 100, 0.01))
    away["y"][0, 0] = theirs["y"][0, 0]
    heard = Heard(one, away)
    found = Inquiry([heard], [known], U, lambda f, g: theirs).nearest(heard)
    assert bool(found) == named


def test_who_claims_exact_and_is_float32_is_told_so() -> None:
    class Claiming(OwnOrderBackend):
        numerics = ComposedBackend.numerics

    found = explained(Claiming(), "kernel/rms_norm/k*:bits")
    assert found
    said = [e.nearest for e in found.values()]
    assert said.count((CLAIMED,)) > len(said) / 2
    rest = [lines[0] for lines in said if lines != (CLAIMED,)]  # a fault that is another order
    assert all(line.startswith("equals the reference with `norm-order") for line in rest)
    assert all(e.where for e in found.values())  # bits are claimed, so where they differ is told
    honest = explained(OwnOrderBackend(), "kernel/rms_norm/k*:bits")
    assert not any(CLAIMED in e.nearest for e in honest.values())


def test_faults_that_explain_a_case_equally_well_are_not_told_apart() -> None:
    """Of unrelated faults with the answer of the backend none is named alone."""
    one, quiet = golden("kernel/rms_norm/k33"), golden("kernel/rms_norm/k64")
    answer = changed(one, 0, 9.0)
    names = ("rope-pairs-interleaved", "norm-epsilon-1e-5", "linear-tail-dropped")
    among = [fault(name) for name in (*names, "attention-not-causal")]
    failed, passed = Heard(one, answer), Heard(quiet, quiet.outputs)

    def told(*contradicted: str) -> list[str]:
        def of(known: AnyFault, given: Golden) -> Outputs:
            if given is one:
                return answer
            return changed(quiet, 0, 9.0) if known.name in contradicted else dict(quiet.outputs)

        return Inquiry([failed, passed], among, U, of).told(failed)

    every = [known.name for known in among]
    assert len(told()) == len(told(*every)) == 1
    start = (
        "equals the reference with any of `rope-pairs-interleaved`, `norm-epsilon-1e-5`, "
        "`linear-tail-dropped` and 1 more, all 132 values: they cannot be told apart here"
    )
    assert told()[0].startswith(f"{start} (")
    assert told(*every)[0].startswith(f"{start}, and none explains all other cases (")
    first, *others = told(*every[1:])  # only the first is silent where the backend is right
    assert first.startswith("equals the reference with `rope-pairs-interleaved`, all 132 values (")
    assert len(others) == 1


def test_at_most_three_lines_are_told_of_faults_that_do_not_explain_all_values() -> None:
    """They are told one by one, though they come equally near."""
    one = golden("kernel/rms_norm/k33")
    answer = {"y": one.outputs["y"] * np.float32(1.01)}
    near = changed(replace(one, outputs=answer), 0, float(one.outputs["y"].flat[0]))
    names = ("rope-pairs-interleaved", "norm-epsilon-1e-5", "linear-tail-dropped")
    among = [fault(name) for name in (*names, "attention-not-causal")]
    heard = Heard(one, answer)
    lines = Inquiry([heard], among, U, lambda f, g: near).told(heard)
    assert len(lines) == 3
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(f"nearest to the reference with `{name}`: 131 of 132 values")


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ("A row is late.", "a row is late"),
        ("NaN leaks.", "NaN leaks"),
        ("GELU uses erf.", "GELU uses erf"),
        ("Eps is 1e-5, A or B.", "eps is 1e-5, A or B"),
    ],
)
def test_a_description_stands_within_a_line(about: str, told: str) -> None:
    assert str(Nearest("x", about, SAME, SAME, 3, 0.0)).endswith(f"all 3 values ({told})")


def test_nonsense_is_not_explained() -> None:
    class Nonsense(ComposedBackend):
        def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
            return np.full_like(x, 0.3)

    found = explained(Nonsense(), "kernel/rms_norm/k*:gauge")
    assert found
    assert all(not e.nearest for e in found.values())


def test_a_fault_must_also_be_silent_where_the_backend_is_right() -> None:
    """Two faults alike on a window of 4,096 keys; only one of them leaves narrow windows alone."""
    known = fault("attention-wide-window-one-more")
    found = explained(applied(known, OwnOrderBackend), "kernel/attention/window_*:gauge")
    assert list(found) == ["kernel/attention/window_4096:gauge"]
    first = found["kernel/attention/window_4096:gauge"].nearest[0]
    assert "`attention-wide-window-one-more`" in first


def test_a_case_whose_answer_is_missing_is_not_explained() -> None:
    class Raises(ComposedBackend):
        def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
            raise ValueError("no")

    assert explained(Raises(), "kernel/rms_norm/k33:*") == {}


def test_a_fault_that_raises_is_no_suspect() -> None:
    one = golden("kernel/rms_norm/k33")
    failed = Heard(replace(one), changed(one, 0, 9.0))
    assert (
        Inquiry([failed], [fault("norm-epsilon-1e-5")], U, lambda f, g: None).nearest(failed) == []
    )


class StoredInBfloat16(ComposedBackend):
    """All results of rms_norm are stored in bfloat16."""

    def __init__(self, accumulator: str = "float32") -> None:
        super().__init__()
        self.numerics = {"accumulator": accumulator}

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return super().rms_norm(x, weight, eps).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_a_type_that_results_are_stored_in_is_told_where_it_is_not_declared() -> None:
    found = explained(StoredInBfloat16(), "kernel/rms_norm/k33:gauge")["kernel/rms_norm/k33:gauge"]
    assert "all values of y are bfloat16 numbers" in found.stored
    assert found.stored in found.lines()
    assert not explained(StoredInBfloat16("bfloat16"), "kernel/rms_norm/k33:gauge")
