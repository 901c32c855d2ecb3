"""Whatever a backend does, each case has an outcome and the run goes on (SPEC 18)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backends.plain import PlainBackend
from conformance.backends.reference import ReferenceBackend
from conformance.cases import invariances as invariances_module
from conformance.errors import BackendError, GoldenError
from conformance.golden import (
    MANIFEST,
    Golden,
    digest,
    file_of,
    manifest_text,
    read_all,
    read_manifest,
)
from conformance.paths import data_folder
from conformance.results import Result, summary
from conformance.runner import count, run
from conformance.selection import LEVELS, RULES, Selection

Array = NDArray[Any]
GOLDENS = data_folder("goldens")


def outcomes(results: list[Result]) -> dict[str, str]:
    return {r.id: r.outcome for r in results}


def small(
    operation: str, answer: Array, rules: tuple[str, ...] = ("bits",), **inputs: Array
) -> Golden:
    name = f"kernel/{operation}/small"
    gauges = {"size": np.abs(answer)} if "gauge" in rules else {}
    terms = dict.fromkeys(gauges, "ops(4)")
    return Golden(name, "2", operation, {}, inputs, {"y": answer}, rules, gauges, terms)


def folder_of(path: Path, *goldens: Golden) -> Path:
    digests = {}
    for golden in goldens:
        content = golden.to_bytes()
        file = path / file_of(golden.id)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        digests[file_of(golden.id)] = digest(content)
    (path / MANIFEST).write_text(manifest_text(digests))
    return path


X = np.arange(4, dtype=np.float32)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Goldens of two operations that double their input, one with a gauge."""
    return folder_of(
        tmp_path,
        small("exp", 2 * X, ("bits", "gauge"), x=X),
        small("log", 2 * X, x=X),
    )


class Doubling:
    """Right in both operations."""

    numerics: Mapping[str, Any] = {"accumulator": "float32"}

    def exp(self, x: Array) -> Array:
        return 2 * x

    log = exp


def check(backend: object, folder: Path, levels: tuple[str, ...] = ("kernel",)) -> list[Result]:
    return list(run(backend, folder, Selection(levels)))


def test_a_right_backend_passes(two: Path) -> None:
    results = check(Doubling(), two)
    assert [(r.id, r.level, r.section, r.rule, r.outcome, r.worst, r.message) for r in results] == [
        ("kernel/exp/small:bits", "kernel", "2", "bits", "pass", 0.0, ""),
        ("kernel/exp/small:gauge", "kernel", "2", "gauge", "pass", 0.0, ""),
        ("kernel/log/small:bits", "kernel", "2", "bits", "pass", 0.0, ""),
    ]


def raising(error: BaseException) -> Callable[[Any, Array], Array]:
    def method(self: Any, x: Array) -> Array:
        raise error

    return method


class MuteError(Exception):
    """An error of two lines."""

    def __str__(self) -> str:
        return "two\nlines"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such shape"), "the backend raised ValueError: no such shape"),
        (MuteError(), "the backend raised MuteError: two lines"),
        (MemoryError(), "the backend raised MemoryError:"),
        (RecursionError("deep"), "the backend raised RecursionError: deep"),
        (SystemExit(0), "the backend raised SystemExit: 0"),
        (SystemExit("bye"), "the backend raised SystemExit: bye"),
        (GeneratorExit(), "the backend raised GeneratorExit:"),
        (StopIteration(), "the backend raised StopIteration:"),
        (BaseException("odd"), "the backend raised BaseException: odd"),
    ],
)
def test_what_a_backend_raises_fails_its_case_alone(
    two: Path, error: BaseException, message: str
) -> None:
    backend = type("Backend", (Doubling,), {"exp": raising(error)})()
    place = f" (test_runner.py:{raising.__code__.co_firstlineno + 2}, in method)"
    first, second, third = check(backend, two)
    assert (first.outcome, first.worst, first.message) == ("fail", None, message + place)
    assert (second.outcome, second.message) == ("fail", message + place)
    assert third.outcome == "pass"


def test_an_error_inside_numpy_is_placed_where_the_backend_called_it(two: Path) -> None:
    """numpy has lines of Python of its own; the engine's author looks for theirs."""

    def exp(self: Any, x: Array) -> Array:
        return np.broadcast_to(x, (2, 3))

    first, *_ = check(type("Backend", (Doubling,), {"exp": exp})(), two)
    assert first.message.endswith(f" (test_runner.py:{exp.__code__.co_firstlineno + 1}, in exp)")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NotImplementedError("no\nint4"), "the backend raised NotImplementedError: no int4"),
        (NotImplementedError, "the backend raised NotImplementedError"),
    ],
)
def test_what_a_backend_says_it_has_not_is_not_implemented(
    two: Path, error: BaseException, message: str
) -> None:
    backend = type("Backend", (Doubling,), {"exp": raising(error)})()
    *missing, third = check(backend, two)
    assert [(r.outcome, r.message) for r in missing] == [("not implemented", message)] * 2
    assert third.outcome == "pass"


