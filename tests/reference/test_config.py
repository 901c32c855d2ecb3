"""Configurations: the same meaning as in transformers, and no key that is silently ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.config import ModelConfig, parse_config
from reference.errors import ConfigError
from reference.rotary import RopeParameters
from tests.reference.loading.folders import (
    FAMILIES,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    with_keys,
)
from tests.reference.refusals import told

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def parse(base: Mapping[str, Any], **changes: Any) -> ModelConfig:
    return parse_config(with_keys(base, **changes), "m/config.json")


def refusal(base: Mapping[str, Any], **changes: Any) -> str:
    """Text of the refusal: one line that names the file."""
    with pytest.raises(ConfigError) as caught:
        parse(base, **changes)
    return told(caught, "m/config.json: ")


# ---------------------------------------------------------------------------- as transformers does


def theirs(raw: Mapping[str, Any]) -> Any:
    kind = transformers.AutoConfig.for_model
    return kind(**{key: value for key, value in raw.items() if key != "architectures"})


def their_windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", ["sliding_attention"] * config.num_hidden_layers)
    return tuple(window if name == "sliding_attention" else None for name in types)


RENAMED = {"original_max_position_embeddings": "original_max_positions"}


def assert_same_rope(ours: RopeParameters, raw: dict[str, Any]) -> None:
    """Every value that transformers keeps has its place, and the other fields their defaults."""
    wanted = {RENAMED.get(key, key): value for key, value in raw.items() if value is not None}
    kind, theta = wanted.pop("rope_type"), wanted.pop("rope_theta")
    wanted.pop("partial_rotary_factor", None)
    wanted.pop("type", None)
    assert ours == RopeParameters(kind, theta, ours.rotary_dim, **wanted)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    raw = dict(FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))])
    heads, layers = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 6))
    raw["num_attention_heads"], raw["num_hidden_layers"] = heads, layers
    raw["num_key_value_heads"] = draw(st.sampled_from([h for h in (1, 2, 4, 8) if heads % h == 0]))
    if raw["model_type"] != "mistral" and draw(st.booleans()):
        raw["num_key_value_heads"] = None
    raw["head_dim"] = draw(st.sampled_from([4, 8]))
    if raw["model_type"] != "qwen3" and draw(st.booleans()):
        raw["head_dim"] = None
    raw["hidden_size"] = heads * draw(st.sampled_from([4, 6, 10]))
    raw["tie_word_embeddings"] = draw(st.booleans())
    raw["hidden_act"] = draw(st.sampled_from(["silu", "gelu_pytorch_tanh"]))
    if raw["model_type"] in ("llama", "qwen3"):
        raw["attention_bias"] = draw(st.booleans())
    if raw["model_type"] == "llama":
        raw["mlp_bias"] = draw(st.booleans())
    if raw["model_type"] in ("mistral", "qwen2", "qwen3"):
        raw["sliding_window"] = draw(st.sampled_from([None, 1, 8]))
    if raw["model_type"] in ("qwen2", "qwen3"):
        raw["use_sliding_window"] = draw(st.booleans())
        raw["max_window_layers"] = draw(st.integers(0, 7))
        if draw(st.booleans()):
            windowed = raw["use_sliding_window"] and raw["sliding_window"] is not None
            names = ["full_attention", "sliding_attention"] if windowed else ["full_attention"]
            types = st.lists(st.sampled_from(names), min_size=layers, max_size=layers)
            raw["layer_types"] = draw(types)
    return {**raw, **draw(ropes())}


@st.composite
def ropes(draw: st.DrawFn) -> dict[str, Any]:
    """Rope in either style, of every kind."""
    theta = draw(st.sampled_from([10000.0, 500000, 1e6]))
    factor = draw(st.sampled_from([1.0, 2, 4.0, 8.5]))
    number = st.sampled_from([0.5, 1.0, 2.0, 3])
    optional: dict[str, Any] = {
        "beta_fast": st.sampled_from([8, 32.0]),
        "beta_slow": st.sampled_from([1, 2.0]),
        "truncate": st.booleans(),
        "attention_factor": st.floats(0.5, 2.0),
        "mscale": number,
        "mscale_all_dim": number,
    }
    kinds: list[dict[str, Any]] = [
        {},
        {"rope_type": "linear", "factor": factor},
        {"rope_type": "dynamic", "factor": factor},
        {**LLAMA3, "factor": factor},
        {**YARN, "factor": factor},
    ]
    scaling = draw(st.sampled_from(kinds))
    if scaling.get("rope_type") == "yarn":
        scaling = {**scaling, **draw(st.fixed_dictionaries({}, optional=optional))}
    if draw(st.booleans()):
        new = {"rope_type": "default", **scaling, "rope_theta": theta}
        return {"rope_parameters": new, "rope_theta": ...}
    if scaling and draw(st.booleans()):
        scaling = {("type" if key == "rope_type" else key): v for key, v in scaling.items()}
    return {"rope_theta": theta, "rope_scaling": scaling or None}


@settings(max_examples=200)
@given(configurations())
def test_every_field_means_what_it_means_in_transformers(drawn: dict[str, Any]) -> None:
    raw = with_keys(drawn)
    them = theirs(raw)
    for written in (raw, {**them.to_dict(), "architectures": raw["architectures"]}):
        ours = parse_config(written, "m/config.json")
        assert ours.head_dim == (getattr(them, "head_dim", None) or them.hidden_size // ours.heads)
        assert (ours.heads, ours.kv_heads) == (them.num_attention_heads, them.num_key_value_heads)
        assert (ours.layers, ours.vocab_size) == (them.num_hidden_layers, them.vocab_size)
        assert ours.hidden_size == them.hidden_size
        assert ours.intermediate_size == them.intermediate_size
        assert ours.rms_norm_eps == them.rms_norm_eps
        assert ours.tied == them.tie_word_embeddings
        assert ours.windows == their_windows(them)
        assert ours.activation == {"gelu_pytorch_tanh": "gelu_tanh"}.get(them.hidden_act, "silu")
        assert ours.mlp_bias == getattr(them, "mlp_bias", False)
        assert ours.rope.rotary_dim == ours.head_dim
        rope = dict(them.rope_parameters)
        if rope["rope_type"] == "dynamic":
            rope["original_max_position_embeddings"] = them.max_position_embeddings
        assert_same_rope(ours.rope, rope)


@pytest.mark.parametrize(
    ("base", "bias", "expected"),
    [
        (LLAMA, False, (False, False, None)),
        (LLAMA, True, (True, True, None)),
        (MISTRAL, False, (False, False, None)),
        (QWEN2, False, (True, False, None)),
        (QWEN3, False, (False, False, "head")),
        (QWEN3, True, (True, True, "head")),
    ],
)
def test_biases_and_norms_by_family(
    base: dict[str, Any], bias: bool, expected: tuple[object, ...]
) -> None:
    config = parse(base, attention_bias=bias)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == expected


def test_llama_without_key_value_heads_has_one_per_query_head() -> None:
    assert parse(LLAMA, num_key_value_heads=...).kv_heads == 4


def test_context_of_dynamic_rope_grows_by_the_factor() -> None:
    assert parse(LLAMA).max_positions == 64
    dynamic = {"type": "dynamic", "factor": 2.5}
    assert parse(LLAMA, rope_scaling=dynamic).max_positions == 160
    dynamic["original_max_position_embeddings"] = 16
    config = parse(LLAMA, rope_scaling=dynamic)
    assert config.max_positions == 64
    assert config.rope.original_max_positions == 16
    assert parse(LLAMA, rope_scaling={"type": "linear", "factor": 2.5}).max_positions == 64


@pytest.mark.parametrize("place", ["top", "rope_parameters", "rope_scaling"])
def test_partial_rotary_factor_in_every_place(place: str) -> None:
    if place == "top":
        config = parse(LLAMA, partial_rotary_factor=0.5)
    elif place == "rope_parameters":
        new = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        config = parse(LLAMA, rope_theta=..., rope_parameters=new)
    else:
        old = {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
        config = parse(LLAMA, rope_scaling=old)
    assert config.rope.rotary_dim == 2


def test_both_styles_of_rope_may_say_the_same() -> None:
    old = {"type": "linear", "factor": 2, "rope_type": "linear", "finetuned": True}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000, "finetuned": True}
    assert parse(LLAMA, rope_scaling=old, rope_parameters=new).rope.factor == 2.0


def test_numbers_are_the_float64_of_their_text() -> None:
    config = parse(LLAMA, rms_norm_eps=1, rope_theta=2**53 + 1)
    assert type(config.rms_norm_eps) is float
    assert config.rope.theta == float(2**53)


def test_harmless_empty_and_private_keys_pass() -> None:
    parse(
        LLAMA,
        attention_dropout=0.1,
        torch_dtype="bfloat16",
        transformers_version="5.0",
        use_cache=True,
        pretraining_tp=1,
        quantization_config=None,
        auto_map={},
        use_mrope=False,
        sliding_window=None,
        _name_or_path="somewhere",
    )


# ------------------------------------------------------------------------------------- refusals

REQUIRED = [
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "hidden_act",
]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("absent", [..., None])
def test_a_missing_key_is_named(key: str, absent: object) -> None:
    assert f": {key} is missing; add it" in refusal(LLAMA, **{key: absent})


@pytest.mark.parametrize(
    ("base", "key"),
    [
        (MISTRAL, "num_key_value_heads"),
        (MISTRAL, "sliding_window"),
        (QWEN2, "num_key_value_heads"),
        (QWEN2, "sliding_window"),
        (QWEN2, "max_window_layers"),
        (QWEN3, "num_key_value_heads"),
        (QWEN3, "head_dim"),
    ],
)
def test_a_key_that_writers_default_differently_is_not_assumed(
    base: dict[str, Any], key: str
) -> None:
    assert f": {key} is missing; add it" in refusal(base, **{key: ...})


COUNTS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"]
COUNTS += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"]


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1, True, 4.0, "4", [4], {}, 10**400])
def test_a_size_is_a_positive_integer_within_reason(key: str, value: Any) -> None:
    text = refusal(LLAMA, **{key: value})
    assert f": {key} is " in text
    assert "; give an integer from 1 to " in text
    assert len(text) < 300


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1e-5, True, "1e-5", math.inf, math.nan, [], 10**400])
def test_a_number_is_positive_and_finite(key: str, value: Any) -> None:
    text = refusal(LLAMA, **{key: value})
    assert f": {key} is " in text
    assert "; give a " in text


@pytest.mark.parametrize(
    "key", ["attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"]
)
@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_a_flag_is_true_or_false(key: str, value: Any) -> None:
    base = QWEN2 if key == "use_sliding_window" else LLAMA
    assert f": {key} is {value!r}; give true or false" in refusal(base, **{key: value})


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (
            LLAMA,
            {"architectures": ["GemmaForCausalLM"]},
            "architectures is ['GemmaForCausalLM']; this family is not supported; of those that "
            "are, Gemma3ForCausalLM is the nearest by name",
        ),
        (LLAMA, {"architectures": "LlamaForCausalLM"}, "give a list of one of LlamaForCausalLM, "),
        (LLAMA, {"architectures": []}, "architectures is []; "),
        (LLAMA, {"architectures": [["LlamaForCausalLM"]]}, "architectures is [['Llama"),
        (
            LLAMA,
            {"model_type": "gemma"},
            "model_type is 'gemma', which contradicts the architecture",
        ),
        (
            LLAMA,
            {"hidden_act": "gelu"},
            "hidden_act is 'gelu'; supported are silu, gelu_pytorch_tanh",
        ),
        (
            LLAMA,
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3; it must divide num_attention",
        ),
        (
            LLAMA,
            {"num_attention_heads": 6},
            "num_attention_heads is 6; it must divide hidden_size, 16",
        ),
        (LLAMA, {"head_dim": 5}, "head_dim is 5; an even number of the 5 elements"),
        (LLAMA, {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75; an even number"),
        (LLAMA, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; an even number"),
        (LLAMA, {"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1; an even number"),
        (LLAMA, {"chunk_size_feed_forward": 2}, "chunk_size_feed_forward is 2; only 0 is support"),
        (LLAMA, {"chunk_size_feed_forward": False}, "chunk_size_feed_forward is False; only 0"),
        (
            LLAMA,
            {"quantization_config": {"bits": 4}},
            "quantization_config is {'bits': 4}; weights that are stored quantized are not read",
        ),
        (
            LLAMA,
            {"logit_scale": 0.5},
            "logit_scale is 0.5; this key is not supported; remove it if",
        ),
        (LLAMA, {"use_something": False}, "use_something is False; this key is not supported"),
        (LLAMA, {"use_something": {}}, "use_something is {}; this key is not supported"),
        (LLAMA, {"some key\n": 1}, "'some key\\n' is 1; this key is not supported"),
        (LLAMA, {"sliding_window": 8}, "sliding_window is 8; this key is not supported"),
        (LLAMA, {"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; this key"),
        (QWEN2, {"attention_bias": True}, "attention_bias is True; only false is supported"),
        (QWEN3, {"mlp_bias": True}, "mlp_bias is True; only false is supported"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window is 0; give an integer from 1"),
        (MISTRAL, {"sliding_window": 2.5}, "sliding_window is 2.5; give an integer from 1"),
        (QWEN2, {"max_window_layers": -1}, "max_window_layers is -1; give an integer from 0"),
        (QWEN2, {"layer_types": ["full_attention"]}, "give a list of 2 names, one a layer"),
        (QWEN2, {"layer_types": ["chunked_attention"] * 2}, "supported are full_attention and"),
        (QWEN2, {"layer_types": "full"}, "layer_types is 'full'; give a list of 2"),
        (
            QWEN2,
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "which contradicts the lack of a window in use; set sliding_window",
        ),
    ],
)
def test_what_is_contradictory_or_unsupported_is_named(
    base: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(base, **changes)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (
            {"rope_type": "su", "factor": 2.0},
            "rope_type is 'su'; supported are default, ",
        ),
        ({"type": "mrope", "mrope_section": [1, 1]}, "rope_type is 'mrope'; supported are"),
        ({"rope_type": ["yarn"]}, "rope_type is ['yarn']; supported are"),
        ({"mrope_section": [1, 1]}, "mrope_section is [1, 1]; this key is not supported"),
        ({"factor": 2.0}, "factor is 2.0; this key is not supported"),
        (
            {"type": "linear", "rope_type": "yarn"},
            "type is 'linear', which contradicts rope_type, 'ya",
        ),
        ({"type": "linear"}, "factor is missing; add it"),
        ({"type": "linear", "factor": 0}, "factor is 0; give a finite number greater than 1e-30"),
        ({"type": "linear", "factor": True}, "factor is True; give a finite number"),
        ({"type": "dynamic"}, "factor is missing"),
        (
            {"type": "linear", "factor": 2.0, "beta_fast": 8},
            "beta_fast is 8; this key is not supported",
        ),
        (with_keys(YARN, factor=None), "factor is missing"),
        (with_keys(YARN, factor=1e-30), "factor is 1e-30; give a finite number greater than 1e-30"),
        (with_keys(LLAMA3, factor=1e-300), "factor is 1e-300; give a finite number greater than"),
        (
            with_keys(YARN, original_max_position_embeddings=...),
            "original_max_position_embeddings is m",
        ),
        (
            with_keys(YARN, original_max_position_embeddings=1.5),
            "original_max_position_embeddings is 1",
        ),
        (with_keys(YARN, beta_fast=0.5), "beta_fast is 0.5; it must not be below beta_slow, 1"),
        (with_keys(YARN, beta_slow=0), "beta_slow is 0; give a finite number"),
        (with_keys(YARN, truncate=0), "truncate is 0; give true or false"),
        (with_keys(YARN, attention_factor=-1.0), "attention_factor is -1.0; give a finite"),
        (with_keys(YARN, mscale=-1.0), "mscale is -1.0; give a finite number"),
        (with_keys(YARN, mscale=1e31), "mscale is 1e+31; give a number up to 1e+30"),
        (
            with_keys(YARN, mscale_all_dim=1e31),
            "mscale_all_dim is 1e+31; give a number up to 1e+30",
        ),
        (with_keys(YARN, attention_factor=1e39), "attention_factor is 1e+39; give a number from"),
        (with_keys(YARN, attention_factor=1e-60), "attention_factor is 1e-60; give a number from"),
        (
            with_keys(LLAMA3, high_freq_factor=1.0),
            "high_freq_factor is 1.0; give a finite number great",
        ),
        (with_keys(LLAMA3, low_freq_factor=...), "low_freq_factor is missing"),
        (
            with_keys(LLAMA3, original_max_position_embeddings=...),
            "original_max_position_embeddings is",
        ),
    ],
)
@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_checked_in_both_styles(
    scaling: dict[str, Any], expected: str, style: str
) -> None:
    assert f": {style}.{expected}" in refusal(LLAMA, **{style: scaling})


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [[], "yarn", 1, True])
def test_rope_must_be_an_object(style: str, value: Any) -> None:
    assert f": {style} is {value!r}; give a JSON object or null" in refusal(LLAMA, **{style: value})


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (
            {"rope_theta": 5e5},
            None,
            "rope_parameters.rope_theta is 500000.0, which contradicts 10000.0",
        ),
        ({"rope_type": "default"}, {"type": "linear", "factor": 2.0}, "rope_parameters is "),
        ({**YARN, "beta_fast": 16}, YARN, "which contradicts rope_scaling; keep one of the two"),
        (
            None,
            {**YARN, "rope_theta": 5e5},
            "rope_scaling.rope_theta is 500000.0, which contradicts",
        ),
    ],
)
def test_contradictory_styles_are_refused(new: object, old: object, expected: str) -> None:
    assert expected in refusal(LLAMA, rope_parameters=new, rope_scaling=old)


def test_a_partial_rotary_factor_in_two_places_must_agree() -> None:
    new = {"partial_rotary_factor": 0.5}
    text = refusal(LLAMA, rope_parameters=new, partial_rotary_factor=1.0)
    assert "rope_parameters.partial_rotary_factor is 0.5, which contradicts 1.0" in text


def test_rope_by_layer_type_is_refused_by_name() -> None:
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert "rope_parameters.full_attention is {" in refusal(LLAMA, rope_parameters=nested)


@pytest.mark.parametrize("factor", [1e6, 1e300])
def test_a_context_beyond_float32_positions_is_refused(factor: float) -> None:
    text = refusal(LLAMA, rope_scaling={"type": "dynamic", "factor": factor})
    assert "max_position_embeddings is 64; times factor it must not exceed 16777216" in text


def test_dynamic_rope_needs_more_than_one_pair() -> None:
    scaling = {"type": "dynamic", "factor": 2.0}
    text = refusal(LLAMA, rope_scaling=scaling, partial_rotary_factor=0.5)
    assert "rope_scaling.rope_type is 'dynamic'; a rotary dimension of 2" in text


@pytest.mark.parametrize(("base", "bias"), [(LLAMA, False), (QWEN2, True)])
def test_a_bias_that_the_family_does_not_have_is_a_contradiction(
    base: Mapping[str, Any], bias: bool
) -> None:
    assert parse(base, qkv_bias=bias).qkv_bias is bias
    assert "qkv_bias" in refusal(base, qkv_bias=not bias)
