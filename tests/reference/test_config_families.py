"""Configurations of the miniatures: as transformers reads them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.make_families import MODELS, configuration
from reference.config import ModelConfig, parse_config
from reference.errors import ConfigError
from tests.reference.loading.folders import with_keys
from tests.reference.refusals import told


def parse(name: str, **changes: Any) -> ModelConfig:
    return parse_config(with_keys(configuration(name), **changes), "m/config.json")


def refusal(name: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(name, **changes)
    return told(caught, "m/config.json: ")


def theirs(raw: dict[str, Any]) -> Any:
    rest = {key: value for key, value in raw.items() if key != "architectures"}
    return transformers.AutoConfig.for_model(**rest)


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_writes_means_the_same(name: str) -> None:
    """The older style of the files on hubs against the newer one, which names every layer."""
    raw = configuration(name)
    them = theirs(raw)
    written = {**them.to_dict(), "architectures": raw["architectures"]}
    assert parse_config(written, "m/config.json") == parse_config(raw, "m/config.json")


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_those_of_transformers(name: str) -> None:
    ours, them = parse(name), theirs(configuration(name))
    every = "sliding_attention" if name in ("mixtral", "phi3") else "full_attention"
    types = getattr(them, "layer_types", None) or [every] * them.num_hidden_layers
    windows = tuple(them.sliding_window if t == "sliding_attention" else None for t in types)
    assert ours.windows == windows
    assert ours.query_scalar == getattr(them, "query_pre_attn_scalar", None)
    assert ours.attention_softcap == getattr(them, "attn_logit_softcapping", None)
    assert ours.final_softcap == getattr(them, "final_logit_softcapping", None)
    rotating = getattr(them, "no_rope_layers", None)
    assert ours.rotates == (None if rotating is None else tuple(map(bool, rotating)))
    ropes = them.rope_parameters
    for index, kind in enumerate(types):
        rope, own = ours.rope_of(index), ropes.get(kind, ropes)
        if rope is None:
            continue
        assert (rope.kind, rope.theta) == (own["rope_type"], own["rope_theta"])
        assert rope.factor == (own.get("factor") or (256 / 24 if name == "phi3" else 1.0))


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("qwen3-moe", {"mlp_only_layers": None}, (True, True, True)),
        ("qwen3-moe", {"mlp_only_layers": [0, 2]}, (False, True, False)),
        ("qwen2-moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}, (False, True, False)),
        ("qwen2-moe", {"decoder_sparse_step": 4}, (False, False, False)),
        ("mellum", {}, (False, True, True, True)),
        ("mixtral", {}, (True, True, True)),
    ],
)
def test_layers_with_experts(name: str, changes: Any, layers: tuple[bool, ...]) -> None:
    sparse = parse(name, **changes).sparse
    assert sparse is not None
    assert sparse.layers == layers


def test_windows_that_a_switch_turns_on() -> None:
    assert parse("qwen3-moe", use_sliding_window=True, sliding_window=5).windows == (5, 5, 5)
    assert parse("qwen3-moe", sliding_window=5, max_window_layers=2).windows == (None,) * 3
    types = ["full_attention", "sliding_attention", "full_attention"]
    on = {"use_sliding_window": True, "sliding_window": 5}
    assert parse("qwen2-moe", **on, layer_types=types).windows == (None, 5, None)
    assert "layer_types is missing" in refusal("qwen2-moe", **on)


def test_second_names_that_agree() -> None:
    assert parse("gemma2", hidden_act="gelu_pytorch_tanh", sliding_window_size=7) == parse("gemma2")
    assert parse("mixtral", num_experts=4) == parse("mixtral")
    about = {"experts_per_token": 2, "initial_context_length": 32, "swiglu_alpha": 1.702}
    assert parse("gpt-oss", **about) == parse("gpt-oss")


def test_keys_of_released_files_that_change_nothing() -> None:
    drafting = {"num_nextn_predict_layers": 1, "mtp_layer_types": ["sliding_attention"]}
    assert parse("mellum", **drafting, mtp_mlp_layer_types=["sparse"]) == parse("mellum")
    assert parse("gemma2", cache_implementation="hybrid") == parse("gemma2")
    classes = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert parse("phi3", auto_map=classes, resid_pdrop=0.1, embd_pdrop=0.1) == parse("phi3")
    llama = {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 2}
    assert parse("smollm3", **llama, max_window_layers=28) == parse("smollm3")


def test_weights_are_tied_unless_the_family_says_otherwise() -> None:
    tied = {name for name in MODELS if parse(name, tie_word_embeddings=...).tied}
    assert tied == {"gemma2", "gemma3", "smollm3"}


LONGROPE = configuration("phi3")["rope_scaling"]
BY_TYPE = configuration("mellum")["rope_parameters"]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mixtral", {"architectures": ["MixtralForSequence"]}, "MixtralForCausalLM is the nearest"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForCausalLM is"),
        ("mixtral", {"architectures": ["DeepseekV3ForCausalLM"]}, "this family is not supported"),
        ("mixtral", {"sliding_window": ...}, "sliding_window is missing"),
        ("mixtral", {"num_local_experts": ...}, "num_experts is missing"),
        (
            "mixtral",
            {"num_hidden_layers": 10_000, "num_local_experts": 101},
            "num_local_experts is 101; give an integer from 1 to 100",
        ),
        ("mixtral", {"num_experts": 5}, "num_experts is 5, which contradicts num_local_experts, 4"),
        ("mixtral", {"num_experts_per_tok": 5}, "give an integer from 1 to 4"),
        ("mixtral", {"moe_intermediate_size": 8}, "moe_intermediate_size is 8; this key is not"),
        ("qwen3-moe", {"norm_topk_prob": ...}, "norm_topk_prob is missing"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; give true or false"),
        ("qwen3-moe", {"decoder_sparse_step": ...}, "decoder_sparse_step is missing"),
        ("qwen3-moe", {"mlp_only_layers": [3]}, "mlp_only_layers is [3]; give a list of numbers"),
        ("qwen3-moe", {"mlp_only_layers": [True]}, "mlp_only_layers is [True]; give"),
        ("qwen3-moe", {"use_sliding_window": True}, "sliding_window is missing"),
        (
            "qwen3-moe",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            "max_window_layers is 1; this key is not supported",
        ),
        ("qwen2-moe", {"qkv_bias": False}, "qkv_bias is False, which contradicts the architecture"),
        ("qwen2-moe", {"shared_expert_intermediate_size": ...}, "intermediate_size is missing"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; this key is not supported"),
        ("mellum", {"mlp_layer_types": ["sparse"]}, "give a list of 4 names, one a layer"),
        ("mellum", {"mlp_layer_types": ["moe"] * 4}, "supported are sparse and dense"),
        ("mellum", {"layer_types": ...}, "layer_types is missing"),
        ("mellum", {"rope_theta": 1e4}, "rope_theta is 10000.0; this key is not supported"),
        (
            "mellum",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "give an object for each of full_attention and sliding_attention",
        ),
        (
            "mellum",
            {"rope_parameters": {"full_attention": BY_TYPE["full_attention"]}},
            "rope_parameters.sliding_attention is missing",
        ),
        (
            "mellum",
            {"rope_parameters": {**BY_TYPE, "chunked_attention": {"rope_theta": 1e4}}},
            "rope_parameters.chunked_attention is {'rope_theta': 10000.0}; this key is not",
        ),
        (
            "mellum",
            {"rope_parameters": {**BY_TYPE, "sliding_attention": {"rope_theta": 0.5}}},
            "rope_parameters.sliding_attention.rope_theta is 0.5; give",
        ),
        ("gemma2", {"attn_logit_softcapping": ...}, "attn_logit_softcapping is missing"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping is 0; give a finite"),
        ("gemma2", {"final_logit_softcapping": 1e-50}, "give a number from 1.17549e-38 to"),
        ("gpt-oss", {"swiglu_limit": 1e39}, "swiglu_limit is 1e+39; give a number from 1.1"),
        ("gemma2", {"query_pre_attn_scalar": ...}, "query_pre_attn_scalar is missing"),
        ("gemma2", {"head_dim": ...}, "head_dim is missing"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act is 'silu', which contradicts hidden_activ"),
        ("gemma2", {"sliding_window_size": 8}, "sliding_window_size is 8, which contradicts"),
        ("gemma2", {"sliding_window": None}, "sliding_window is None; give the number"),
        ("gemma2", {"use_bidirectional_attention": True}, "only false is supported"),
        ("gemma3", {"sliding_window_pattern": ...}, "sliding_window_pattern is missing"),
        ("gemma3", {"rope_local_base_freq": ...}, "rope_local_base_freq is missing"),
        ("smollm3", {"no_rope_layer_interval": ...}, "no_rope_layer_interval is missing"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "give a list of 4 numbers, one a layer"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "give 1 for a layer with rope, 0 for"),
        ("phi3", {"original_max_position_embeddings": ...}, "original_max_position_embeddings is"),
        (
            "phi3",
            {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 9}},
            "original_max_position_embeddings is 24, which contradicts that of the rope, 9",
        ),
        (
            "phi3",
            {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}},
            "rope_scaling.long_factor is [1.0]; give a list of 4 numbers",
        ),
        (
            "phi3",
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0, 1.0, 0, 1.0]}},
            "short_factor is [1.0, 1.0, 0, 1.0]; every number must be finite",
        ),
        (
            "phi3",
            {"rope_scaling": {**LONGROPE, "long_factor": [1.0, 1e-30, 1.0, 1.0]}},
            "long_factor is [1.0, 1e-30, 1.0, 1.0]; every number must be finite and greater than",
        ),
        ("gpt-oss", {"attention_bias": ...}, "attention_bias is missing"),
        ("gpt-oss", {"swiglu_limit": ...}, "swiglu_limit is missing"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; only 1.702 is supported"),
        ("gpt-oss", {"hidden_act": "gelu_pytorch_tanh"}, "this family's is named silu"),
        ("gpt-oss", {"experts_per_token": 3}, "experts_per_token is 3, which contradicts"),
        (
            "gpt-oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config is {'quant_method': 'mxfp4'}; weights that are stored quantized",
        ),
    ],
)
def test_what_a_family_cannot_be_is_named(name: str, changes: Any, expected: str) -> None:
    assert expected in refusal(name, **changes)


NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**70, 10**400, 0.5, -0.0, 1e-50, 1e300, float("nan")),
    *("", "sparse", "full_attention", [], [1], [0, 1, 1], [None] * 4, [[]], ["sparse"] * 3),
    *({}, {"rope_type": "longrope"}, {"full_attention": 1}, {"full_attention": {"type": []}}),
]
KEYS = sorted(
    {key for name in MODELS for key in configuration(name)}
    | {"layer_types", "no_rope_layers", "use_sliding_window", "rope_parameters", "swiglu_alpha"}
)


@settings(max_examples=400)
@given(st.data())
def test_whatever_a_key_holds_is_taken_or_refused_in_one_line(data: st.DataObject) -> None:
    changes = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(NASTY), min_size=1, max_size=2)
    raw = configuration(data.draw(st.sampled_from(sorted(MODELS))))
    text = "m/config.json: taken"
    try:
        parse_config({**raw, **data.draw(changes)}, "m/config.json")
    except ConfigError as refused:
        text = str(refused)
    assert text.startswith("m/config.json: ")
    assert "\n" not in text
