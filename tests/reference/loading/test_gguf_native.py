"""GGUF files computed by their own codes: each projection against the oracle (SPEC 5.7, 10.1)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from conformance.cli import main
from conformance.rules.noise import spread
from reference.arithmetic import one_nan
from reference.blocks import BLOCK_BYTES
from reference.errors import QuantizationError, RequestError
from reference.model import Model, load_model
from reference.weights import ExactInt4Linear, ExactLinear, Experts, GatedMLP
from tests.oracle import nasty
from tests.oracle import quantization as oracle
from tests.oracle.arrays import Float32, assert_bits
from tests.reference.loading.folders import LLAMA, QWEN3, Arrays, random_tensors, with_keys
from tests.reference.loading.folders import write_folder as folder_of
from tests.reference.loading.gguf_files import add_byte_level, converted, finish, write_gguf, writer
from tests.reference.loading.test_gguf import GPT_OSS, SPARSE

WIDE = with_keys(LLAMA, hidden_size=64, intermediate_size=96, attention_bias=True)
TYPES = ("Q4_0", "Q8_0")


def x(width: int) -> Float32:
    return np.random.default_rng(5).standard_normal((6, width)).astype(np.float32)


def on_codes(w: Float32, kind: str, bias: Float32 | None = None) -> Any:
    """What the oracle makes of x and the blocks of w, in the order of its rows."""
    size = BLOCK_BYTES[kind]  # type: ignore[index]
    stored = quantize(w, GGMLQuantizationType[kind]).reshape(len(w), -1, size).tolist()
    y = [oracle.linear_blocks(row, stored, kind) for row in nasty.tolist(x(w.shape[1]))]
    exact = np.array(y, np.float32)
    return exact if bias is None else exact + bias


def write_mixed(
    path: Path, raw: Mapping[str, Any], tensors: Arrays, kind_of: Callable[[str], str]
) -> Path:
    """A file whose matrices have a type each, by the name of the tensor in the file."""
    out = writer(raw, path)
    for name, tensor in converted(raw, tensors).items():
        kind = GGMLQuantizationType[kind_of(name) if tensor.ndim > 1 else "F32"]
        wide = np.ascontiguousarray(tensor, np.float32)
        out.add_tensor(name, quantize(wide, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def joined(tensors: Arrays, at: str, names: tuple[str, ...], ending: str = "weight") -> Any:
    return np.concatenate([tensors[f"{at}.{name}.{ending}"] for name in names])


@pytest.mark.parametrize("kind", TYPES)
def test_projections_are_computed_by_their_codes(tmp_path: Path, kind: str) -> None:
    """Rows of q and k among them, which the file has in another order."""
    tensors = random_tensors(WIDE)
    file = write_gguf(tmp_path / "m.gguf", WIDE, tensors, GGMLQuantizationType[kind])
    model = load_model(file, "native")
    for index, layer in enumerate(model.weights.layers):
        at = f"model.layers.{index}"
        qkv = ("q_proj", "k_proj", "v_proj")
        bias = joined(tensors, f"{at}.self_attn", qkv, "bias")
        w = joined(tensors, f"{at}.self_attn", qkv)
        assert_bits(layer.qkv(x(64)), on_codes(w, kind, bias))
        w, bias = (tensors[f"{at}.self_attn.o_proj.{e}"] for e in ("weight", "bias"))
        assert_bits(layer.output(x(64)), on_codes(w, kind, bias))
        assert isinstance(layer.mlp, GatedMLP)
        w = joined(tensors, f"{at}.mlp", ("gate_proj", "up_proj"))
        assert_bits(layer.mlp.gate_up(x(64)), on_codes(w, kind))
        w = tensors[f"{at}.mlp.down_proj.weight"]
        assert_bits(layer.mlp.down(x(96)), on_codes(w, kind))
    assert isinstance(model.weights.head, ExactLinear)
    plain = load_model(file)
    assert model.weights.head(x(64)).tobytes() == plain.weights.head(x(64)).tobytes()
    assert model.digest != plain.digest
    near = load_model(file, "native", "float32")
    tokens = np.arange(20)
    exact = model.forward(tokens)
    assert np.abs(near.forward(tokens) - exact).max() < 1e-3 * np.abs(exact).max()
    assert model.forward(tokens[:7]).tobytes() == exact[:7].tobytes()


def test_each_projection_goes_by_its_own_type(tmp_path: Path) -> None:
    tensors = random_tensors(WIDE)
    types = {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "F32", "ffn_gate": "Q4_1"}
    types |= {"ffn_up": "Q8_0", "token_embd": "Q8_0", "output": "Q4_0", "attn_output": "F16"}

    def kind_of(name: str) -> str:
        return types.get(name.removesuffix(".weight").rpartition(".")[2], "Q4_0")

    file = write_mixed(tmp_path / "m.gguf", WIDE, tensors, kind_of)
    layers = {m: load_model(file, m).weights.layers[1] for m in ("native", "float32")}
    at = "model.layers.1.self_attn"
    q, k, v = np.split(layers["native"].qkv(x(64)), [64, 96], axis=1)
    for y, name, kind in ((q, "q_proj", "Q4_0"), (k, "k_proj", "Q8_0")):
        w, bias = tensors[f"{at}.{name}.weight"], tensors[f"{at}.{name}.bias"]
        assert_bits(np.ascontiguousarray(y), on_codes(w, kind, bias))
    other = layers["float32"]
    assert np.array_equal(v, other.qkv(x(64))[:, 96:])
    assert np.array_equal(layers["native"].output(x(64)), other.output(x(64)))
    native, plain = layers["native"].mlp, other.mlp
    assert isinstance(native, GatedMLP)
    assert isinstance(plain, GatedMLP)
    gate, up = np.split(native.gate_up(x(64)), 2, axis=1)
    assert np.array_equal(gate, plain.gate_up(x(64))[:, :96])
    w = tensors["model.layers.1.mlp.up_proj.weight"]
    assert_bits(np.ascontiguousarray(up), on_codes(w, "Q8_0"))


@pytest.mark.parametrize("kind", TYPES)
def test_experts_are_computed_by_their_codes_and_routers_are_not(tmp_path: Path, kind: str) -> None:
    raw = with_keys(
        QWEN3,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=64,
        use_sliding_window=False,
        max_window_layers=...,
        norm_topk_prob=True,
        **{**SPARSE, "moe_intermediate_size": 32},
    )
    tensors = random_tensors(raw)
    file = write_gguf(tmp_path / "m.gguf", raw, tensors, GGMLQuantizationType[kind])
    layer = load_model(file, "native").weights.layers[1].mlp
    assert isinstance(layer, Experts)
    assert isinstance(layer.logits, ExactLinear)
    for expert, mlp in enumerate(layer.experts):
        at = f"model.layers.1.mlp.experts.{expert}"
        w = joined(tensors, at, ("gate_proj", "up_proj"))
        assert_bits(mlp.gate_up(x(64)), on_codes(w, kind))
        assert_bits(mlp.down(x(32)), on_codes(tensors[f"{at}.down_proj.weight"], kind))


def test_experts_of_mxfp4_are_the_folder_of_their_values(tmp_path: Path) -> None:
    """As gpt-oss is distributed: experts in MXFP4, transposed and apart, the rest in Q8_0."""
    raw = with_keys(GPT_OSS, hidden_size=64, intermediate_size=32)
    tensors = random_tensors(raw)

    def kind_of(name: str) -> str:
        if name.endswith("bias"):
            return "F32"
        return "MXFP4" if "_exps" in name else "F32" if "gate_inp" in name else "Q8_0"

    file = write_mixed(tmp_path / "m.gguf", raw, tensors, kind_of)

    def valued(name: str, w: Any) -> Any:
        if w.ndim < 2 or name.endswith("bias") or ".router." in name:
            return w
        if w.ndim == 2:
            q8 = GGMLQuantizationType.Q8_0
            return dequantize(quantize(w, q8), q8)
        if name.endswith("_bias"):
            return w
        mx, rows = GGMLQuantizationType.MXFP4, np.ascontiguousarray(np.swapaxes(w, 1, 2))
        return np.ascontiguousarray(np.swapaxes(dequantize(quantize(rows, mx), mx), 1, 2))

    folder_of(tmp_path, raw, {name: valued(name, w) for name, w in tensors.items()})
    one, other = load_model(tmp_path), load_model(file)
    assert one.digest == other.digest
    tokens = np.arange(20)
    assert one.forward(tokens).tobytes() == other.forward(tokens).tobytes()
    native = load_model(file, "native").weights.layers[0]
    w = joined(tensors, "model.layers.0.self_attn", ("q_proj", "k_proj", "v_proj"))
    bias = joined(tensors, "model.layers.0.self_attn", ("q_proj", "k_proj", "v_proj"), "bias")
    assert_bits(native.qkv(x(64)), on_codes(w, "Q8_0", bias))
    assert isinstance(native.mlp, Experts)
    assert not isinstance(native.mlp.experts[0].down, ExactInt4Linear)


# ---------------------------------------------------------------------------------- what is refused


def broken(path: Path, kind: str, scale: float) -> Path:
    """A file in which one row of one tensor has scales of this size."""
    tensors = converted(WIDE, random_tensors(WIDE))
    type_, size = GGMLQuantizationType[kind], BLOCK_BYTES[kind]  # type: ignore[index]
    out = writer(WIDE, path)
    for name, tensor in tensors.items():
        wide = np.ascontiguousarray(tensor, np.float32)
        if wide.ndim < 2:
            out.add_tensor(name, wide)
            continue
        stored = quantize(wide, type_)
        if name == "blk.1.ffn_down.weight":
            blocks = stored.reshape(len(wide), -1, size)
            blocks[5, :, :2] = np.array([scale], "<f2").view(np.uint8)
        out.add_tensor(name, stored, raw_dtype=type_)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.mark.parametrize(
    ("kind", "scale", "sum_"), [("Q4_0", -6000.0, "18000"), ("Q8_0", 400.0, "1200")]
)
def test_scales_whose_sums_are_not_exact_are_refused(
    tmp_path: Path, kind: str, scale: float, sum_: str
) -> None:
    file = broken(tmp_path / "m.gguf", kind, scale)
    said = rf"model\.layers\.1\.mlp\.down_proj\.weight: the {kind} scales of a row sum up to {sum_}"
    with pytest.raises(QuantizationError, match=said):
        load_model(file, "native")
    load_model(file)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, kind: str, scale: float) -> None:
    file = broken(tmp_path / "m.gguf", kind, scale)
    said = rf"model\.layers\.1\.mlp\.down_proj\.weight: a {kind} scale is infinite or NaN"
    with pytest.raises(QuantizationError, match=said):
        load_model(file, "native")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q5_0", "folder"])
def test_what_has_no_native_form_is_refused(tmp_path: Path, kind: str) -> None:
    tensors = folder_of(tmp_path, WIDE)
    path = tmp_path
    if kind != "folder":
        path = write_gguf(tmp_path / "m.gguf", WIDE, tensors, GGMLQuantizationType[kind])
    with pytest.raises(RequestError, match="stores no projection as Q4_0 or Q8_0, so that there"):
        load_model(path, "native")


def test_commands_take_native_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixture = Path(__file__).parents[3] / "fixtures" / "tiny-draft"
    raw = json.loads((fixture / "config.json").read_text())
    out = writer(raw, tmp_path / "m.gguf")
    add_byte_level(out, fixture / "tokenizer.json", "gpt-2")
    tensors = converted(raw, load_file(fixture / "model.safetensors"))
    finish(out, tensors, GGMLQuantizationType.Q8_0)
    common = ["--weights", "native", "--prompt", "In the beginning", "-n", "4"]
    assert main(["generate", "--model", str(tmp_path / "m.gguf"), *common]) == 0
    assert capsys.readouterr().out
    assert main(["generate", "--model", str(fixture), *common]) == 2
    assert "stores no projection as Q4_0 or Q8_0" in capsys.readouterr().err


@pytest.mark.parametrize("kind", TYPES)
def test_layers_one_at_a_time_have_the_same_bits(tmp_path: Path, kind: str) -> None:
    """In a given memory, where a layer's codes are read when it is entered (SPEC 12.3)."""
    type_ = GGMLQuantizationType[kind]
    file = write_gguf(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), type_)
    tokens = np.arange(20)
    whole = load_model(file, "native").forward(tokens)
    assert load_model(file, "native", memory="4GiB").forward(tokens).tobytes() == whole.tobytes()


def test_gauges_of_a_whole_model_take_native_weights(tmp_path: Path) -> None:
    """Goldens of one's own have a bound by these (SPEC 15.4, 16.5)."""
    file = write_gguf(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), GGMLQuantizationType.Q8_0)
    model = load_model(file, "native")
    size = spread(model, "a name", np.arange(6), 2)
    assert np.isfinite(size).all()
    assert (size > 0).all()


def test_rows_keep_their_bits_in_a_whole_model(tmp_path: Path) -> None:
    """Prefill, chunks and decode."""
    file = write_gguf(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), GGMLQuantizationType.Q4_0)
    model: Model = load_model(file, "native")
    tokens = np.arange(24) * 5 % 32
    whole, cache = model.forward(tokens), model.new_cache()
    for part in (tokens[:9], tokens[9:10], tokens[10:]):
        start = cache.length
        y = model.forward(part, cache)
        assert y.tobytes() == one_nan(whole[start : start + len(part)]).tobytes()
    assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q4_0] == (32, BLOCK_BYTES["Q4_0"])
