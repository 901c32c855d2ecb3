"""The model families that are supported, and all that tells them apart (SPEC 10.3).

Every family is the forward pass of SPEC 10.2 with a few switches set. They are data, one row for
each family; no other part of the forward pass knows a family by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from reference.experts import Score

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two tensors outside the layers that every family has, the head unless it is tied."""

Switch = bool | str
"""On (True), off (False), or as the key of this name in `config.json` says."""

NormPlace = Literal["before", "after", "around"]
NORMS: Mapping[NormPlace, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Names of the norms before attention, after it, before the feed-forward layer, and after it."""


@dataclass(frozen=True)
class Sparse:
    """The experts of a family (SPEC 9.2, 9.3): how tokens are routed, and what is stored where.

    width: the key of an expert's inner size. layers: which ones have experts. score, renormalise:
    of the router. shared: whether there is a shared expert, gated. router, experts, gate_up, down:
    parts of the names of tensors (SPEC 12.1). biases: whether the router and the experts have
    them. stacked: whether one tensor, (E, K, N), holds all experts, gate and up in alternate
    columns.
    """

    width: str = "moe_intermediate_size"
    layers: Literal["all", "every decoder_sparse_step", "by mlp_layer_types"] = "all"
    score: Score = "softmax"
    renormalise: Switch = "norm_topk_prob"
    shared: bool = False
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    biases: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Family:
    """One row of the table of SPEC 10.3.

    required: keys whose defaults differ among those who write such files, so that none is assumed.
    tied: whether the head is the embedding unless `tie_word_embeddings` says otherwise.
    qkv_bias, o_bias, mlp_bias: whether these projections have biases.
    norms, norm_offset: where norms stand, and whether w - 1 is stored (SPEC 6).
    qk_norm: over each head, or over all heads of q, and of k, as one row.
    windows: which layers have `sliding_window`. `by type`: as `layer_types` says; without it, all
    but every n-th have one, n being `full_every` or the value of the key of that name; with
    neither, `layer_types` must be there. switched: no layer has one unless `use_sliding_window`.
    local_theta: layers with a window have a rope of their own; unless `rope_parameters` has one for
    each type of layer, this key gives its theta (`rope_parameters` itself: it must have them).
    rope_on_some: some layers have no rope.
    scaled_embedding, query_scalar, softcaps, sinks: whether the family has them (SPEC 8.2, 10.2).
    activation: the key that names it. clamped: whether gate and up are (SPEC 9.1).
    qkv, gate_up: names of the projections; a single name is that of a fused one.
    """

    model_type: str
    required: tuple[str, ...] = ()
    tied: bool = False
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    norms: NormPlace = "before"
    norm_offset: bool = False
    qk_norm: Literal["head", "row"] | None = None
    windows: Literal["none", "every layer", "upper layers", "by type"] = "none"
    switched: bool = False
    full_every: int | str | None = None
    local_theta: str | None = None
    rope_on_some: bool = False
    scaled_embedding: bool = False
    query_scalar: bool = False
    softcaps: bool = False
    sinks: bool = False
    activation: str = "hidden_act"
    clamped: bool = False
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    sparse: Sparse | None = None


KV = "num_key_value_heads"
WINDOW = "sliding_window"

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Family("mistral", (KV, WINDOW), windows="every layer"),
    "MixtralForCausalLM": Family(
        "mixtral",
        (KV, WINDOW),
        windows="every layer",
        sparse=Sparse(
            width="intermediate_size",
            renormalise=True,
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            gate_up=("w1", "w3"),
            down="w2",
        ),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", (KV,), qkv_bias=True, windows="upper layers", switched=True
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        (KV,),
        qkv_bias=True,
        windows="by type",
        switched=True,
        sparse=Sparse(layers="every decoder_sparse_step", shared=True),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        (KV, "head_dim"),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        windows="upper layers",
        switched=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        (KV,),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        windows="every layer",
        switched=True,
        sparse=Sparse(layers="every decoder_sparse_step"),
    ),
    "MellumForCausalLM": Family(
        "mellum",
        (KV, "head_dim", WINDOW),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        windows="by type",
        local_theta="rope_parameters",
        sparse=Sparse(layers="by mlp_layer_types"),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="row",
        sparse=Sparse(width="intermediate_size"),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms="after",
        qk_norm="row",
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        (WINDOW,),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms="after",
        qk_norm="row",
        windows="by type",
        full_every=4,
        local_theta="rope_theta",
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        (KV, "head_dim", WINDOW),
        tied=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms="around",
        norm_offset=True,
        windows="by type",
        full_every=2,
        scaled_embedding=True,
        query_scalar=True,
        softcaps=True,
        activation="hidden_activation",
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        (KV, "head_dim", WINDOW),
        tied=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms="around",
        norm_offset=True,
        qk_norm="head",
        windows="by type",
        full_every="sliding_window_pattern",
        local_theta="rope_local_base_freq",
        scaled_embedding=True,
        query_scalar=True,
        softcaps=True,
        activation="hidden_activation",
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        (KV,),
        tied=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows="by type",
        switched=True,
        rope_on_some=True,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        (WINDOW,),
        windows="every layer",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        (KV, "head_dim", WINDOW, "attention_bias"),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows="by type",
        full_every=2,
        sinks=True,
        clamped=True,
        sparse=Sparse(
            width="intermediate_size",
            score="logits",
            renormalise=False,
            router="mlp.router",
            gate_up=("gate_up_proj",),
            biases=True,
            stacked=True,
        ),
    ),
}
