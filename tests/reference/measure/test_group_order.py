"""Sums of groups in any order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.blocks import dequantize_blocks, linear_blocks
from reference.measure.formats import FORMATS, Quantized
from reference.measure.group_order import LANES, ROWS, Lane, activations, lanes, order_figures
from reference.quantization import quantize_int8
from tests.reference.measure.formats import experiment, normal


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from(list(FORMATS)))
def test_exact_sums_have_no_order(seed: int, groups: int, kind: str) -> None:
    """Weights over many binades, which make float32 sums differ in most orders."""
    rng = np.random.default_rng(seed)
    wide = normal(6, 32 * groups, seed=seed) * np.exp2(rng.integers(-12, 4, (6, 32 * groups)))
    w, x = wide.astype(np.float32), normal(3, 32 * groups, seed=seed + 1)
    codes, scales = Quantized.of({"w": w}, ["w"], kind).codes["w"]
    orders = [rng.permutation(groups).tolist() for _ in range(4)]
    assert not lanes(x, codes, scales)["exact"].changes(orders).any()


def test_sums_with_an_order_are_found_out() -> None:
    """The check can fail: for float64 terms that are no multiples of one unit, and float32."""
    rng = np.random.default_rng(0)
    orders = [rng.permutation(16).tolist() for _ in range(8)]
    terms = rng.standard_normal((4, 50, 16))
    for dtype in (np.float64, np.float32):
        lane = Lane(terms.astype(dtype), np.ones((1, 1), dtype))
        changed = lane.changes(orders)
        assert changed.shape == (8, 4, 50)
        assert 0.2 < changed.mean() < 0.9
        assert not lane.changes([range(16)]).any()


def test_exact_sums_are_those_of_the_kernel() -> None:
    x, w = normal(4, 128), normal(7, 128, seed=1)
    for kind in FORMATS:
        quantized = Quantized.of({"w": w}, ["w"], kind)
        lane = lanes(x, *quantized.codes["w"])["exact"]
        y = (lane.terms.sum(axis=2) * quantize_int8(x)[1][:, None].astype(np.float64)).astype("f4")
        assert y.tobytes() == linear_blocks(x, quantized.blocks["w"]).tobytes()


def test_all_lanes_add_up_to_the_same_product() -> None:
    x, w = normal(4, 128), normal(7, 128, seed=1)
    for kind in FORMATS:
        quantized = Quantized.of({"w": w}, ["w"], kind)
        product = x.astype(np.float64) @ dequantize_blocks(quantized.blocks["w"]).T
        found = lanes(x, *quantized.codes["w"])
        assert tuple(found) == LANES
        for name, lane in found.items():
            y = lane.terms.sum(axis=2) * lane.after
            if name == "exact":
                y = y * quantize_int8(x)[1][:, None]
            # int8 activations are the one thing that differs from the product
            assert np.linalg.norm(y - product) < 0.02 * np.linalg.norm(product)


def test_the_fork_and_the_third_way_on_trained_weights() -> None:
    done = experiment("tiny-dense", formats=("int4", "int4-row", "q8_0"))
    read = done.read()
    told = {kind: order_figures(q, read) for kind, q in done.quantized.items()}
    assert told["int4"]["float32_by_block_changed"] > 0.3
    assert told["q8_0"]["float32_changed"] > 0.2
    assert told["int4-row"]["float32_changed"] == 0  # integers
    for figures in told.values():
        assert (figures["exact_changed"], figures["exact_changed_most"]) == (0, 0)
        assert figures["float32_changed_most"] <= figures["float32_changed"]
        assert figures["outputs"] == ROWS * sum(
            len(codes) for codes, _ in done.quantized["int4"].codes.values()
        )


def test_activations_are_what_the_layers_read() -> None:
    done = experiment("tiny-moe")
    read = activations(done.base, done.tokens[:12].tolist())
    first = done.base.weights.layers[0]
    embedded = done.base.weights.embedding[done.tokens[:12]]
    norm = first.norms.before_attention
    assert norm is not None
    x = done.base.operations.rms_norm(embedded, norm, done.base.config.rms_norm_eps)[-ROWS:]
    assert read[next(names for names in read if "q_proj" in names[0])].tobytes() == x.tobytes()
    experts = [x for names, x in read.items() if "layers.0.mlp.experts" in names[0]]
    assert experts
    assert {x.shape[1] for x in experts} == {192, 64}
