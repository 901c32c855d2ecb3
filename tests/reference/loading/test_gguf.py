"""GGUF files: the bits of the folder they came from, their metadata, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

from conformance.cli import main
from reference.errors import BitforbitError, ConfigError, WeightsError
from reference.loading import load_gguf
from reference.loading.gguf.file import GGUFFile
from reference.model import load_model
from reference.rotary import RopeParameters, rope_constants
from tests.reference.loading.folders import LLAMA, QWEN2, QWEN3, random_tensors, with_keys
from tests.reference.loading.folders import write_folder as folder_of
from tests.reference.loading.gguf_files import add_byte_level, converted, finish, write_gguf, writer
from tests.reference.refusals import told

PLAIN_QWEN2 = with_keys(QWEN2, use_sliding_window=False)
PLAIN_QWEN3 = with_keys(QWEN3, use_sliding_window=False)
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SPARSE |= {"decoder_sparse_step": 1}
GEMMA: dict[str, Any] = with_keys(
    LLAMA,
    hidden_act=...,
    hidden_activation="gelu_pytorch_tanh",
    head_dim=6,
    query_pre_attn_scalar=6,
    sliding_window=8,
    num_hidden_layers=7,
    tie_word_embeddings=True,
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

SMOLLM3: Mapping[str, Any] = with_keys(
    LLAMA,
    architectures=["SmolLM3ForCausalLM"],
    model_type="smollm3",
    num_hidden_layers=5,
    tie_word_embeddings=False,
    use_sliding_window=False,
    no_rope_layer_interval=4,
)
OLMO3: Mapping[str, Any] = with_keys(
    LLAMA,
    architectures=["Olmo3ForCausalLM"],
    model_type="olmo3",
    num_hidden_layers=6,
    sliding_window=8,
)
AS_OLMO2 = with_keys(
    OLMO3, architectures=["Olmo2ForCausalLM"], model_type="olmo2", sliding_window=...
)
GPT_OSS: Mapping[str, Any] = with_keys(
    LLAMA,
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    num_hidden_layers=3,
    head_dim=8,
    attention_bias=True,
    sliding_window=8,
    swiglu_limit=7.0,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_theta=150000.0,
    rope_scaling={**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
)

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": with_keys(LLAMA, tie_word_embeddings=True),
    "llama, biases": with_keys(LLAMA, attention_bias=True, mlp_bias=True),
    "llama, wide heads": with_keys(LLAMA, head_dim=10),
    "llama, linear": with_keys(LLAMA, rope_scaling={"rope_type": "linear", "factor": 2.5}),
    "llama, yarn": with_keys(LLAMA, rope_scaling=YARN),
    "llama, yarn, betas": with_keys(
        LLAMA, rope_scaling={**YARN, "beta_fast": 3.5, "beta_slow": 0.2}
    ),
    "llama, epsilon": with_keys(LLAMA, rms_norm_eps=1e-6, rope_theta=500000.0),
    "qwen2": PLAIN_QWEN2,
    "qwen3": PLAIN_QWEN3,
    "qwen3, biases": with_keys(PLAIN_QWEN3, attention_bias=True),
    "qwen2moe": with_keys(
        PLAIN_QWEN2,
        architectures=["Qwen2MoeForCausalLM"],
        model_type="qwen2_moe",
        norm_topk_prob=False,
        shared_expert_intermediate_size=20,
        max_window_layers=...,
        **SPARSE,
    ),
    "qwen3moe": with_keys(
        PLAIN_QWEN3,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        norm_topk_prob=True,
        max_window_layers=...,
        **SPARSE,
    ),
    "olmoe": with_keys(
        LLAMA,
        architectures=["OlmoeForCausalLM"],
        model_type="olmoe",
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    ),
    "olmo2": with_keys(LLAMA, architectures=["Olmo2ForCausalLM"], model_type="olmo2"),
    "mixtral": with_keys(
        LLAMA,
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "phi3": with_keys(
        LLAMA, architectures=["Phi3ForCausalLM"], model_type="phi3", sliding_window=8
    ),
    "phi3, no window": with_keys(
        LLAMA, architectures=["Phi3ForCausalLM"], model_type="phi3", sliding_window=None
    ),
    "phi3, part of a head": with_keys(
        LLAMA,
        architectures=["Phi3ForCausalLM"],
        model_type="phi3",
        sliding_window=None,
        partial_rotary_factor=0.5,
    ),
    "gemma2": with_keys(
        GEMMA,
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3": with_keys(
        GEMMA,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window_pattern=6,
        rope_local_base_freq=10000.0,
        rope_theta=1000000.0,
    ),
    "smollm3": with_keys(SMOLLM3),
    "smollm3, tied, biases": with_keys(
        SMOLLM3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "olmo3": OLMO3,
    "olmo3, yarn": with_keys(OLMO3, rope_scaling={**YARN, "attention_factor": 1.25}),
    "olmo3, listed": with_keys(OLMO3, layer_types=["full_attention"] + ["sliding_attention"] * 5),
    "mellum": with_keys(
        PLAIN_QWEN3,
        architectures=["MellumForCausalLM"],
        model_type="mellum",
        norm_topk_prob=True,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse"] * 3,
        rope_theta=...,
        rope_parameters={
            "full_attention": {**YARN, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        max_window_layers=...,
        use_sliding_window=...,
    ),
    "gpt-oss": GPT_OSS,
    "gpt-oss, no scaling, no biases": with_keys(GPT_OSS, rope_scaling=None, attention_bias=False),
}


def assert_same_bits(folder: Path, file: Path) -> None:
    """The same configuration and prepared weights, and the same bits of logits."""
    one, other = load_model(folder), load_model(file)
    assert one.config == other.config
    assert one.digest == other.digest
    tokens = np.arange(20) * 7 % 32
    assert one.forward(tokens).tobytes() == other.forward(tokens).tobytes()


@pytest.mark.parametrize("raw", FAMILIES.values(), ids=FAMILIES)
def test_a_float32_file_has_the_bits_of_its_folder(tmp_path: Path, raw: Mapping[str, Any]) -> None:
    tensors = folder_of(tmp_path, raw)
    assert_same_bits(tmp_path, write_gguf(tmp_path / "model.gguf", raw, tensors))


def test_an_attention_factor_may_be_rounded(tmp_path: Path) -> None:
    """To the float32 that the file has room for, which is what rope uses."""
    raw = with_keys(OLMO3, rope_scaling={**YARN, "attention_factor": 1.2079441541679836})
    file = write_gguf(tmp_path / "model.gguf", raw, folder_of(tmp_path, raw))
    one, other = load_model(tmp_path), load_model(file)
    tokens = np.arange(20)
    assert one.forward(tokens).tobytes() == other.forward(tokens).tobytes()


@pytest.mark.parametrize("factors", [{"attn_factor": 1.5}, {"yarn_attn_factor": 1.5}])
def test_yarn_has_its_attention_factor_under_either_name(
    tmp_path: Path, factors: Mapping[str, float]
) -> None:
    raw = with_keys(LLAMA, rope_scaling=YARN)
    out = writer(raw, tmp_path / "model.gguf")
    for key, value in factors.items():
        out.add_float32(f"llama.rope.scaling.{key}", value)
    finish(out, converted(raw, random_tensors(raw)))
    assert load_gguf(tmp_path / "model.gguf").config.rope.attention_factor == 1.5


def test_two_attention_factors_are_refused(tmp_path: Path) -> None:
    raw = with_keys(LLAMA, rope_scaling=YARN)
    out = writer(raw, tmp_path / "model.gguf")
    out.add_rope_scaling_attn_factors(1.5)
    out.add_rope_scaling_yarn_attn_factor(1.25)
    finish(out, converted(raw, random_tensors(raw)))
    with pytest.raises(ConfigError, match=r"llama\.rope\.scaling\.yarn_attn_factor is 1.25"):
        load_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [(None, "wwwfww"), (3, "wwfwwf"), ([True, False] * 3, "wfwfwf"), ([False] * 6, "ffffff")],
)
def test_layers_with_a_window_are_listed_or_take_turns(
    tmp_path: Path, pattern: Any, layers: str
) -> None:
    out = writer(AS_OLMO2, tmp_path / "model.gguf")
    out.add_sliding_window(8)
    if pattern is not None:
        out.add_sliding_window_pattern(pattern)
    finish(out, converted(OLMO3, random_tensors(OLMO3)))
    windows = load_gguf(tmp_path / "model.gguf").config.windows
    assert "".join("f" if window is None else "w" for window in windows) == layers


@pytest.mark.parametrize("pattern", [0, -1, 2.5, [1, 0, 1, 0, 1, 0], "every", [True] * 5])
def test_other_patterns_are_refused(tmp_path: Path, pattern: Any) -> None:
    out = writer(AS_OLMO2, tmp_path / "model.gguf")
    out.add_sliding_window(8)
    key = "olmo2.attention.sliding_window_pattern"
    add: dict[type, Callable[[str, Any], None]] = {
        int: out.add_int32,
        float: out.add_float32,
        str: out.add_string,
        list: out.add_array,
    }
    add[type(pattern)](key, pattern)
    finish(out, converted(OLMO3, random_tensors(OLMO3)))
    with pytest.raises(ConfigError, match=r"sliding_window_pattern' is|layer_types is"):
        load_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_files_have_the_bits_of_their_folders(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors(LLAMA, kind)
    # Converters keep norms in float32; their values are the same.
    folder_of(tmp_path, LLAMA, tensors)
    file = write_gguf(tmp_path / "model.gguf", LLAMA, tensors, GGMLQuantizationType[kind])
    assert_same_bits(tmp_path, file)
    assert load_gguf(file).digest == load_gguf(str(file)).digest


def rope_factors(raw: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The divisors of inv_freq that a converter writes for llama3, in float64 and rounded."""
    dim, theta, scaling = raw["head_dim"], raw["rope_theta"], raw["rope_scaling"]
    found = []
    for i in range(dim // 2):
        length = 2 * np.pi * theta ** (2 * i / dim)
        old = scaling["original_max_position_embeddings"]
        smooth = (old / length - 1.0) / 3.0
        between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        found.append(1.0 if length < old / 4 else scaling["factor"] if length > old else between)
    return np.array(found, np.float32)


@pytest.mark.parametrize("old", [64, 256, 1024, 8192])
@pytest.mark.parametrize("factor", [8.0, 32.0, 3.3])
def test_llama3_scaling_is_found_in_its_factors(tmp_path: Path, old: int, factor: float) -> None:
    scaling = {**LLAMA3, "factor": factor, "original_max_position_embeddings": old}
    raw = with_keys(LLAMA, head_dim=32, rope_theta=500000.0, rope_scaling=scaling)
    tensors = folder_of(tmp_path, raw)
    factors = rope_factors(raw)
    more = {"rope_freqs.weight": factors}
    file = write_gguf(tmp_path / "model.gguf", raw, tensors, more=more)
    one, other = load_model(tmp_path), load_model(file)
    assert one.config == other.config
    assert one.digest == other.digest
    plain = rope_constants(RopeParameters("default", 500000.0, 32))[0]
    np.testing.assert_allclose(plain / factors, rope_constants(other.config.rope)[0], rtol=1e-6)
    with pytest.raises(ConfigError, match="holds no llama3 scaling with low_freq_factor 1 and"):
        load_gguf(
            write_gguf(
                tmp_path / "a.gguf",
                raw,
                tensors,
                more=more
                | {"rope_freqs.weight": factors * np.linspace(1, 1.1, 16, dtype=np.float32)},
            )
        )
    ones = {"rope_freqs.weight": np.ones(16, np.float32)}
    assert (
        load_gguf(write_gguf(tmp_path / "b.gguf", raw, tensors, more=ones)).config.rope.kind
        == "default"
    )


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-45, 1e-38, 3e38])
@pytest.mark.parametrize("where", ["everywhere", "first"])
def test_divisors_that_no_scaling_has_are_refused(tmp_path: Path, value: float, where: str) -> None:
    factors = np.ones(2, np.float32)
    factors[: 1 if where == "first" else None] = value
    text = refusal(tmp_path, lambda out: None, {"rope_freqs.weight": factors})
    assert "holds no llama3 scaling with low_freq_factor 1 and" in text


