"""Goldens that the order of block sums decides: each other one is seen, and told from the rest."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache, reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from conformance.backends.composed import ComposedBackend
from conformance.backends.reference import ReferenceBackend
from conformance.cases import order
from conformance.diagnosis import explanation
from conformance.faults import AnyFault, applied, area, fault, faults
from conformance.faults.order import Extended
from conformance.golden import Golden, read_all
from conformance.operations import Outputs, Sessions, call
from conformance.paths import data_folder, model_folder
from conformance.rules import mode_of, same_bits
from fixtures.make_order import make
from tests.oracle import aligned, attention, elementary, layers
from tests.oracle.arrays import f32
from tests.oracle.nasty import tolist
from tests.oracle.numbers import Format, narrow, round_to
from tests.oracle.numbers import add as rounded_sum

GOLDENS = {g.id: g for g in read_all(data_folder("goldens"), {r.id for r in order.recipes()})}
KERNELS = {name: g for name, g in GOLDENS.items() if g.operation != "forward"}
MODEL = GOLDENS["model/forward/order"]
FAULTS = [f for f in faults() if area(f) == "order"]


# Other orders, written out here, on block sums by the oracle.

Sums = list[float]


def pairwise(sums: Sums) -> float:
    while len(sums) > 1:
        sums = [reduce(add, sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return sums[0]


def in_turn(sums: Iterable[float]) -> float:
    return reduce(add, sums, 0.0)


def extended(sums: Sums) -> float:
    """64 bits of a sum, as x87 has them."""
    total = Fraction(0)
    for block_sum in sums:
        exact = total + Fraction(block_sum)
        high = Fraction(round_to(exact, Format(53, -16382, 16383)))
        # What 53 bits leave is rounded to 11 bits more, of the same exponent.
        unit = Fraction(math.ulp(float(high))) / 2**11 if high else Fraction(1)
        total = high + round((exact - high) / unit) * unit
    return float(total)


OTHERS: dict[str, Callable[[Sums], float]] = {
    "descending": lambda sums: in_turn(sums[::-1]),
    "pairwise": pairwise,
    "halves": lambda sums: in_turn(sums[: len(sums) // 2]) + in_turn(sums[len(sums) // 2 :]),
    "larger half first": lambda s: in_turn(s[: -(-len(s) // 2)]) + in_turn(s[-(-len(s) // 2) :]),
    "in two lanes": lambda sums: in_turn(sums[::2]) + in_turn(sums[1::2]),
    "in four lanes": lambda s: pairwise([in_turn(s[i::4]) for i in range(4)]),
    "two blocks at once": lambda s: in_turn(in_turn(s[i : i + 2]) for i in range(0, len(s), 2)),
    "exact": math.fsum,
    "extended": extended,
}


def block_sums(a: list[float], b: list[float]) -> Sums:
    exact = [
        aligned.block_dot([a[i] for i in block], [b[i] for i in block])
        for block in aligned.blocks(len(a))
    ]
    assert all(Fraction(float(s)) == s for s in exact)
    return [float(s) for s in exact]


@cache
def sums_of(name: str) -> list[Sums]:
    """Of every output of a linear layer, row by row."""
    x, w = (tolist(GOLDENS[name].inputs[n]) for n in ("x", "w"))
    return [block_sums(a, b) for a, b in itertools.product(x, w)]


LINEAR = [f"kernel/linear/order_{name}" for name in ("steps", "t1", "t4", "t5", "ragged", "wide")]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_have_the_bits_of_one_order(name: str) -> None:
    """The contract's gives the golden, and each other one something else in many outputs."""
    golden = GOLDENS[name].outputs["y"].ravel()
    assert np.array_equal(f32([in_turn(s) for s in sums_of(name)]), golden)
    for other, together in OTHERS.items():
        y = f32([together(s) for s in sums_of(name)])
        assert np.mean(y != golden) > 0.1, (other, np.mean(y != golden))


