"""Formats of weights, against gguf's own and by their norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.blocks import BlockType, dequantize_blocks, read_blocks
from reference.measure.formats import Quantized, projections, quantize_q4_0, quantize_q8_0
from reference.model import load_model
from reference.quantization import dequantize, quantize_int4
from tests.reference.measure.formats import FIXTURES, experiment, normal


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
