"""Sums of terms that are alike: their bound holds, and that of all others hardly moves (SPEC 16.4).

Numbers are counted here in integers and by loops, and sums are taken one term after the other.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.cases.recipe import EXACT
from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from conformance.rules import Precision, bound, gauges, judge, numerics_of, unit_roundoff
from conformance.rules.alike import CELLS, FEW, _shares, more_roundings, squares_of
from conformance.variants import variants
from conformance.variants.orders import Sequential
from reference.arithmetic import F32, F64
from reference.experts import Router, route

U = unit_roundoff({"accumulator": "float32"})
Record = Callable[[str, object], None]


def counted(terms: list[float], u: float) -> float:
    """The sum of squares, by a counter: 32 cells a unit in the last place of the sum of sizes."""
    total = 0.0
    for term in terms:
        total += abs(term)
    _, exponent = math.frexp(total)
    unit = 2 * u * 2.0 ** (exponent - 1) / CELLS
    cells = Counter(math.floor(term / unit) for term in terms if term)
    lost = {cell: min(1.0, max(-cell, cell + 1) / (CELLS // 2)) for cell in cells}
    return len(terms) + sum((n * n - n) * lost[cell] ** 2 for cell, n in cells.items())


FEW_VALUES = st.sampled_from([0.0, 1.0, -1.0, 1.5, 1 + 2.0**-20, 2.0**-25, -(2.0**-26), 3.0])


@given(st.lists(FEW_VALUES | st.floats(-4, 4, width=32), min_size=1, max_size=40))
def test_terms_of_one_cell_are_counted(terms: list[float]) -> None:
    for u in (2.0**-24, 2.0**-11, 2.0**-53):
        found = squares_of(np.array([[terms], [terms[::-1]]]), u)
        assert found.shape == (2, 1)
        for one, order in zip(found.ravel(), (terms, terms[::-1]), strict=True):
            assert one == pytest.approx(counted(order, u), rel=1e-12)


def test_equal_terms_count_as_their_square_and_others_as_one_each() -> None:
    rng = np.random.default_rng(0)
    assert squares_of(np.full((1, 100), 0.3), U)[0] == 100.0**2
    assert squares_of(np.zeros((1, 100)), U)[0] == 100
    assert 100 <= squares_of(rng.standard_normal((1, 100)), U)[0] <= 102


def linear(x: F32, w: F32) -> Golden:
    """A golden of the linear layer."""
    y = EXACT.linear(x, w)
    gauge = gauges.linear(x, w, None, y)
    return Golden(
        "kernel/linear/alike", "2.2", "linear", {}, {"x": x, "w": w}, {"y": y}, ("gauge",),
        gauge.terms, gauge.models, gauge.distance,
    )  # fmt: skip


def without(golden: Golden, u: Precision = U) -> F64:
    """The bound where every term is taken to be unlike all others."""
    return bound(replace(golden, operation="unknown"), u)


def one_after_the_other(x: F32, w: F32) -> F32:
    """Products of float32 added to one float32."""
    y = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        y = y + x[:, k, None] * w[None, :, k]
    return y


def drawn(kind: str, width: int, rng: np.random.Generator) -> F32:
    """Weights (16, width) many of which are alike."""
    one = (1 + rng.random((16, 1))).astype(np.float32)
    w = np.repeat(one, width, axis=1)
    if kind == "after a large one":
        w[:, 0] *= np.float32(3 * width)
    if kind == "nearly equal":
        w *= (1 + rng.random(w.shape) * 2.0**-16).astype(np.float32)
    if kind == "of some values":
        w *= rng.choice(1 + rng.random(10), w.shape).astype(np.float32)
    if kind == "too small to be taken":
        w = (w * rng.random(w.shape) * 2.0**-25).astype(np.float32)
        w[:, 0] = 1
    if kind == "of both signs":
        w[:, 0] *= np.float32(2 * width)
        w[:, 1:] *= -1
    return w


@pytest.mark.parametrize(
    "kind",
    ["equal", "after a large one", "nearly equal", "of some values", "too small to be taken",
     "of both signs"],
)  # fmt: skip
@pytest.mark.parametrize("width", [1000, 4096])
def test_a_running_sum_of_like_terms_is_within_its_bound(
    kind: str, width: int, record_property: Record
) -> None:
    x, rng = np.ones((1, width), np.float32), np.random.default_rng(width)
    golden = linear(x, drawn(kind, width, rng))
    error = np.abs(
        one_after_the_other(x, golden.inputs["w"]).astype(np.float64) - golden.outputs["y"]
    )
    margin, before = (float((error / b).max()) for b in (bound(golden, U), without(golden)))
    record_property("before", before)
    record_property("margin", margin)
    assert 0.05 < margin <= 1
    if width == 4096 and kind != "of some values":
        assert before > 1, "these data show nothing"


def softmax_golden(x: F32) -> Golden:
    y = EXACT.softmax(x)
    gauge = gauges.softmax(x, y)
    return Golden(
        "elementary/softmax/alike", "4.3", "softmax", {}, {"x": x}, {"y": y}, ("gauge",),
        gauge.terms, gauge.models, gauge.distance,
    )  # fmt: skip


def attention_golden(q: F32, k: F32, v: F32, sinks: F32 | None = None) -> Golden:
    inputs = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    y = EXACT.attention(**inputs, mode="exact")
    gauge = gauges.attention(q, k, v, y, sinks=sinks)
    return Golden(
        "kernel/attention/alike", "8.2", "attention", {}, inputs, {"y": y}, ("gauge",),
        gauge.terms, gauge.models, gauge.distance,
    )  # fmt: skip


def route_golden(logits: F32, **about: Any) -> Golden:
    router = Router(logits.shape[1], **about)
    made = route(logits, router)
    gauge = gauges.route(logits, router, made.experts, made.gates)
    return Golden(
        "kernel/route/alike", "9.2", "route", about, {"logits": logits},
        {"experts": made.experts, "gates": made.gates}, ("gauge",), gauge.terms, gauge.models,
        gauge.distance,
    )  # fmt: skip


def alike_goldens() -> list[Golden]:
    """Equal scores on equal values, a softmax of few values, equal products, equal squares."""
    rng = np.random.default_rng(7)
    k = np.repeat(rng.standard_normal((1, 1, 16)).astype(np.float32), 2048, axis=0)
    v = np.repeat(np.abs(rng.standard_normal((1, 1, 16))).astype(np.float32), 2048, axis=0)
    q = rng.standard_normal((2, 1, 16)).astype(np.float32)
    few = rng.integers(0, 3, (3, 3000)).astype(np.float32)
    x = np.repeat((1 + rng.random((4, 1))).astype(np.float32), 3000, axis=1)
    y = EXACT.rms_norm(x, x[0], 1e-6)
    norm = gauges.rms_norm(x, y)
    return [
        attention_golden(q, k, v),
        softmax_golden(few),
        linear(x, drawn("equal", 3000, rng)),
        Golden(
            "kernel/rms_norm/alike", "6", "rms_norm", {"eps": 1e-6}, {"x": x, "weight": x[0]},
            {"y": y}, ("gauge",), norm.terms, norm.models, norm.distance,
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("golden", alike_goldens(), ids=lambda g: g.operation)
def test_no_legitimate_variant_is_accused_of_like_terms(golden: Golden) -> None:
    tried = 0
    for variant in variants():
        if variant.exact:
            continue
        backend = variant()
        u = unit_roundoff(numerics_of(backend.numerics, golden.operation))
        arguments = {name: x.copy() for name, x in golden.inputs.items()} | dict(golden.parameters)
        if golden.operation == "attention":
            arguments["mode"] = "fast"
        y = getattr(backend, golden.operation)(**arguments)
        verdict = judge("gauge", golden, {"y": y}, u)
        assert verdict.outcome == "pass", (variant.name, verdict)
        tried += 1
    assert tried > 20


def test_a_running_sum_of_like_weights_would_be_accused_otherwise() -> None:
    """2,048 equal values with equal weights, one after the other, behind a large one."""
    most = 0.0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        k, v = (rng.standard_normal((1, 1, 16)).astype(np.float32) for _ in range(2))
        k, v = np.repeat(k, 2048, axis=0), np.repeat(np.abs(v), 2048, axis=0)
        v[0] *= np.float32(3 * 2048)
        q = rng.standard_normal((2, 1, 16)).astype(np.float32)
        golden = attention_golden(q, k, v)
        y = Sequential().attention(q=q, k=k, v=v, mode="fast")
        error = np.abs(y.astype(np.float64) - golden.outputs["y"])
        assert (error <= bound(golden, U)).all()
        most = max(most, float((error / without(golden)).max()))
    assert most > 1


def test_weights_that_are_alike_on_the_grid_of_a_sum_with_its_sink_are_counted() -> None:
    """Their own sum has a finer grid, on which they are not: a sink of e^9 times a weight."""
    scores = (np.random.default_rng(3).random(600) * 2.0**-9).astype(np.float32)
    k = np.zeros((600, 1, 4), np.float32)
    k[:, 0, 0] = scores
    q, v = np.zeros((1, 1, 4), np.float32), np.zeros((600, 1, 4), np.float32)
    q[..., 0] = 2
    found = {}
    for name, sinks in (("without", None), ("with", np.array([9.0], np.float32))):
        golden = attention_golden(q, k, v, sinks)
        weights = np.exp(np.append(scores.astype(np.float64), [] if sinks is None else sinks))
        squares = counted(weights.tolist(), U) - (sinks is not None)
        (more,) = more_roundings(golden, U)["values"][0, 0, :1].tolist()
        assert more == pytest.approx(7 * (math.sqrt(squares) - math.sqrt(600)), rel=0.05)
        found[name] = more
    assert found["with"] > 1.5 * found["without"]


def test_the_key_whose_products_are_most_alike_counts_for_a_rows_scores() -> None:
    """Of rows of 64 products, those of one row with one key are all equal."""
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((n, 1, 64)).astype(np.float32) for n in (2, 3))
    q[1], k[0] = 1, 1
    found = more_roundings(attention_golden(q, k, k), U)["scores"]
    assert found.shape == (2, 1, 1)
    assert found[1, 0, 0] == pytest.approx(65 - 57)
    assert found[0, 0, 0] < 1


def test_a_sinks_share_stands_behind_those_of_the_keys() -> None:
    q, k = np.ones((1, 4), np.float32), np.zeros((3, 4), np.float32)
    k[1] = 2
    shares = _shares(q, k, np.float32(3), {"scale": 0.25})
    assert shares[0].tolist() == pytest.approx(np.exp([-3.0, -1.0, -3.0, 0.0]))
    assert _shares(q, k, np.float32(-np.inf), {"scale": 0.25})[0, 3] == 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "logits"])
def test_gates_that_are_alike_are_counted_in_their_own_sum(score: str) -> None:
    """60 of 80 experts, most with one score: sums of exponentials, and of the gates."""
    logits = np.zeros((2, 80), np.float32)
    logits[1] = np.arange(80) / np.float32(40)
    golden = route_golden(logits, top_k=60, score=score, renormalise=True)
    more = more_roundings(golden, U)
    assert set(more) == {"softmax": {"sum", "total"}, "logits": {"sum", "total"}}.get(
        score, {"total"}
    )
    gates = 1 / (1 + np.exp(-logits[:1, :60].astype(np.float64)))
    wanted = min(61, 7 * math.sqrt(counted(gates[0].tolist(), U)) + 1) - 7 * math.sqrt(60) - 1
    assert more["total"].ravel()[0] == pytest.approx(wanted)
    assert more["total"].ravel()[1] < 1
    if score != "sigmoid":  # of all experts, or of the chosen
        terms = 80 if score == "softmax" else 60
        assert more["sum"].ravel()[0] == pytest.approx(terms - 7 * math.sqrt(terms))


def test_the_suites_own_bounds_hardly_change() -> None:
    """Where no terms are alike; those that were made of like ones are named."""
    made_alike = {
        "elementary/softmax/k1000", "elementary/softmax/k1025", "elementary/softmax/k64",
        "elementary/softmax/k65", "kernel/linear/bias_large", "kernel/linear_int4/k288_row",
        "kernel/linear_int4/limit", "kernel/linear_q4_0/limit", "kernel/linear_q8_0/limit",
        "kernel/rms_norm/spike",
    }  # fmt: skip
    wider: dict[str, float] = {}
    seen = 0
    for golden in read_all(Path(data_folder("goldens"))):
        for name, more in more_roundings(golden, U).items():
            count = int(re.findall(r"\d+", golden.terms[name])[0])
            plain = min(count + 1, 7 * math.sqrt(count) + 1)
            assert count > FEW
            assert (more >= 0).all()
            assert (plain + more <= count + 1).all()
            seen += 1
            wider[golden.id] = max(wider.get(golden.id, 1), float(1 + more.mean() / plain))
    assert seen > 100
    rest = {name: ratio for name, ratio in wider.items() if name not in made_alike}
    assert max(rest.values()) < 1.1
    assert np.mean(list(rest.values())) < 1.01