def test_an_interrupt_ends_the_run(two: Path) -> None:
    backend = type("Backend", (Doubling,), {"exp": raising(KeyboardInterrupt())})()
    with pytest.raises(KeyboardInterrupt):
        check(backend, two)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        (lambda self, x: (2 * x)[:3], "expected float32 (4,), got float32 (3,)"),
        (lambda self, x: (2 * x)[None], "got float32 (1, 4)"),
        (lambda self, x: (2 * x).astype(np.float64), "got float64 (4,)"),
        (lambda self, x: 2 * x * np.float32(np.nan), "(0x7fc00000) got"),
        (lambda self, x: (2 * x).tolist(), "exp must return 1 numpy array(s), not (list)"),
        (lambda self, x: None, "not (NoneType)"),
        (lambda self, x: (x, x), "not (ndarray, ndarray)"),
        (lambda self: 1, "the backend raised TypeError"),
        (lambda self, x: -2 * x, "got"),
    ],
)
def test_a_wrong_answer_fails_every_rule(two: Path, method: Any, part: str) -> None:
    backend = type("Backend", (Doubling,), {"exp": method})()
    first, second, third = check(backend, two)
    assert first.outcome == second.outcome == "fail"
    assert part in first.message
    assert "\n" not in first.message + second.message
    assert third.outcome == "pass"


def test_what_is_missing_is_neither_pass_nor_failure(two: Path) -> None:
    backend = type("Backend", (), {"numerics": {}, "log": Doubling.exp})()
    results = check(backend, two)
    assert [r.outcome for r in results] == ["not implemented", "not implemented", "pass"]
    assert results[0].message == "the backend has no exp"
    assert results[0].worst is None
    assert summary(results) == {
        "passed": 1,
        "failed": 0,
        "not_implemented": 2,
        "not_judged": 0,
        "cannot_evaluate": 0,
    }


def test_a_backend_that_spoils_its_inputs_spoils_nothing_else(two: Path) -> None:
    class Spoiling(Doubling):
        def exp(self, x: Array) -> Array:
            x *= 2
            return x

    assert {r.outcome for r in check(Spoiling(), two)} == {"pass"}


def test_an_invariance_gives_every_call_its_own_inputs() -> None:
    class Spoiling(ReferenceBackend):
        def linear(self, x: Any, w: Any, bias: Any = None) -> Any:
            y = super().linear(x, w, bias)
            x[:], w[:] = 1, 1
            return y

    results = list(run(Spoiling(), GOLDENS, Selection(("invariance",), ("invariance/linear/*",))))
    assert outcomes(results) == {
        "invariance/linear/rows_alone:bits": "pass",
        "invariance/linear/repeated:bits": "pass",
    }


def test_an_unknown_precision_ends_the_run_before_it_begins(two: Path) -> None:
    backend = type("Backend", (Doubling,), {"numerics": {"accumulator": "fp8"}})()
    with pytest.raises(BackendError, match="fp8"):
        check(backend, two)


def test_the_declared_precision_sets_the_bound(two: Path) -> None:
    class Coarse(Doubling):
        numerics: Mapping[str, Any] = {"accumulator": "bfloat16"}

        def exp(self, x: Array) -> Array:
            return np.float32(2 + 2.0**-8) * x

    class Boasting(Coarse):
        numerics: Mapping[str, Any] = {"accumulator": "float32"}

    assert [r.outcome for r in check(Coarse(), two)] == ["fail", "pass", "pass"]
    assert [r.outcome for r in check(Boasting(), two)] == ["fail", "fail", "pass"]


def test_a_corrupt_golden_ends_the_run(two: Path) -> None:
    path = two / "kernel/log/small.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    results = run(Doubling(), two, Selection())
    assert next(results).outcome == "pass"
    with pytest.raises(GoldenError, match=r"small\.safetensors: its sha256 differs"):
        list(results)
    assert [r.outcome for r in run(Doubling(), two, Selection(patterns=("kernel/exp/*",)))] == [
        "pass"
    ] * 2


# Selection.


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("*", True),
        ("kernel/linear/k33_t5", True),
        ("kernel/linear/k33_t5:bits", True),
        ("kernel/linear/k33_t5:gauge", False),
        ("kernel/linear/*", True),
        ("*:bits", True),
        ("*k33*", True),
        ("Kernel/*", False),
        ("kernel", False),
        ("", False),
        ("kernel/linear/k33_t[0-9]", True),
        ("kernel/linear/k33_t?", True),
        ("invariance/*", False),
    ],
)
def test_patterns(pattern: str, taken: bool) -> None:
    assert Selection((), (pattern,)).takes("kernel/linear/k33_t5:bits") is taken