def test_tensors_are_read_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    read = GGUFFile.read

    def counted(self: GGUFFile, name: str, index: int | None = None) -> Any:
        asked.append(name)
        return read(self, name, index)

    monkeypatch.setattr(GGUFFile, "read", counted)
    file = write_gguf(tmp_path / "model.gguf", LLAMA, random_tensors(LLAMA))
    checkpoint = load_gguf(file)
    assert asked == []
    assert "lm_head.weight" in checkpoint.tensors
    assert "other" not in checkpoint.tensors
    assert checkpoint.tensors.get("other") is None
    assert len(checkpoint.tensors) == 21
    assert asked == []
    tensor = checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"]
    assert asked == ["blk.1.attn_q.weight"]
    assert not tensor.flags.writeable
    os.truncate(file, file.stat().st_size - 64)
    with pytest.raises(WeightsError, match="became shorter while it was read; fetch or convert"):
        dict(checkpoint.tensors)
    file.unlink()
    with pytest.raises(WeightsError, match="No such file"):
        checkpoint.tensors["model.norm.weight"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, bad: float) -> None:
    tensors = random_tensors(LLAMA)
    tensors["model.layers.0.mlp.up_proj.weight"][1, 2] = bad
    file = write_gguf(tmp_path / "model.gguf", LLAMA, tensors)
    with pytest.raises(WeightsError, match=r"'blk\.0\.ffn_up\.weight' holds a NaN or an infinity"):
        load_model(file)