def test_sums_without_blocks_are_others() -> None:
    """One running sum, with FMA or without, and one GEMM, which SPEC 2.2 forbids by name."""
    for name in LINEAR:
        golden = GOLDENS[name]
        x, w = (np.array([aligned.align(row) for row in tolist(golden.inputs[n])]) for n in "xw")
        running = np.zeros((len(x), len(w)))
        for k in range(x.shape[1]):
            product = x[:, k, None] * w[:, k]
            exact = Fraction(x[0, k]) * Fraction(w[0, k])
            assert Fraction(product[0, 0]) == exact, "so that FMA is the same"
            running += product
        for y in (running, x @ w.T):
            assert np.mean(y.astype(np.float32) != golden.outputs["y"]) > 0.1, name


def test_few_rows_and_many_are_tried() -> None:
    rows = {len(GOLDENS[name].outputs["y"]) for name in [*LINEAR, "kernel/linear/order_t34"]}
    assert {1, 4, 5, 34} <= rows


@pytest.mark.parametrize("name", ["kernel/rms_norm/order", "kernel/rms_norm/order_decode"])
def test_norms_have_the_bits_of_one_order(name: str) -> None:
    """Rows that tell every order, and those that tell them apart, by the oracle's square sums."""
    golden = GOLDENS[name]
    x, eps = tolist(golden.inputs["x"]), golden.parameters["eps"]
    told = 0
    for row in x:
        sums = block_sums(row, row)

        def root(total: float, width: int = len(row)) -> np.float32:
            return np.float32(1 / np.sqrt(np.float64(total) / width + eps))

        told += all(root(together(sums)) != root(in_turn(sums)) for together in OTHERS.values())
    assert told >= (6 if len(x) > 1 else 1)


def test_softmax_has_the_bits_of_one_order() -> None:
    x = tolist(GOLDENS["elementary/softmax/order"].inputs["x"])
    for row in x[:2]:
        p = [elementary.exp(value) for value in row]
        sums = block_sums(p, [1.0] * len(p))
        shares = {name: narrow(1 / together(sums)) for name, together in OTHERS.items()}
        assert narrow(1 / in_turn(sums)) not in shares.values()


# The catalogue's orders.


def answered(known: AnyFault, golden: Golden) -> Outputs:
    backend = applied(known, ComposedBackend)
    arguments = {**golden.parameters, **golden.inputs, **mode_of(golden.operation, "bits")}
    return call(backend, Sessions(backend), golden.operation, arguments)


SEEN_BY = {
    "dot": ("kernel/linear/order", "kernel/linear_w4a16/order", "kernel/gated_mlp/order",
            "kernel/attention/order_scores", "model/forward/order"),
    "norm": ("kernel/rms_norm/order",),
    "softmax": ("elementary/softmax/order", "kernel/route/order"),
    "route": ("kernel/route/order_gates",),
    "attention": ("kernel/attention/order_values", "kernel/attention/order_denominator",
                  "cache/paged_attention/order"),
    "attention-sink-first": ("kernel/attention/order_sink_last",),
    "paged": ("cache/paged_attention/order",),
}  # fmt: skip
"""The goldens that must fail, by the beginning of a fault's name."""


@pytest.mark.parametrize("known", FAULTS, ids=lambda f: f.name)
def test_every_order_fails_every_golden_of_its_sums(known: AnyFault) -> None:
    starts = SEEN_BY.get(known.name) or SEEN_BY[known.name.split("-")[0]]
    told = [g for name, g in GOLDENS.items() if name.startswith(starts)]
    told = [g for g in told if known.name.startswith("route") or "order_gates" not in g.id]
    assert len(told) >= len(starts)
    for golden in told:
        assert not same_bits(answered(known, golden), golden.outputs), golden.id


def first_named(golden: Golden, outputs: Outputs) -> str:
    """The fault that diagnosis names first; "" for none."""
    case = explanation.Heard(golden, outputs)
    suspects = explanation.suspects(golden.operation)
    named = explanation.Inquiry([case], suspects, explanation.U32).nearest(case)
    return named[0].fault if named else ""


