"""What underflow may take off, and that bounds without it would be violated (SPEC 16.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.fuzzing.case import Case
from conformance.fuzzing.draw import Asked
from conformance.golden import Golden
from conformance.operations import Sessions
from conformance.rules import Precision, bound, gauges, judge, unit_roundoff
from conformance.rules.underflow import losses
from conformance.runner import attempt
from conformance.variants import variants
from reference.arithmetic import matmul

F32 = NDArray[np.float32]
PAGES = ("k_pages", "v_pages")


def linear(x: F32, w: F32) -> Golden:
    y = matmul(x, w)
    gauge = gauges.linear(x, w, None, y)
    return Golden(
        "kernel/linear/x", "2.2", "linear", {}, {"x": x, "w": w}, {"y": y}, ("gauge",),
        gauge.terms, gauge.models, gauge.distance,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("numerics", "eta"),
    [
        ({"accumulator": "float32"}, 2.0**-150),
        ({"accumulator": "float32", "flush_to_zero": True}, 2.0**-126),
        ({"accumulator": "float32", "operands": "bfloat16"}, 2.0**-134),
        ({"accumulator": "float32", "operands": "float16"}, 2.0**-25),
        ({"accumulator": "float16", "flush_to_zero": True}, 2.0**-14),
        ({"accumulator": "float64"}, 0.0),
    ],
)
def test_eta(numerics: dict[str, Any], eta: float) -> None:
    assert unit_roundoff(numerics).underflow == eta


def test_flushed_operands_are_within_the_bound_of_who_declares_it() -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((4, 40)) * 2.0**-128).astype(np.float32)
    w = rng.standard_normal((6, 40)).astype(np.float32)
    golden = linear(x, w)
    kept = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)
    y = (kept.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32)
    y = np.where(np.abs(y) < 2.0**-126, np.float32(0), y)
    declared = {"operands": "bfloat16", "accumulator": "float32"}
    flushes = judge("gauge", golden, {"y": y}, unit_roundoff({**declared, "flush_to_zero": True}))
    assert flushes.outcome == "pass"
    keeps = judge("gauge", golden, {"y": y}, unit_roundoff(declared))
    assert keeps.outcome == "fail"


def test_small_numbers_of_float16() -> None:
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((4, 8)) * 2.0**-22).astype(np.float32)
    w = rng.standard_normal((5, 8)).astype(np.float32)
    golden = linear(x, w)
    y = (x.astype(np.float16).astype(np.float32) @ w.T).astype(np.float32)
    full = unit_roundoff({"operands": "float16", "accumulator": "float32"})
    assert judge("gauge", golden, {"y": y}, full).outcome == "pass"
    without = Precision(float(full), full.operands)
    assert judge("gauge", golden, {"y": y}, without).outcome == "fail"


def test_ordinary_numbers_lose_next_to_nothing() -> None:
    x, w = (np.random.default_rng(i).standard_normal((6, 64)).astype(np.float32) for i in (1, 2))
    golden = linear(x, w)
    plain = bound(golden, 2.0**-24)
    assert np.max(losses(golden)) < 400
    assert np.array_equal(bound(golden, unit_roundoff({"accumulator": "float32"})), plain)


def test_bfloat16_rounds_as_its_bound_says() -> None:
    x = np.ldexp(np.random.default_rng(3).random((1, 64), np.float32) + 1, -134)
    kept = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    eta = unit_roundoff({"accumulator": "float32", "operands": "bfloat16"}).underflow
    assert np.abs(kept - x).max() <= eta * 1.000001


def test_pages_lose_what_attention_over_their_positions_does() -> None:
    case = Case.read("paged_attention/1/69 page_size=16 rows=5 past=40 warm=true blind=0")
    paged = case.draw(Asked(exact=False)).golden({"accumulator": "float32"})
    about, a = dict(paged.parameters), paged.inputs
    length = about.pop("length")
    k, v = (a[n][a["block_table"]].reshape(-1, *a[n].shape[2:])[:length] for n in PAGES)
    inputs = {"q": a["q"], "k": k, "v": v}
    plain = replace(paged, operation="attention", parameters=about, inputs=inputs)
    assert length == 45
    assert np.all(losses(paged) > 0)
    assert np.array_equal(losses(paged), losses(plain))


@pytest.mark.parametrize("drawn", ["attention/1/3", "attention/1/54", "rms_norm/1/60"])
def test_what_only_the_exact_lane_loses_is_allowed_to_finer_arithmetic(drawn: str) -> None:
    backend = next(variant for variant in variants() if variant.name == "float64")()
    golden = Case.read(drawn).draw(Asked.of(backend.numerics)).golden(backend.numerics)
    declared = unit_roundoff(backend.numerics)
    verdict, answer = attempt(backend, Sessions(backend), golden, "gauge", declared)
    assert verdict.outcome == "pass"
    without = bound(golden, declared) - 2.0**-150 * losses(golden)
    assert answer is not None
    assert np.any(np.abs(answer["y"].astype(np.float64) - golden.outputs["y"]) > without)


# How many eta an output loses, counted by hand on a few small numbers: no bound grows unseen.


def counted(operation: str, y: Any, inputs: dict[str, Any], **parameters: Any) -> Any:
    arrays = {name: np.asarray(x, np.float32) for name, x in inputs.items()}
    blocks = {n: np.asarray(x, np.uint8) for n, x in inputs.items() if n == "blocks"}
    golden = Golden(
        "kernel/x/x", "16.4", operation, parameters, arrays | blocks,
        {"y": np.asarray(y, np.float32)}, ("gauge",),
    )  # fmt: skip
    return np.asarray(losses(golden)).tolist()


def minus_ones(kind: str) -> list[list[list[int]]]:
    """A row of 32 weights of minus one: the scale 1.0 as float16, then codes of minus one."""
    return [[[0x00, 0x3C, *([0x77] * 16 if kind == "linear_q4_0" else [0xFF] * 32)]]]


def test_losses_of_elementary_functions() -> None:
    for operation in ("sigmoid", "silu", "gelu_tanh"):
        assert counted(operation, [0, 0, 0], {"x": [-3, 0, np.inf]}) == [8 * 4, 8, 8]
    assert counted("softmax", [[0.75, 0.25]], {"x": [[1, 0]]}) == [[4 + 3, 4 + 1]]
    assert counted("exp", [1], {"x": [0]}) == 0


def test_losses_of_linear_layers() -> None:
    x, w = [[1, -2, 3], [0, 0, 0]], [[1, 1, 1], [-2, 0, 2]]
    plain = counted("linear", np.zeros((2, 2)), {"x": x, "w": w})
    assert plain == [[6 + 3 + 8, 6 + 4 + 8], [3 + 8, 4 + 8]]
    codes = {"x": [[127, -127, 0, 0], [0, 0, 0, 0]], "scales": [[1, 2]]}
    weights = 8 * 3 * 2
    wanted = [[128 * weights + 254 + 2 * 10], [128 * weights + 10]]
    assert counted("linear_int4", np.zeros((2, 1)), codes, group=2) == wanted
    by_row = codes | {"scales": [[3]]}
    wanted = [[128 * 2 * weights + 254 + 2 * 10], [128 * 2 * weights + 10]]
    assert counted("linear_int4", np.zeros((2, 1)), by_row, group=0) == wanted
    some = {"x": [[1, -2, 0, 0]], "scales": [[3, 1]]}
    assert counted("linear_w4a16", [[0]], some, group=2) == [[16 * 3 + 15 * 4 * 2 + 10 * 4]]
    assert counted("linear_w4a16", [[0]], some | {"scales": [[3]]}, group=0) == [
        [16 * 3 + 15 * 3 * 4 + 10 * 4]
    ]


@pytest.mark.parametrize("kind", ["linear_q4_0", "linear_q8_0"])
def test_losses_of_blocks(kind: str) -> None:
    inputs = {"x": np.full((1, 32), -127), "blocks": minus_ones(kind)}
    assert counted(kind, [[0]], inputs) == [[128 * 32 + 32 * 127 + 2 * (2 * 32 + 2)]]


def test_losses_of_norms_and_rotations() -> None:
    norm = {"x": [[3, -3]], "weight": [1, -5]}  # r = 1/4, the lost share of squares 20/32
    wanted = [[2 * 0.625 + (1 + 3 + 2) * 1.25, 4 * 0.625 + (5 + 3 + 2) * 1.25]]
    assert counted("rms_norm", [[2, -4]], norm, eps=7) == wanted
    turn = {"x": [[[3, -1]], [[0, -1]]], "positions": [5, 0]}
    assert counted("rope", np.zeros((2, 1, 2)), turn) == [[[8 * 4 * 7] * 2], [[8 * 2 * 2] * 2]]
    assert counted("rope", np.zeros((2, 1, 2)), turn, factor=2)[0] == [[12 * 4 * 7] * 2]


def test_losses_of_attention() -> None:
    """Four heads of width 4 over two of keys, the second of which has no values; three keys."""
    q, y = np.ones((1, 4, 4)), np.ones((1, 4, 4))
    q[0, ::2], y[0, 1] = -0.5, -3
    k, v = np.zeros((3, 2, 4)), np.zeros((3, 2, 4))
    k[:, 0] = np.array([[1], [-1], [0.5]])
    v[:, 0] = np.array([[2], [-1], [1]])
    found = counted("attention", y, {"q": q, "k": k, "v": v}, scale=-0.25)
    half, one = 2 * (0.25 * 15 + 4) + 12, 2 * (0.25 * 17 + 4) + 12  # by sums of |q| of 2 and 4
    wanted = [half * 3 + 12, one * 5 + 12, half * 1 + 8, one * 1 + 8]
    assert found == [[[x] * 4 for x in wanted]]
    plain = counted("attention", y, {"q": q, "k": k, "v": v})
    assert plain[0][0] == [(2 * (0.5 * 15 + 4) + 12) * 3 + 12] * 4


def test_losses_of_gated_layers() -> None:
    """Of widths of one: g = 6 and u = 10, then g = u = 2; a product loses 8 and 10, or 6 and 6."""
    first = {"gate": [[3]], "up": [[-5]], "down": [[7]]}
    large = (2 * (1 + 8 + 6) * 11 + 7 * 11) * 7 + (60 + 7 + 3)
    small = (2 * (1 + 6 + 2) * 3 + 3 * 7) * 1 + (4 + 1 + 3)
    assert counted("gated_mlp", [[0], [0]], {"x": [[2], [2]], **first}) == [[large], [large]]
    both: dict[str, Any] = {name: [weight, [[1]]] for name, weight in first.items()}
    layer = {"x": [[2]], "experts": [[0, 1]], "gates": [[0.5, 0.25]], **both}
    routed = 6 + 1.5 * (large + 1) + 60 * 7 + 1.25 * (small + 1) + 4
    assert counted("moe", [[0]], layer) == [[routed]]
    shared = {f"shared_{name}": [[1]] for name in first}
    assert counted("moe", [[0]], layer | shared) == [[routed + 2 * (small + 1)]]
    gated = layer | shared | {"shared_router": [[3]]}
    assert counted("moe", [[0]], gated) == [[routed + 2 * (small + 1) + 4 * (8 + 8)]]