def test_gemma_norms_that_no_addition_gives_are_refused(tmp_path: Path) -> None:
    raw = FAMILIES["gemma3"]
    tensors = converted(raw, random_tensors(raw))
    tensors["output_norm.weight"][3] = 1e-9
    finish(writer(raw, tmp_path / "model.gguf"), tensors)
    checkpoint = load_gguf(tmp_path / "model.gguf")
    with pytest.raises(
        WeightsError, match=r"'output_norm.weight' holds what is not 1 \+ w for any"
    ):
        checkpoint.tensors["model.norm.weight"]


def test_the_command_generates_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixture = Path(__file__).parents[3] / "fixtures" / "tiny-draft"
    raw = json.loads((fixture / "config.json").read_text())
    out = writer(raw, tmp_path / "model.gguf")
    add_byte_level(out, fixture / "tokenizer.json", "gpt-2")
    finish(out, converted(raw, load_file(fixture / "model.safetensors")))
    texts = []
    for model in (str(fixture), str(tmp_path / "model.gguf")):
        main(["generate", "--model", model, "--prompt", "In the beginning", "-n", "8"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


# ---------------------------------------------------------------------------------- what is refused

Change = Callable[[GGUFWriter], object]


def refusal(folder: Path, change: Change, more: Mapping[str, Any] | None = None) -> str:
    """Text of the error for a miniature whose metadata or tensors were changed."""
    out = writer(LLAMA, folder / "model.gguf")
    change(out)
    finish(out, {**converted(LLAMA, random_tensors(LLAMA)), **(more or {})})
    with pytest.raises(BitforbitError) as caught:
        load_gguf(folder / "model.gguf")
    return told(caught, f"{folder / 'model.gguf'}: ")


def replaced(key: str, value: Any) -> Change:
    """A change of one value, of the same type or of another."""

    def change(out: GGUFWriter) -> None:
        out.kv_data[0].pop(key, None)
        if isinstance(value, str):
            out.add_string(key, value)
        elif isinstance(value, bool):
            out.add_bool(key, value)
        elif isinstance(value, int):
            out.add_uint64(key, value)
        elif isinstance(value, float):
            out.add_float32(key, value)
        elif value is not None:
            out.add_array(key, value)

    return change


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("general.architecture", "rwkv6", "general.architecture is 'rwkv6'; supported are llama"),
        ("general.architecture", 3, "general.architecture is 3; supported are llama"),
        ("general.alignment", 24, "general.alignment is 24; it must be a power of two"),
        ("general.alignment", "32", "general.alignment is '32'; it must be a power of two"),
        ("split.count", 2, "split.count is 2: split files are not supported; merge the parts"),
        ("llama.block_count", None, "llama.block_count is missing; add it"),
        ("llama.block_count", "2", "'llama.block_count' is '2'; give an integer"),
        ("llama.block_count", 2**63, "'llama.block_count' is 9223372036854775808; give an integer"),
        ("llama.block_count", 3, "'blk.2.attn_norm.weight', expected with shape [16]"),
        ("llama.block_count", 1, "tensor 'blk.1.attn_norm.weight' of shape [16] is not expected"),
        ("llama.block_count", 10000, "there is no tensor 'blk.2.attn_norm.weight', expected"),
        ("llama.attention.head_count", 0, "'llama.attention.head_count' is 0; give an integer"),
        ("llama.attention.head_count", 3, "'llama.attention.head_count' is 3; it must divide"),
        ("llama.attention.head_count", "4", "'llama.attention.head_count' is '4'; give an integer"),
        ("llama.attention.head_count", 2.0, "'llama.attention.head_count' is 2.0; give an integer"),
        (
            "llama.attention.head_count_kv",
            [1, 2],
            "'llama.attention.head_count_kv' is [1, 2]; give an",
        ),
        ("llama.attention.head_count_kv", 4, "'blk.0.attn_k.weight' has shape [8, 16], expected"),
        ("llama.embedding_length", 24, "only 6, a whole head, is supported"),
        ("llama.feed_forward_length", 25, "'blk.0.ffn_gate.weight' has shape [24, 16], expected"),
        ("llama.vocab_size", 31, "contradicts the 32 rows of token_embd.weight"),
        ("llama.rope.freq_base", None, "llama.rope.freq_base is missing; add it"),
        ("llama.rope.freq_base", "high", "'llama.rope.freq_base' is 'high'; give a finite number"),
        ("llama.rope.dimension_count", 2, "'llama.rope.dimension_count' is 2; only 4, a whole"),
        ("llama.rope.scaling.type", "longrope", "'llama.rope.scaling.type' is 'longrope'; supp"),
        ("llama.rope.scaling.type", "linear", "llama.rope.scaling.factor is missing"),
        ("llama.attention.value_length", 8, "llama.attention.value_length is 8, which contra"),
        ("llama.attention.clamp_kqv", 8.0, "'llama.attention.clamp_kqv' is 8.0; this key is not"),
        ("llama.expert_count", 8, "num_experts_per_tok is missing; add it"),
        ("tokenizer.ggml.eos_token_id", 32, "'tokenizer.ggml.eos_token_id' is 32; give an integer"),
        ("tokenizer.ggml.bos_token_id", "a", "'tokenizer.ggml.bos_token_id' is 'a'; give an int"),
    ],
)
def test_bad_metadata_is_named(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    assert expected in refusal(tmp_path, replaced(key, value))


def test_values_that_say_nothing_are_passed_over(tmp_path: Path) -> None:
    out = writer(LLAMA, tmp_path / "model.gguf")
    for key, value in (
        ("llama.expert_count", 0),
        ("llama.expert_used_count", 0),
        ("llama.attention.causal", True),
        ("llama.rope.scaling.type", "none"),
        ("split.count", 1),
        ("general.description", "a\nb"),
        ("general.tags", ["text"]),
        ("tokenizer.ggml.eos_token_id", 2),
        ("tokenizer.ggml.eot_token_id", 5),
        ("tokenizer.ggml.bos_token_id", 1),
    ):
        replaced(key, value)(out)
    finish(out, converted(LLAMA, random_tensors(LLAMA)))
    checkpoint = load_gguf(tmp_path / "model.gguf")
    assert checkpoint.eos_token_ids == (2, 5)
    assert checkpoint.tokenizer is None


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_any_alignment(tmp_path: Path, alignment: int) -> None:
    out = writer(LLAMA, tmp_path / "model.gguf")
    out.add_custom_alignment(alignment)
    finish(out, converted(LLAMA, folder_of(tmp_path, LLAMA)))
    assert_same_bits(tmp_path, tmp_path / "model.gguf")


def test_tensors_that_do_not_belong_are_named(tmp_path: Path) -> None:
    surplus = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    text = refusal(tmp_path, lambda out: None, surplus)
    assert "tensor 'blk.0.attn_sinks.weight' of shape [4] is not expected" in text
    text = refusal(tmp_path, lambda out: None, {"blk.0.attn_v.weight": np.ones((4, 32), "f4")})
    assert "'blk.0.attn_v.weight' has shape [4, 32], expected [8, 16]; check that" in text
    scaled = replaced("llama.rope.scaling.type", "linear")
    text = refusal(tmp_path, scaled, {"rope_freqs.weight": np.ones(2, np.float32)})
    assert "which contradicts the factors in rope_freqs.weight" in text


def test_experts_are_looked_for_no_further_than_the_file_has_them(tmp_path: Path) -> None:
    raw = FAMILIES["qwen3moe"]
    tensors = converted(raw, random_tensors(raw))
    for count, expected in (
        (500_000, "'blk.0.ffn_gate_inp.weight' has shape [4, 16], expected [500000, 16]"),
        (5, "'blk.0.ffn_gate_inp.weight' has shape [4, 16], expected [5, 16]"),
    ):
        out = writer(raw, tmp_path / "model.gguf")
        replaced("qwen3moe.expert_count", count)(out)
        finish(out, tensors)
        with pytest.raises(WeightsError) as caught:
            load_gguf(tmp_path / "model.gguf")
        assert expected in str(caught.value)
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][:3]
    finish(writer(raw, tmp_path / "model.gguf"), tensors)
    with pytest.raises(WeightsError, match=r"'blk\.1\.ffn_up_exps\.weight' holds 3 experts, and"):
        load_gguf(tmp_path / "model.gguf")
