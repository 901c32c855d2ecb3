"""Linear layers in each mode and arithmetic, against their formulas (SPEC 5.5, 10.1)."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from reference.arithmetic import Aligned, matmul, one_nan
from reference.config import parse_config
from reference.errors import QuantizationError, RequestError
from reference.loading import load_folder
from reference.model import build_model, load_model
from reference.quantization import (
    dequantize,
    linear_int4,
    quantize_int4,
    quantize_int4_row,
    quantize_int8,
)
from reference.threads import ROWS
from reference.weights import (
    Arithmetic,
    ExactInt4Linear,
    ExactLinear,
    GatedMLP,
    Mode,
    PlainInt4Linear,
    PlainLinear,
    Weights,
    add,
    linear,
    prepare,
)
from tests.oracle import nasty
from tests.oracle.arrays import Float32, assert_bits, assert_same, bits, f32
from tests.reference.loading.folders import (
    LLAMA,
    QWEN2,
    QWEN3,
    random_tensors,
    with_keys,
    write_folder,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

MODES: tuple[Mode, ...] = get_args(Mode)
ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)
SHAPES = [(1, 1, 1), (3, 40, 31), (5, 7, 64), (2, 33, 100), (17, 12, 65)]


def normal(seed: int, *shape: int) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def direct(x: Float32, w: Float32, mode: Mode, arithmetic: Arithmetic) -> Float32:
    """SPEC 10.1's table, and SPEC 1.4's plain float32 on the same weights and codes."""
    if mode in ("float32", "native"):  # a matrix of float32 has no codes of its own
        return matmul(x, w) if arithmetic == "exact" else x @ w.T
    matrix = quantize_int4(w) if mode == "int4" else quantize_int4_row(w, search=True)
    if arithmetic == "exact":
        return linear_int4(x, matrix)
    codes, scale = quantize_int8(x)
    return (codes.astype(np.float32) @ dequantize(matrix).T) * scale[:, None]


@pytest.mark.parametrize(("mode", "arithmetic"), list(product(MODES, ARITHMETICS)))
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_its_formula(
    mode: Mode, arithmetic: Arithmetic, rows: int, outputs: int, inputs: int, biased: bool
) -> None:
    x, w, bias = normal(1, rows, inputs), normal(2, outputs, inputs), normal(3, outputs)
    y = linear(w, bias if biased else None, mode, arithmetic)(x)
    expected = direct(x, w, mode, arithmetic)
    expected = expected + bias if biased else expected
    if arithmetic == "exact" or mode in ("int4", "int4-row"):
        assert_same(y, expected)
    else:  # in whatever order: each of two orders is within K roundings of the sum
        roundings = 2 * (inputs + 1) * np.float64(2.0**-24)
        assert (np.abs(y - expected) <= roundings * (np.abs(x) @ np.abs(w).T + np.abs(bias))).all()


def test_each_mode_and_arithmetic_has_its_own_layer() -> None:
    w = normal(1, 4, 32)
    kinds = {(m, a): type(linear(w, None, m, a)) for m, a in product(MODES, ARITHMETICS)}
    assert kinds == {
        ("float32", "exact"): ExactLinear,
        ("float32", "float32"): PlainLinear,
        ("native", "exact"): ExactLinear,
        ("native", "float32"): PlainLinear,
        ("int4", "exact"): ExactInt4Linear,
        ("int4", "float32"): PlainInt4Linear,
        ("int4-row", "exact"): ExactInt4Linear,
        ("int4-row", "float32"): PlainInt4Linear,
    }


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("outputs", [1, 2, 7, 64])
@pytest.mark.parametrize("rows", [2, 2 * ROWS])
def test_plain_linear_shares_out_its_columns(
    threads: int, outputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reference.weights.thread_count", lambda: threads)
    monkeypatch.setattr("reference.weights.WIDE", 0)
    x, w, bias = normal(1, rows, 33), normal(2, outputs, 33), normal(3, outputs)
    real = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    np.testing.assert_allclose(PlainLinear(w, bias)(x), real, rtol=0, atol=1e-4)


def test_exact_linear_on_hard_numbers() -> None:
    rng = np.random.default_rng(4)
    x, w = nasty.matrix(rng, 40, 70), nasty.matrix(rng, 30, 70)
    assert_same(linear(w, None, "float32", "exact")(x), matmul(x, w))


@pytest.mark.parametrize("mode", MODES)
def test_rows_do_not_depend_on_their_neighbours(mode: Mode) -> None:
    x, layer = normal(1, 70, 65), linear(normal(2, 33, 65), normal(3, 33), mode, "exact")
    y = layer(x)
    for row in (0, 1, 31, 69):
        assert_same(layer(x[row : row + 1])[0], y[row])
    assert_same(layer(x[::-1])[::-1], y)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_fused_layer_is_its_parts(mode: Mode, biased: bool) -> None:
    parts = [normal(seed, outputs, 65) for seed, outputs in enumerate((24, 8, 9))]
    biases = [normal(10 + len(w), len(w)) if biased else None for w in parts]
    whole = np.concatenate([b for b in biases if b is not None]) if biased else None
    x = normal(20, 6, 65)
    fused = linear(np.concatenate(parts), whole, mode, "exact")(x)
    separate = [linear(w, b, mode, "exact")(x) for w, b in zip(parts, biases, strict=True)]
    assert_same(fused, np.concatenate(separate, axis=1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_row_that_is_not_finite_is_nan_and_alone(mode: Mode, bad: float) -> None:
    x, layer = normal(1, 3, 40), linear(normal(2, 5, 40), normal(3, 5), mode, "exact")
    broken = x.copy()
    broken[1, 7] = bad
    y = layer(broken)
    assert set(bits(y[1])) == {0x7FC00000}
    assert_same(y[[0, 2]], layer(x)[[0, 2]])


# add


def test_add_rounds_once_and_has_one_nan() -> None:
    x = f32([1.0, 3e38, np.inf, -np.inf, -0.0, 2.0**-149])
    y = f32([2.0**-24, 3e38, -np.inf, -np.inf, -0.0, -(2.0**-149)])
    assert_bits(add(x, y), [1.0, np.inf, np.nan, -np.inf, -0.0, 0.0])
    assert add(x, None) is x
    kept = x.copy()
    other = np.array([0xFFC00001], np.uint32).view(np.float32)
    assert_bits(add(f32([1.0]), other), [np.nan])
    add(x, y)
    assert_same(x, kept, "the operand is not written to")


def test_bias_is_added_after_rounding() -> None:
    """RN32(RN32(y) + bias): 1 + 2^-25 rounds to 1 before the bias makes it small (SPEC 10.1)."""
    w, bias = f32([[1.0, 2.0**-13]]), f32([-1.0])
    x = f32([[1.0, 2.0**-12]])
    assert_bits(linear(w, bias, "float32", "exact")(x), [[0.0]])


# refusals


def test_scales_that_sum_too_high_are_refused_by_name() -> None:
    w = np.full((3, 64), 1.0, np.float32)
    w[1] = 7 * 8192
    for arithmetic in ARITHMETICS:
        with pytest.raises(QuantizationError, match=r"^some\.tensor: .*16384") as error:
            linear(w, None, "int4", arithmetic, "some.tensor")
        assert "\n" not in str(error.value)
    w[1, :32] = np.nextafter(np.float32(7 * 8188), np.float32(0))
    assert linear(w, None, "int4", "exact")(normal(1, 1, 64)).shape == (1, 3)


def test_one_scale_a_row_may_be_as_high_as_float16() -> None:
    w = np.full((3, 64), 7 * 65504, np.float32)
    assert np.isfinite(linear(w, None, "int4-row", "exact")(normal(1, 1, 64))).all()
    assert np.isfinite(linear(w[:, :32], None, "int4", "exact")(normal(1, 1, 32))).all()


@pytest.mark.parametrize("mode", ["int4", "int4-row"])
@pytest.mark.parametrize("weight", [np.inf, np.nan, 7 * 65520.0])
def test_weights_without_an_int4_form_are_refused(mode: Mode, weight: float) -> None:
    w = normal(1, 3, 40)
    w[2, 5] = weight
    with pytest.raises(QuantizationError):
        linear(w, None, mode, "exact")


def test_a_checkpoint_is_refused_under_the_name_of_its_projection(tmp_path: Path) -> None:
    raw = with_keys(LLAMA, hidden_size=64, head_dim=16)
    tensors = random_tensors(raw)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 0
    tensors["model.layers.1.self_attn.o_proj.weight"][3] = 7 * 9000
    write_folder(tmp_path, raw, tensors)
    with pytest.raises(QuantizationError, match=r"^model\.layers\.1\.self_attn\.o_proj"):
        load_model(tmp_path, "int4")
    load_model(tmp_path, "int4-row")
    load_model(tmp_path)


@pytest.mark.parametrize("weights", ["", "int8", "INT4", "int4_row", None, 4])
def test_unknown_weights_are_a_request_error(weights: Any, tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    with pytest.raises(RequestError, match=r"^weights: .*float32, int4, int4-row, native$"):
        build_model(load_folder(tmp_path), weights, "exact")


@pytest.mark.parametrize("arithmetic", ["", "float64", "Exact", None, 1])
def test_unknown_arithmetic_is_a_request_error(arithmetic: Any, tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    with pytest.raises(RequestError, match=r"^arithmetic: .*exact, float32$"):
        load_model(tmp_path, "float32", arithmetic)


# prepare


BIASED = with_keys(LLAMA, attention_bias=True, mlp_bias=True)
TIED = with_keys(QWEN3, tie_word_embeddings=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("raw", [LLAMA, BIASED, QWEN2, QWEN3, TIED])
def test_prepare_takes_every_tensor_to_its_place(raw: dict[str, Any], mode: Mode) -> None:
    config, tensors = parse_config(dict(raw), "config.json"), random_tensors(raw)
    ready = prepare(config, tensors, mode, "exact")
    assert len(ready.layers) == config.layers
    hidden, inner = config.hidden_size, config.intermediate_size
    seen = config.heads * config.head_dim
    for index, layer in enumerate(ready.layers):
        at = f"model.layers.{index}"

        def part(name: str, x: Float32, at: str = at) -> Float32:
            w, bias = tensors[f"{at}.{name}.weight"], tensors.get(f"{at}.{name}.bias")
            return linear(w, bias, mode, "exact")(x)

        x = normal(index, 3, hidden)
        qkv = [part(f"self_attn.{name}_proj", x) for name in "qkv"]
        assert_same(layer.qkv(x), np.concatenate(qkv, axis=1))
        both = [part(f"mlp.{name}_proj", x) for name in ("gate", "up")]
        assert isinstance(layer.mlp, GatedMLP)
        assert_same(layer.mlp.gate_up(x), np.concatenate(both, axis=1))
        wide, deep = normal(9, 2, seen), normal(8, 2, inner)
        assert_same(layer.output(wide), part("self_attn.o_proj", wide))
        assert_same(layer.mlp.down(deep), part("mlp.down_proj", deep))
        stored_norms = ("input_layernorm", "post_attention_layernorm")
        norms = (layer.norms.before_attention, layer.norms.before_mlp)
        for norm, name in zip(norms, stored_norms, strict=True):
            assert norm is not None
            assert_same(norm, tensors[f"{at}.{name}.weight"])
        assert (layer.norms.after_attention, layer.norms.after_mlp) == (None, None)
        for norm, name in ((layer.q_norm, "q_norm"), (layer.k_norm, "k_norm")):
            stored = tensors.get(f"{at}.self_attn.{name}.weight")
            assert (norm is None) == (stored is None)
            if norm is not None:
                assert_same(norm, stored)
    assert_same(ready.final_norm, tensors["model.norm.weight"])
    assert_same(ready.embedding, tensors["model.embed_tokens.weight"])
    check_head(ready, tensors["model.embed_tokens.weight" if config.tied else "lm_head.weight"])


def check_head(ready: Weights, stored: Any) -> None:
    """The head is never quantized (SPEC 10.1)."""
    assert isinstance(ready.head, ExactLinear)
    assert isinstance(ready.head.weight, Aligned)
    x = normal(7, 2, stored.shape[1])
    assert_same(ready.head(x), matmul(x, stored))


def test_plain_head_is_plain() -> None:
    ready = prepare(
        parse_config(dict(LLAMA), "config.json"), random_tensors(LLAMA), "int4", "float32"
    )
    assert isinstance(ready.head, PlainLinear)
    x = normal(7, 2, 16)
    assert_same(ready.head(x), one_nan(x @ ready.head.weight.T))
