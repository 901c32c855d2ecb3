"""The record: its schema, what it says of an output that is wrong, and what cannot spoil it."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import rules
from conformance.backends.plain import PlainBackend
from conformance.diagnosis import explain
from conformance.diagnosis.differences import CELLS, differences, histogram, outputs
from conformance.golden import read_all
from conformance.paths import data_folder
from conformance.reports.record import as_text, legible, record, schema
from conformance.reports.track import compare
from conformance.results import Answers
from conformance.runner import run
from conformance.selection import Selection
from tests.conformance.reports.runs import HOSTILE, RUN, answered, everything, golden, of, result

F32 = np.float32
U = 2.0**-24


def check(data: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema(), format_checker=jsonschema.FormatChecker())
    validator.check_schema(schema())
    validator.validate(json.loads(as_text(data)))


def test_a_record_is_what_the_schema_says() -> None:
    check(everything())
    check(everything(interrupted=True))
    check(of([]))
    data = everything()
    check({**data, "track": compare(of([result("a/b/c:gauge")]), data, lambda case: True)})


@pytest.mark.parametrize("key", ["format", "backend", "summary", "cases", "interrupted"])
def test_the_schema_misses_what_is_missing(key: str) -> None:
    data = everything()
    del data[key]
    with pytest.raises(jsonschema.ValidationError):
        check(data)


def test_the_schema_knows_every_key() -> None:
    data = everything()
    data["cases"][0]["more"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check(data)


def test_a_run_of_float32_is_what_the_schema_says() -> None:
    folder, answers = data_folder("goldens"), Answers()
    backend, selection = PlainBackend(), Selection((), ("*/route/*",))
    results = list(run(backend, folder, selection, answers))
    results += run(backend, folder, Selection((), ("kernel/attention/p*",)), answers)
    explanations = explain(results, answers, folder, backend.numerics)
    found = outputs(results, answers, folder, backend.numerics)
    data = record(RUN, results, explanations, found)
    check(data)
    failed = [case for case in data["cases"] if case["outcome"] == "fail"]
    assert failed
    assert all(case["outputs"] and "diagnosis" in case for case in failed if ":bits" in case["id"])
    assert any(case["diagnosis"] for case in failed)
    passed = [case for case in data["cases"] if case not in failed]
    assert all({"outputs", "diagnosis"}.isdisjoint(case) for case in passed)


def test_the_keys_that_stay() -> None:
    told = of(
        [
            result("a/b/c:bits"),
            result("a/b/c:gauge", "fail", math.inf, "infinite"),
            result("a/b/d:bits", "cannot evaluate", None, "why"),
            result("a/b/d:gauge", "not judged", None, "why"),
            result("a/b/e:bits", "not implemented", None, "the backend has no e"),
        ]
    )
    names = ("passed", "failed", "not_implemented", "not_judged", "cannot_evaluate")
    assert told["summary"] == {**dict.fromkeys(names, 1), "expected": 0, "not_asked": 0}
    keys = ["id", "level", "section", "rule", "outcome", "worst", "message"]
    assert [list(case)[: len(keys)] for case in told["cases"]] == [keys] * 5
    assert list(told["cases"][0]) == keys
    assert list(told["cases"][0].values()) == ["a/b/c:bits", "a", "2.2", "bits", "pass", 0.0, ""]


def test_an_infinite_margin_is_told() -> None:
    inf, nan = float("inf"), float("nan")
    told = of([result("a/b/c:gauge", "fail", inf), result("a/b/d:gauge", "fail", nan)])
    assert [c["worst"] for c in told["cases"]] == [None, None]
    assert [c.get("infinite") for c in told["cases"]] == [True, True]
    assert "infinite" not in of([result("a/b/c:gauge", "fail", None)])["cases"][0]


def test_the_words_of_a_backend_are_one_line_that_prints() -> None:
    text = legible("a\nb\x1b[31m\x00\udc80\u202e\u2028 ü 漢 " + HOSTILE)
    assert text == "a\\nb\\x1b[31m\\x00\\udc80\\u202e\\u2028 ü 漢 " + HOSTILE
    numerics = {"accumulator": "float32", 3: {"x": math.inf, "y": [np.float32(1), None, 2, True]}}
    data = of([result("a/b/c:bits", "fail", None, "\udc80")], numerics=numerics)
    assert data["backend"]["numerics"] == {
        "accumulator": "float32",
        "3": {"x": "inf", "y": ["1.0", None, 2, True]},
    }
    as_text(data).encode()


def test_numbers_stand_in_a_line_and_words_stay() -> None:
    data = of([result("a/b/c:bits", "fail", None, "[\\n 1,\\n 2 ]")])
    data["cases"][0]["outputs"] = answered()
    assert json.loads(as_text(data)) == data
    assert max(map(len, as_text(data).splitlines())) > 100
    assert len(as_text(data).splitlines()) < 300


# What is wrong with an output.


def one(expected: Any, got: Any, u: float = U, **more: Any) -> dict[str, Any]:
    (only,) = differences(golden(expected, **more), {"y": got}, u)
    return only


def test_the_same_bits_are_not_told() -> None:
    y = np.array([0.0, np.nan, np.inf], F32)
    assert differences(golden(y), {"y": y.copy()}, U) == []


def test_another_shape_or_dtype() -> None:
    y = np.zeros((2, 3), F32)
    assert one(y, y.T) == {
        "name": "y",
        "dtype": "float32",
        "shape": [2, 3],
        "got_dtype": "float32",
        "got_shape": [3, 2],
    }
    assert one(y, y.astype(np.float64))["got_dtype"] == "float64"


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 40))
def test_ulp_count_steps(start: float, steps: int) -> None:
    y = np.array([start, 1.0], F32)
    moved = y.copy()
    for _ in range(steps):
        moved[0] = np.nextafter(moved[0], F32(np.inf))
    crosses_zero = start < 0 <= moved[0] or (start == 0 and np.signbit(y[0]))
    if crosses_zero:  # both zeros are one number, and nextafter agrees
        steps = sum(1 for _ in _between(float(y[0]), float(moved[0])))
    entries = one(y, moved)["ulp"]
    assert sum(entry["count"] for entry in entries) == 2
    assert entries[0] == {"upto": 0.0, "count": 1}
    top = entries[-1]["upto"]
    assert top / 2 < steps <= top


def _between(low: float, high: float) -> Any:
    x = F32(low)
    while x != F32(high):
        x = np.nextafter(x, F32(np.inf))
        yield x


def test_distances_of_half_precision_integers_and_nan() -> None:
    half = np.array([1.0, -1.0, 2.0], np.float16)
    off = np.array([1.0 + 2**-10, -1.0 - 2**-9, 2.0], np.float16)
    assert one(half, off)["ulp"] == [{"upto": float(k), "count": 1} for k in (0, 1, 2)]
    integers = one(np.array([1, 200, 3], np.int64), np.array([1, 100, 4], np.int64))
    assert integers["unit"] == "1"
    assert [(e["upto"], e["count"]) for e in integers["ulp"] if e["count"]] == [
        (0, 1),
        (1, 1),
        (128, 1),
    ]
    big = one(np.array([0], np.uint64), np.array([2**64 - 1], np.uint64))
    assert big["ulp"] == [{"upto": 2.0**64, "count": 1}]
    assert big["worst"]["got"] == str(2**64 - 1)
    nan = one(np.array([1, np.nan, np.inf, 2], F32), np.array([np.nan, 1, -np.inf, 2], F32))
    assert nan["not_a_number"] == 2
    assert nan["margins"]["worst"] is None
    assert nan["worst"]["margin"] is None


def test_a_nan_of_other_bits_hides_no_error() -> None:
    """Under a bound it is none; the worst element is the one that is wrong."""
    answer = np.array([0xFFC00000, 0], np.uint32).view(F32)
    told = one(np.array([np.nan, 1.0], F32), answer)
    assert (told["differing"], told["not_a_number"]) == (2, 1)
    assert (told["worst"]["index"], told["worst"]["error"]) == ([1], 1.0)
    assert told["heat"]["cells"][0][0] > 0


def test_a_zero_of_the_other_sign_is_seen() -> None:
    told = one(np.array([0.0, 1.0], F32), np.array([-0.0, 1.0], F32))
    assert told["differing"] == 1
    assert told["worst"]["index"] == [0]
    assert (told["worst"]["expected_hex"], told["worst"]["got_hex"]) == ("0x00000000", "0x80000000")
    assert told["heat"]["cells"][0][0] > 0
    assert told["heat"]["cells"][0][1] == 0


@given(st.lists(st.floats(0, 2.0**40), min_size=1, max_size=50))
def test_a_histogram_counts_each_once_in_its_bin(values: list[float]) -> None:
    edges = [0.0, 1.0, 4.0, 1024.0]
    entries = histogram(np.array(values), edges)
    tops = [*edges, None]
    for entry in entries:
        i = tops.index(entry["upto"])
        below = -1.0 if i == 0 else edges[i - 1]
        top = math.inf if entry["upto"] is None else entry["upto"]
        assert entry["count"] == sum(below < v <= top for v in values)
    assert sum(entry["count"] for entry in entries) == len(values)
    assert entries[0]["count"]
    assert entries[-1]["count"]


@pytest.mark.parametrize("shape", [(7,), (200,), (3, 5), (65, 130), (3, 70, 2), (2, 3, 4, 5)])
def test_a_heat_map_has_the_worst_of_every_cell(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    y = rng.standard_normal(shape).astype(F32)
    wrong = (y * (1 + rng.standard_normal(shape) / 1000)).astype(F32)
    told = one(y, wrong)
    margin = np.abs(wrong.astype(float) - y) / (8 * U * np.abs(y.astype(float)) + 2.0**-147)
    maps = [told["heat"], *told["axes"]]
    last = (-2, -1) if len(shape) > 1 else (-1,)
    wanted = [[a % len(shape) for a in last], *([a] for a in range(len(shape) - 2))]
    assert [m["axes"] for m in maps] == wanted
    for heat in maps:
        cells = np.zeros([min(shape[a], CELLS) for a in heat["axes"]])
        for index in np.ndindex(shape):
            at = tuple(_cell(index[a], shape[a]) for a in heat["axes"])
            cells[at] = max(cells[at], margin[index])
        np.testing.assert_allclose(np.atleast_2d(cells), heat["cells"], rtol=6e-3)
    at = tuple(told["worst"]["index"])
    assert margin[at] == margin.max()
    assert told["worst"]["margin"] == pytest.approx(margin.max(), rel=6e-3)
    assert told["margins"]["worst"] == told["worst"]["margin"]
    assert told["differing"] == (y != wrong).sum()


def _cell(i: int, n: int) -> int:
    return i if n <= CELLS else max(j for j in range(CELLS) if j * n // CELLS <= i)


def test_margins_are_those_of_the_rule() -> None:
    ids = {"kernel/linear/bias", "kernel/attention/prefill_33", "kernel/rms_norm/eps_1e-5"}
    seen = set()
    for case in read_all(data_folder("goldens"), ids):
        wrong = {n: (a * F32(1.001)).astype(a.dtype) for n, a in case.outputs.items()}
        verdict = rules.judge("gauge", case, wrong, U)
        (told,) = differences(case, wrong, U)
        assert told["unit"] == "bound"
        assert verdict.worst is not None
        assert told["margins"]["worst"] == pytest.approx(verdict.worst, rel=6e-3)
        seen.add(case.id)
    assert seen == ids


def test_bits_are_measured_in_float32_and_bounds_in_what_is_declared() -> None:
    folder, name = data_folder("goldens"), "kernel/linear/bias"
    (case,) = read_all(folder, {name})
    wrong = {"y": case.outputs["y"] * F32(1.5)}
    answers = {(name, rule): wrong for rule in ("bits", "gauge")}
    results = [result(f"{name}:{rule}", "fail") for rule in ("bits", "gauge")]
    declared = {"accumulator": "bfloat16"}
    found = outputs(results, answers, folder, declared)
    for rule, u in (("bits", U), ("gauge", rules.unit_roundoff(declared))):
        assert found[f"{name}:{rule}"] == differences(case, wrong, u)
    assert found[f"{name}:bits"] != found[f"{name}:gauge"]
    passed = [result(f"{name}:bits"), results[1]]
    assert list(outputs(passed, answers, folder, {})) == [f"{name}:gauge"]
