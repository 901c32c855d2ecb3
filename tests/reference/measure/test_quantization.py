"""The fork: formats against gguf's own, sums in any order, and intervals against statistics."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.generator import integers
from reference.blocks import BlockType, dequantize_blocks, linear_blocks, read_blocks
from reference.errors import QuantizationError, RequestError
from reference.loading import load_checkpoint
from reference.measure.perplexity import perplexity
from reference.measure.quantization import (
    BASE,
    FORMATS,
    LANES,
    RESAMPLES,
    ROWS,
    STRETCH,
    Bootstrap,
    Experiment,
    Lane,
    Quantized,
    activations,
    joined,
    lanes,
    order_figures,
    projections,
    quantize_q4_0,
    quantize_q8_0,
    reduced,
    text_figures,
)
from reference.model import load_model
from reference.quantization import dequantize, quantize_int4, quantize_int8

FIXTURES = Path(__file__).parents[3] / "fixtures"


@cache
def experiment(name: str = "tiny-draft", **options: Any) -> Experiment:
    tokens = integers("quantization", 1024, 200)
    wanted: dict[str, Any] = {"formats": tuple(FORMATS), "positions": 40, "context": 32} | options
    return Experiment(load_checkpoint(FIXTURES / name), tokens, **wanted)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# formats


@pytest.mark.parametrize(
    ("kind", "quantize"), [("Q4_0", quantize_q4_0), ("Q8_0", quantize_q8_0)], ids=["q4_0", "q8_0"]
)
def test_blocks_are_those_of_gguf(kind: BlockType, quantize: Any) -> None:
    gguf = pytest.importorskip("gguf")
    w = normal(40, 96) * np.power(np.float32(10), normal(40, 96, seed=1))
    w[3, :32], w[4, 5:50], w[5, 32:] = 0, 0, np.float32(-1e-9)
    w[6, :2], w[7] = (5, -5), np.tile([1, -1, 0.5, -0.0625], 24)  # the first of equals
    stored = gguf.quants.quantize(w, getattr(gguf.GGMLQuantizationType, kind))
    theirs = read_blocks(stored.reshape(40, 3, -1), kind)
    codes, scales = quantize(w)
    assert codes.tobytes() == theirs.codes.tobytes()
    assert np.array_equal(scales, theirs.scales)


@pytest.mark.parametrize("mode", ["int4", "int4-row"])
def test_a_model_of_blocks_is_the_engines_own(mode: Any) -> None:
    """Not only alike: the int4 kernel of the engine runs, with the same weights."""
    tokens = experiment().tokens[:20].tolist()
    ours = experiment().model(mode).forward(tokens)
    assert ours.tobytes() == load_model(FIXTURES / "tiny-draft", mode).forward(tokens).tobytes()


@pytest.mark.parametrize("name", ["tiny-draft", "tiny-moe"])
def test_every_projection_is_quantized_and_nothing_else(name: str) -> None:
    found = [each for _, names in projections(experiment(name).base) for each in names]
    tensors = experiment(name).checkpoint.tensors
    kept = ("embed_tokens", "lm_head", "mlp.gate.", "shared_expert_gate")
    wanted = {n for n, w in tensors.items() if w.ndim == 2 and not any(k in n for k in kept)}
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_errors_are_norms_and_group_scales_have_the_smaller_one() -> None:
    done = experiment()
    errors: dict[str, float] = {}
    for kind, quantized in done.quantized.items():
        errors[kind], spread = quantized.errors(done.checkpoint.tensors)
        pairs = [
            (done.checkpoint.tensors[name].astype(np.float64), dequantize_blocks(m))
            for name, m in quantized.blocks.items()
        ]
        whole = [np.concatenate([np.ravel(pair[i]) for pair in pairs]) for i in (0, 1)]
        assert errors[kind] == pytest.approx(
            np.linalg.norm(whole[1] - whole[0]) / np.linalg.norm(whole[0])
        )
        each = [np.linalg.norm(q - w) / np.linalg.norm(w) for w, q in pairs]
        assert (spread.least, spread.most) == pytest.approx((min(each), max(each)))
        assert spread.repetitions == len(pairs)
    assert errors["q8_0"] < errors["int4"] < errors["int4-row"] < errors["int4-row-max"]


def test_a_row_repeats_its_scale_and_a_group_has_its_own() -> None:
    w = normal(5, 96)
    assert np.array_equal(
        dequantize_blocks(Quantized.of({"w": w}, ["w"], "int4").blocks["w"]),
        dequantize(quantize_int4(w)),
    )
    row = Quantized.of({"w": w}, ["w"], "int4-row-max")
    assert np.ptp(row.blocks["w"].scales, axis=1).tolist() == [0] * 5


def test_costs_are_counted() -> None:
    """By group: 3 sums a row of 96 are scaled and added; by row the one sum is scaled."""
    tensors = {"w": normal(5, 96)}
    group, row, q8 = (
        Quantized.of(tensors, ["w"], kind).costs() for kind in ("int4", "int4-row", "q8_0")
    )
    assert (group["bits"], row["bits"], q8["bits"]) == (4.5, 4 + 16 / 96, 8.5)
    assert group["scale_operations"] == pytest.approx(6 / 96)
    assert row["scale_operations"] == pytest.approx(1 / 96)


# order


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


# intervals


def test_intervals_of_independent_positions_are_those_of_the_normal_law() -> None:
    values = np.random.default_rng(0).exponential(size=20_000)
    found = Bootstrap([1000] * 20).mean(values)
    error = values.std() / np.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.12)


def test_positions_that_are_alike_widen_the_interval() -> None:
    """Runs of 32 equal values tell as much as one each: the error grows by the root of 32."""
    rng = np.random.default_rng(0)
    values = np.repeat(rng.standard_normal(640), 32)
    found = Bootstrap([len(values)]).mean(values)
    error = values.std() / np.sqrt(640)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_blocks_stay_in_their_windows_and_are_weighted_by_their_length() -> None:
    """Two windows of 65: blocks of 64, 1, 64, 1; a mean of ones is 1 in every resample."""
    bootstrap = Bootstrap([STRETCH + 1] * 2)
    found = bootstrap.mean(np.ones(2 * STRETCH + 2))
    assert (found.value, found.low, found.high) == (1, 1, 1)
    assert bootstrap._draws.shape == (RESAMPLES, 4)
    assert (bootstrap._draws.sum(axis=1) == 4).all()
    values = np.arange(2.0 * STRETCH + 2)
    assert bootstrap.mean(values).value == values.mean()


def test_differences_are_paired() -> None:
    noise = 100 * np.random.default_rng(0).standard_normal(1000)
    bootstrap = Bootstrap([1000])
    apart = bootstrap.mean(noise + 0.5).low - bootstrap.mean(noise).low
    assert apart == pytest.approx(0.5)


# text


def test_figures_of_a_text_are_those_of_perplexity() -> None:
    done = experiment(formats=("int4", "q8_0"))
    windows = list(done.run())
    told = text_figures([reduced(scores) for scores in windows])
    assert list(told) == [BASE, "int4", "q8_0"]
    for kind, figures in told.items():
        alone = perplexity([scores[kind] for scores in windows])
        assert figures["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-12)
        assert (figures["positions"], figures["repetitions"]) == (45, 3)
        assert figures["perplexity_low"] < figures["perplexity"] < figures["perplexity_high"]
    base, int4, q8 = told.values()
    assert (base["kl"], base["kl_high"], base["same_top"], base["ratio"]) == (0, 0, 1, 1)
    assert base["to_int4"] == pytest.approx(1 / int4["ratio"])
    assert 0 < q8["kl"] < q8["kl_high"] < int4["kl_low"]
    assert 0 < int4["same_top"] <= 1
    assert int4["ratio"] == pytest.approx(int4["perplexity"] / base["perplexity"])
    one = joined([reduced(scores) for scores in windows])["int4"]
    other = np.concatenate(
        [s["int4"].logits.argmax(1) == s[BASE].logits.argmax(1) for s in windows]
    )
    assert one.same.tolist() == other.tolist()


def test_without_int4_nothing_is_held_against_it() -> None:
    done = experiment(formats=("q8_0",))
    told = text_figures([reduced(next(iter(done.run())))])
    assert {figures["to_int4"] for figures in told.values()} == {None}


# refusals


def test_what_cannot_be_run_is_refused() -> None:
    for changes, message in (
        ({"formats": ("int3",)}, "^formats: 'int3' is none of int4, int4-row-max"),
        ({"positions": 1000}, "^positions: 1000 are wanted, and the text has 90 in windows of 32"),
        ({"context": 3}, "^context: 3 is out of range"),
    ):
        with pytest.raises(RequestError, match=message):
            _ = replace(experiment(), **changes).evaluations
    with pytest.raises(RequestError, match=r"^model: .* is 48 wide, .* no multiple of 32"):
        Quantized.of({"w": normal(2, 48)}, ["w"], "q4_0")
    for kind in ("int4", "int4-row"):
        with pytest.raises(QuantizationError, match=r"^w: int4: "):
            Quantized.of({"w": normal(2, 32) * np.float32(1e9)}, ["w"], kind)
    with pytest.raises(RequestError, match="stores its experts as one tensor"):
        list(projections(experiment("families/gpt-oss").base))