def test_levels_and_pattern_must_both_match() -> None:
    case = "kernel/linear/k33_t5:bits"
    assert Selection(("model", "kernel")).takes(case)
    assert not Selection(("model",)).takes(case)
    assert not Selection(("kernel",), ("model/*",)).takes(case)


def test_count_is_goldens_and_invariances() -> None:
    everything = count(GOLDENS, Selection())
    invariances = invariances_module.invariances()
    assert everything == len(read_manifest(GOLDENS)) + len(invariances)
    assert sum(count(GOLDENS, Selection((level,))) for level in LEVELS) == everything
    assert count(GOLDENS, Selection((), ("kernel/linear/k33_t5",))) == 1
    assert count(GOLDENS, Selection((), ("kernel/linear/k33_t5:bits",))) == 1
    assert count(GOLDENS, Selection((), ("nothing/*",))) == 0


def test_ids_are_unique_and_well_formed() -> None:
    ids = [name.removesuffix(".safetensors") for name in read_manifest(GOLDENS)]
    ids += [i.id for i in invariances_module.invariances()]
    assert len(ids) == len(set(ids))
    for case in ids:
        level, operation, name = case.split("/")
        assert level in LEVELS
        assert operation
        assert name
        assert ":" not in case


# Both built-in backends of numpy, through everything.


@pytest.fixture(scope="module")
def numpy_results() -> list[Result]:
    return list(run(ReferenceBackend(), GOLDENS, Selection()))


@pytest.fixture(scope="module")
def float32_results() -> list[Result]:
    """All of it but the slowest invariances and generations, which fail as the others do."""
    parts = [Selection(("elementary", "kernel", "model"))]
    parts += [
        Selection((), ("generation/generate/short",)),
        Selection((), ("invariance/attention/*",)),
    ]
    parts += [Selection((), ("invariance/forward/float32_chunks_of_*",))]
    return [result for part in parts for result in run(PlainBackend(), GOLDENS, part)]


def test_numpy_passes_everything(numpy_results: list[Result]) -> None:
    assert [(r.id, r.message) for r in numpy_results if r.outcome != "pass"] == []
    assert {r.level for r in numpy_results} == set(LEVELS)
    invariant = {r.id: r.worst for r in numpy_results if r.level == "invariance"}
    assert invariant == {f"{i.id}:bits": 0 for i in invariances_module.invariances()}
    assert len({r.id for r in numpy_results}) == len(numpy_results)
    expected = {"bits": 232 + 23, "gauge": 129, "ulp(4)": 5}
    found = {rule: sum(r.rule == rule for r in numpy_results) for rule in expected}
    assert all(found[rule] >= number for rule, number in expected.items()), found


def test_float32_passes_every_bound(
    float32_results: list[Result], record_property: Callable[[str, object], None]
) -> None:
    bounded = [r for r in float32_results if r.rule not in ("bits", "either")]
    assert len(bounded) >= 134
    assert [(r.id, r.message) for r in bounded if r.outcome != "pass"] == []
    for result in sorted(bounded, key=lambda r: -(r.worst or 0))[:10]:
        record_property(result.id, result.worst)


SAME_BITS = {
    "kernel/philox",
    "kernel/quantize_int4",
    "kernel/quantize_int8",
    "kernel/rope",
    "kernel/rope_constants",
    "kernel/sample",
    "kernel/verify_draft",
}
"""Operations that the plain float32 backend takes over from the exact one."""


def test_float32_fails_bits_wherever_it_computes_by_itself(float32_results: list[Result]) -> None:
    areas: dict[str, set[str]] = {}
    for result in float32_results:
        if result.rule == "bits" and result.level != "invariance":
            area = "/".join(result.id.split("/")[:2])
            areas.setdefault(area, set()).add(result.outcome)
    assert {area for area, seen in areas.items() if "fail" not in seen} == SAME_BITS
    for area in ("model/forward", "generation/generate"):
        assert areas[area] == {"fail"}


def test_float32_depends_on_how_rows_are_divided(float32_results: list[Result]) -> None:
    found = [r for r in float32_results if r.level == "invariance"]
    failed = {r.id.split("/")[1] for r in found if r.outcome == "fail"}
    assert {"attention", "forward"} <= failed


def test_a_pattern_can_name_every_rule_of_the_goldens() -> None:
    used = {rule for golden in read_all(data_folder("goldens")) for rule in golden.rules}
    assert used == set(RULES)