@pytest.mark.parametrize("known", FAULTS, ids=lambda f: f.name)
def test_every_order_is_named_first(known: AnyFault) -> None:
    """By one of the goldens that it fails, at least: not all tell all orders apart."""
    named = []
    for golden in KERNELS.values():
        if golden.operation not in known.operations:
            continue
        outputs = answered(known, golden)
        if not same_bits(outputs, golden.outputs):
            named.append(first_named(golden, outputs))
    assert known.name in named


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="long double is another type")
def test_an_accumulator_of_64_bits_is_that_of_this_machine() -> None:
    """On block sums that cancel and on sums that reach a power of two."""
    heights = np.random.default_rng(0).integers(-20, 60, (12, 4000))
    sums = np.ldexp(np.random.default_rng(1).standard_normal((12, 4000)), heights)
    sums[6:] = -sums[5::-1] * (1 + 2.0 ** -heights[:6])
    total = np.zeros(4000, np.longdouble)
    for block_sum in sums:
        total = total + block_sum
    assert np.mean(Extended().together(sums) == total.astype(np.float64)) > 0.999


def test_eps_in_float32_is_seen_and_named() -> None:
    known = fault("norm-epsilon-float32")
    for name in ("1e-5", "1e-6"):
        golden = GOLDENS[f"kernel/rms_norm/eps_float64_{name}"]
        outputs = answered(known, golden)
        assert (outputs["y"] != golden.outputs["y"]).any(axis=1).all()
        assert first_named(golden, outputs) == known.name


# How the inputs are made.


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(2**25, 2**48))
def test_any_total_is_a_sum_of_squares(seed: int, more: int) -> None:
    fixed = np.random.default_rng(seed).integers(2**23, 2**24, 20).astype(np.float64)
    total = sum(int(a) ** 2 for a in fixed) + more
    found = order._squares(total, fixed)
    assert len(found) == 32
    assert sum(int(a) ** 2 for a in found) == total
    assert (found < 2**24).all()


def test_a_brink_is_where_the_result_changes() -> None:
    def third(x: float) -> np.float32:
        return np.float32(1 / (3 * x))

    at = order._brink(third, 2**52, 1.0, 2**32)
    assert third(at) != third(at - 1) == third(2**52)


def test_the_model_is_made_again(tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("config.json", "model.safetensors"):
        made = (tmp_path / name).read_bytes()
        assert made == (model_folder("random-order") / name).read_bytes(), name


def test_the_first_rows_of_the_model_are_the_oracles() -> None:
    """Three tokens, element by element; a row does not depend on those after it."""
    rows = 3
    tokens = MODEL.inputs["tokens"][:rows].tolist()
    folder = model_folder("random-order")
    config = json.loads((folder / "config.json").read_text())
    session = ReferenceBackend().load(str(folder), "float32")
    named = _tensors(folder)
    x = [named["model.embed_tokens.weight"][token] for token in tokens]
    rope = layers.Rope("default", config["rope_theta"], config["head_dim"])
    eps, scale = config["rms_norm_eps"], attention.default_scale(config["head_dim"])

    def normed(name: str, rows: list[list[float]]) -> list[list[float]]:
        return [layers.rms_norm(row, named[f"{name}.weight"], eps) for row in rows]

    def plus(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
        return [
            [rounded_sum(p, q) for p, q in zip(*r, strict=True)] for r in zip(a, b, strict=True)
        ]

    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        h = normed(f"{at}.input_layernorm", x)
        q, k, v = (aligned.matmul(h, named[f"{at}.self_attn.{n}_proj.weight"]) for n in "qkv")
        turns = [layers.cos_sin(rope, position) for position in range(rows)]
        q, k = (
            [layers.rotate(head, *turn, False) for head, turn in zip(heads, turns, strict=True)]
            for heads in (q, k)
        )
        seen = [attention.attend(q[t], k, v, t, scale) for t in range(rows)]
        x = plus(x, aligned.matmul(seen, named[f"{at}.self_attn.o_proj.weight"]))
        h = normed(f"{at}.post_attention_layernorm", x)
        gate, up, down = (
            layers.linear(named[f"{at}.mlp.{n}_proj.weight"]) for n in ("gate", "up", "down")
        )
        x = plus(x, [layers.gated_mlp(row, gate, up, down, "silu") for row in h])
    logits = aligned.matmul(normed("model.norm", x), named["lm_head.weight"])
    assert np.array_equal(f32(logits), MODEL.outputs["y"][:rows])
    assert np.array_equal(session.forward(tokens, "exact"), MODEL.outputs["y"][:rows])


def _tensors(folder: Path) -> dict[str, Any]:
    return {name: tolist(w) for name, w in load_file(folder / "model.safetensors").items()}
