"""A backend judged by drawn cases: what is right passes, what is wrong is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.backends.plain import PlainBackend
from conformance.backends.reference import ReferenceBackend
from conformance.faults import applied, fault
from conformance.fuzzing.case import OPERATIONS, Case
from conformance.fuzzing.running import Fuzzer
from conformance.operations import NotImplementedByBackendError
from conformance.rules import OWN_DISTANCE
from conformance.variants import variants


def fuzzed(backend: Any, *operations: str, count: int = 20, seed: int = 4) -> Fuzzer:
    fuzzer = Fuzzer(backend, operations)
    for _ in fuzzer.run(seed, count, None):
        pass
    return fuzzer


def test_every_operation_of_the_reference_passes() -> None:
    tallies = fuzzed(ReferenceBackend(), count=2).tallies
    assert list(tallies) == list(OPERATIONS)
    assert all((t.passed, t.failed, t.unjudged) == (2, 0, 0) for t in tallies.values())


def test_float32_in_an_order_of_its_own_passes_by_its_bounds() -> None:
    fuzzer = fuzzed(OwnOrderBackend(), "linear", "attention", "rms_norm", "rope", "moe")
    for tally in fuzzer.tallies.values():
        assert (tally.failed, tally.failures) == (0, [])
        assert tally.passed == 20
        assert tally.worst is not None
        assert 0 < tally.worst <= 1


def test_a_margin_that_hardly_grows_with_errors_is_not_the_worst() -> None:
    """A draw whose bound is the exact lane's own distance has a margin of nearly 1 for anyone."""
    fuzzer = Fuzzer(OwnOrderBackend(), ["linear"])
    owned = []
    for index in range(100):
        case = Case("linear", 4, index)
        owned += [j for j in fuzzer._judge(case) if OWN_DISTANCE in j.verdict.message]
        fuzzer.take(case)
    assert max(j.verdict.worst or 0 for j in owned) > 0.9
    assert (fuzzer.tallies["linear"].worst or 0) < 0.9


FAULTS = [
    ("attention-window-one-more", "attention"),
    ("attention-softcap-dropped", "attention"),
    ("rope-partial-ignored", "rope"),
    ("linear-tail-dropped", "linear"),
    ("norm-epsilon-1e-5", "rms_norm"),
    ("paging-full-page-copied", "paging"),
]


@pytest.mark.parametrize(("name", "operation"), FAULTS)
@pytest.mark.parametrize("base", [ComposedBackend, OwnOrderBackend])
def test_a_fault_is_found_made_small_and_named(
    name: str, operation: str, base: type[ComposedBackend]
) -> None:
    fuzzer = fuzzed(applied(fault(name), base), operation)
    tally = fuzzer.tallies[operation]
    assert tally.failed > 0
    failure = tally.failures[0]
    assert failure.least.verdict.outcome == "fail"
    assert f"`{name}`" in failure.nearest[0]
    assert size(failure.least.golden) <= size(failure.drawn.golden)
    # The line of the report is that case.
    again = Fuzzer(fuzzer.backend, [operation], shrink=False)
    again.take(Case.read(str(failure.least.made.case)))
    assert again.tallies[operation].failures[0].drawn.id == failure.least.id


def size(golden: Any) -> int:
    return sum(array.size for array in golden.inputs.values())


def test_the_least_case_of_a_window_that_is_one_too_wide() -> None:
    tally = fuzzed(applied(fault("attention-window-one-more"), OwnOrderBackend), "attention")
    golden = tally.tallies["attention"].failures[0].least.golden
    assert golden.inputs["q"].shape == golden.inputs["k"].shape == (2, 1, 1)
    assert golden.parameters["window"] == 1


def test_later_failures_are_counted_and_not_examined() -> None:
    tally = fuzzed(applied(fault("linear-tail-dropped"), OwnOrderBackend), "linear").tallies
    assert len(tally["linear"].failures) == 1
    assert len(tally["linear"].repeats) == tally["linear"].failed - 1 > 0


class Norm:
    """One operation alone, whose answer is given."""

    numerics: dict[str, Any] = {"accumulator": "float32"}  # noqa: RUF012

    def __init__(self, rms_norm: Callable[..., Any]) -> None:
        self.rms_norm = rms_norm


def boom(**arguments: Any) -> Any:
    raise ValueError("boom")


def absent(**arguments: Any) -> Any:
    raise NotImplementedByBackendError("rms_norm")


WRONG: list[tuple[Callable[..., Any], str]] = [
    (boom, "the backend raised ValueError: boom"),
    (lambda x, weight, eps: x[:-1], "expected float32"),
    (lambda x, weight, eps: x.astype(np.float64), "expected float32"),
    (lambda x, weight, eps: None, "must return 1 numpy array"),
]


@pytest.mark.parametrize(("answer", "message"), WRONG)
def test_an_answer_that_is_none_fails(answer: Callable[..., Any], message: str) -> None:
    tally = fuzzed(Norm(answer), "rms_norm", count=3).tallies["rms_norm"]
    assert (tally.passed, tally.failed) == (0, 3)
    assert message in tally.failures[0].least.verdict.message


def test_what_a_backend_does_not_have_is_neither_passed_nor_failed() -> None:
    tallies = fuzzed(Norm(absent), "rms_norm", "linear", count=3).tallies
    norm, linear = tallies["rms_norm"], tallies["linear"]
    assert (norm.offered, norm.absent, norm.passed, norm.failed) == (True, 3, 0, 0)
    assert (linear.offered, linear.absent, linear.passed, linear.failed) == (False, 0, 0, 0)


def test_a_backend_cannot_spoil_what_it_is_given() -> None:
    def spoiling(x: Any, weight: Any, eps: float) -> Any:
        y = PlainBackend().rms_norm(x, weight, eps)
        x[:], weight[:] = 0, 0
        return y

    assert fuzzed(Norm(spoiling), "rms_norm", count=3).tallies["rms_norm"].passed == 3


def test_operations_take_turns_until_the_time_is_up() -> None:
    fuzzer = Fuzzer(ReferenceBackend(), ["exp", "log"])
    turns = fuzzer.run(1, None, 3600)
    assert [next(turns) for _ in range(4)] == ["exp", "log", "exp", "log"]
    assert list(Fuzzer(ReferenceBackend(), ["exp"]).run(1, None, 1e-9)) == []


def test_another_seed_draws_other_cases() -> None:
    taken = []

    def seen(x: Any, weight: Any, eps: float) -> Any:
        taken.append(x.shape)
        return PlainBackend().rms_norm(x, weight, eps)

    for seed in (1, 1, 2):
        fuzzed(Norm(seen), "rms_norm", count=5, seed=seed)
    assert taken[:5] == taken[5:10] != taken[10:]


ACCUSED = [
    ("contracted-throughout", "moe/1/1"),
    ("reference-float32", "paged_attention/1/69"),
    ("stored-bfloat16", "attention/1/137"),
    ("sequential-sums", "softmax/1/24"),
    ("stored-float16", "route/2/23"),
    ("stored-float16", "linear_q4_0/1/190"),
]


@pytest.mark.parametrize(("name", "case"), ACCUSED)
def test_a_legitimate_variant_is_not_accused(name: str, case: str) -> None:
    """Each was, by a bound that was too narrow, or by data of which no bound is stated."""
    backend = next(variant for variant in variants() if variant.name == name)()
    operation = case.split("/")[0]
    fuzzer = Fuzzer(backend, [operation], shrink=False)
    fuzzer.take(Case.read(case))
    tally = fuzzer.tallies[operation]
    assert (tally.failed, tally.passed + tally.unjudged) == (0, 1)
