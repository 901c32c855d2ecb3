"""What a configuration says of a model: `config.json` in, a checked `ModelConfig` out (SPEC 10.3).

Every key of the file is read, known to be harmless, or refused by name: a setting that is silently
ignored is a wrong result that nobody sees. For the same reason a key which changes results has no
default here, even where a popular library has one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reference.config.rope import MAX_POSITIONS, parse_ropes
from reference.config.section import Section, show
from reference.experts import Router
from reference.families import FAMILIES, Family, Sparse, Switch
from reference.rotary import RopeParameters

Activation = Literal["silu", "gelu_tanh", "quick_gelu"]

MAX_LAYERS = 10_000
MAX_EXPERTS = 1_000_000  # of all layers together


@dataclass(frozen=True)
class SparseConfig:
    """The experts of a model (SPEC 9.2, 9.3).

    width, shared_width: inner sizes of an expert and of the shared one, None where there is none.
    layers: whether each layer has experts; the others are dense. stored: the family's row.
    """

    router: Router
    width: int
    shared_width: int | None
    layers: tuple[bool, ...]
    stored: Sparse


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, as SPEC 10.2 runs it; what its family decides is in `family`.

    windows: one entry for each layer, None for no window. rope: of all layers, except those with a
    window if there is a `local_rope`, and those that `rotates` says have none. max_positions: of
    the context, which is longer than `max_position_embeddings` with `dynamic` rope (SPEC 10.3).
    query_scalar: scores are divided by its square root; None is head_dim. attention_softcap,
    final_softcap: of scores and of logits. glu_limit: of the gate and up outputs (SPEC 9.1).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    activation: Activation
    qk_norm: Literal["head", "row"] | None = None
    local_rope: RopeParameters | None = None
    rotates: tuple[bool, ...] | None = None
    query_scalar: int | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    glu_limit: float | None = None
    sparse: SparseConfig | None = None

    @property
    def family(self) -> Family:
        """The row of the table of families."""
        return FAMILIES[self.architecture]

    def rope_of(self, layer: int) -> RopeParameters | None:
        """The rope of a layer, None where it has none (SPEC 10.3)."""
        if self.rotates is not None and not self.rotates[layer]:
            return None
        return self.rope if self.windows[layer] is None else self.local_rope or self.rope

    @property
    def rotates_alike(self) -> bool:
        """Whether one rotation moves a key to another position in every layer (SPEC 11.5)."""
        same_rope = self.local_rope is None and all(self.rotates or (True,))
        return same_rope and not self.rope.by_position

    def sparse_of(self, layer: int) -> SparseConfig | None:
        """The experts of a layer, None where it is dense."""
        return self.sparse if self.sparse is not None and self.sparse.layers[layer] else None


ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

HARMLESS = frozenset(
    {
        # Used in training only.
        "attention_dropout",
        "embd_pdrop",
        "initializer_range",
        "neftune_noise_alpha",
        "output_router_logits",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        # How the file came about, and which classes read it elsewhere.
        "auto_map",
        "is_llama_config",
        "name_or_path",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        # The stored dtype, which the weight file itself tells.
        "dtype",
        "torch_dtype",
        # What a library returns from a call, or keeps between calls; labels of a classifier.
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        # Sampling, which is told by `generation_config.json` or by the caller.
        "do_sample",
        "output_scores",
        "return_dict_in_generate",
        # Token ids: `reference.loading` reads that which ends a text; the tokenizer has the others.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        # Length of the training sequences; the context is `max_position_embeddings`.
        "initial_context_length",
        "max_sequence_length",
        # How another library lays out its cache, or slices its matrices.
        "cache_implementation",
        "pretraining_tp",
        # Layers that draft tokens further on, which a forward pass does not run.
        "mtp_layer_types",
        "mtp_mlp_layer_types",
        "num_mtp_layers",
        "num_nextn_predict_layers",
    }
)

# Keys that are accepted with this one value: what other families, or other uses of a decoder, have.
FIXED: Mapping[str, object] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
}

# Second names of a key, which must say the same where both are there.
SECOND_NAMES: Mapping[str, str] = {
    "hidden_act": "hidden_activation",
    "sliding_window_size": "sliding_window",
    "experts_per_token": "num_experts_per_tok",
}


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Check the JSON object of a `config.json`; `where` names the file in messages (SPEC 10.3).

    Raises ConfigError, in one line that names the file, the key, its value and the remedy, for a
    key that is missing, contradictory, out of range, or not supported.
    """
    keys = Section(raw, where)
    architecture, family = _family(keys)
    _check_second_names(keys)
    layers = keys.integer("num_hidden_layers", most=MAX_LAYERS)
    heads, kv_heads, head_dim = _heads(keys)
    positions = keys.integer("max_position_embeddings", most=MAX_POSITIONS)
    rope, local_rope = parse_ropes(keys, family, head_dim, positions)
    activation, glu_limit = _activation(keys, family)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope=rope,
        max_positions=_context(keys, rope, positions),
        tied=keys.flag("tie_word_embeddings", default=family.tied),
        qkv_bias=_qkv_bias(keys, family),
        o_bias=_switch(keys, family.o_bias),
        mlp_bias=_switch(keys, family.mlp_bias),
        windows=_windows(keys, family, layers),
        activation=activation,
        qk_norm=family.qk_norm,
        local_rope=local_rope,
        rotates=_rotating_layers(keys, layers) if family.rope_on_some else None,
        query_scalar=keys.integer("query_pre_attn_scalar") if family.query_scalar else None,
        attention_softcap=_softcap(keys, family, "attn_logit_softcapping"),
        final_softcap=_softcap(keys, family, "final_logit_softcapping"),
        glu_limit=glu_limit,
        sparse=_sparse(keys, family, layers),
    )
    if keys.has("quantization_config"):
        remedy = "weights that are stored quantized are not read; save them as bfloat16 or float32"
        keys.refuse("quantization_config", remedy)
    keys.refuse_the_rest(HARMLESS, FIXED)
    return config


# --------------------------------------------------------------------------- the parts of a model


def _family(keys: Section) -> tuple[str, Family]:
    """Name and row of the architecture; `model_type` may be absent but must not disagree."""
    names = keys.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        keys.refuse("architectures", f"give a list of one of {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        nearest = difflib.get_close_matches(names[0][:80], FAMILIES, 1, cutoff=0.0)[0]
        remedy = (
            f"this family is not supported; of those that are, {nearest} is the nearest by name"
        )
        keys.refuse("architectures", remedy)
    family = FAMILIES[names[0]]
    kind = keys.value("model_type") if keys.has("model_type") else family.model_type
    if kind != family.model_type:
        remedy = f"give {family.model_type!r} or remove the key"
        keys.contradicts("model_type", kind, f"the architecture {names[0]}", remedy)
    for key in family.required:
        keys.require(key)
    return names[0], family


def _check_second_names(keys: Section) -> None:
    """Refuse a second name of a key that does not say the same."""
    for second, first in SECOND_NAMES.items():
        if keys.has(second) and keys.has(first) and keys.value(second) != keys.peek(first):
            other = f"{first}, {show(keys.peek(first))}"
            keys.contradicts(second, keys.value(second), other, "keep one of the two")


def _heads(keys: Section) -> tuple[int, int, int]:
    """Query heads, key-value heads and head_dim, with the defaults of SPEC 10.3."""
    hidden_size = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads") if keys.has("num_key_value_heads") else heads
    if heads % kv_heads:
        keys.refuse("num_key_value_heads", f"it must divide num_attention_heads, {heads}")
    if keys.has("head_dim"):
        return heads, kv_heads, keys.integer("head_dim")
    if hidden_size % heads:
        keys.refuse("num_attention_heads", f"it must divide hidden_size, {hidden_size}")
    return heads, kv_heads, hidden_size // heads


def _qkv_bias(keys: Section, family: Family) -> bool:
    """Whether q, k and v have biases; a key of that name may only say the same."""
    bias = _switch(keys, family.qkv_bias)
    if keys.has("qkv_bias") and keys.flag("qkv_bias") != bias:
        remedy = f"give {str(bias).lower()} or remove the key"
        keys.contradicts("qkv_bias", not bias, "the architecture", remedy)
    return bias


def _switch(keys: Section, switch: Switch) -> bool:
    """Value of a switch of the family table."""
    return keys.flag(switch) if isinstance(switch, str) else switch


def _softcap(keys: Section, family: Family, key: str) -> float | None:
    """Softcap of that key, None where it is null; the key must be there."""
    if not family.softcaps:
        return None
    keys.require(key)
    return keys.float32(key) if keys.has(key) else None


def _activation(keys: Section, family: Family) -> tuple[Activation, float | None]:
    """The activation, and the limit of gate and up where the family clamps them (SPEC 9.1)."""
    name = keys.choice(family.activation, ACTIVATIONS)
    if not family.clamped:
        return ACTIVATIONS[name], None
    if name != "silu":
        keys.refuse(family.activation, "this family's is named silu")
    if keys.has("swiglu_alpha") and keys.number("swiglu_alpha") != 1.702:
        keys.refuse("swiglu_alpha", "only 1.702 is supported")
    return "quick_gelu", keys.float32("swiglu_limit")


def _windows(keys: Section, family: Family, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer (SPEC 8.1, 10.3), None where it sees all that came before."""
    if family.windows == "none":
        return (None,) * layers
    window = _window(keys, family)
    if family.windows == "every layer":
        if window is None:
            _ignore(keys, "max_window_layers")
        return (window,) * layers
    if keys.has("layer_types"):
        _ignore(keys, "max_window_layers", "sliding_window_pattern")
        return _windows_by_type(keys, window, layers)
    if window is None and family.switched:
        _ignore(keys, "max_window_layers")
        return (None,) * layers
    if family.windows == "upper layers":
        first = keys.integer("max_window_layers", least=0)  # that many at the bottom see everything
        return tuple(window if layer >= first else None for layer in range(layers))
    return _windows_by_turns(keys, family, window, layers)


def _window(keys: Section, family: Family) -> int | None:
    """The window in use, None where there is none."""
    if family.switched and not keys.flag("use_sliding_window"):
        _ignore(keys, "sliding_window")
        return None
    keys.require("sliding_window")
    return keys.integer("sliding_window") if keys.has("sliding_window") else None


def _ignore(keys: Section, *names: str) -> None:
    """Mark keys as read whose value another key has made void."""
    for key in names:
        if keys.has(key):
            keys.value(key)


def _windows_by_type(keys: Section, window: int | None, layers: int) -> tuple[int | None, ...]:
    """Windows from `layer_types`, one name a layer."""
    types = keys.names("layer_types", layers, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in types:
        remedy = "set sliding_window (and use_sliding_window), or name the layers full_attention"
        keys.contradicts("layer_types", list(types), "the lack of a window in use", remedy)
    return tuple(window if name == "sliding_attention" else None for name in types)


def _windows_by_turns(
    keys: Section, family: Family, window: int | None, layers: int
) -> tuple[int | None, ...]:
    """Windows in all layers but every n-th."""
    if window is None:
        keys.refuse("sliding_window", "give the number of positions of the window")
    every = family.full_every
    if every is None:
        keys.value("layer_types")
    period = keys.integer(every) if isinstance(every, str) else every or layers
    return tuple(window if (layer + 1) % period else None for layer in range(layers))


def _rotating_layers(keys: Section, layers: int) -> tuple[bool, ...]:
    """Layers with rope: `no_rope_layers` holds 1 for each of them, and 0 for the others."""
    if keys.has("no_rope_layers"):
        _ignore(keys, "no_rope_layer_interval")
        flags = keys.value("no_rope_layers")
        if not isinstance(flags, list) or len(flags) != layers:
            keys.refuse("no_rope_layers", f"give a list of {layers} numbers, one a layer")
        if not all(type(flag) is int and flag in (0, 1) for flag in flags):
            keys.refuse("no_rope_layers", "give 1 for a layer with rope, 0 for one without")
        return tuple(map(bool, flags))
    interval = keys.integer("no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


# ---------------------------------------------------------------------------------------- experts


def _sparse(keys: Section, family: Family, layers: int) -> SparseConfig | None:
    """The experts of a sparse family (SPEC 9.2, 9.3)."""
    sparse = family.sparse
    if sparse is None:
        return None
    experts = _expert_count(keys, layers)
    if isinstance(sparse.renormalise, str):
        keys.value(sparse.renormalise)
    router = Router(
        experts,
        keys.integer("num_experts_per_tok", most=experts),
        sparse.score,
        renormalise=_switch(keys, sparse.renormalise),
    )
    shared = keys.integer("shared_expert_intermediate_size") if sparse.shared else None
    width = keys.integer(sparse.width)
    return SparseConfig(router, width, shared, _sparse_layers(keys, sparse, layers), sparse)


def _expert_count(keys: Section, layers: int) -> int:
    """Number of experts of a layer, under either of its names; both must agree."""
    names = [key for key in ("num_experts", "num_local_experts") if keys.has(key)]
    most = MAX_EXPERTS // layers
    counts = [keys.integer(key, most) for key in names or ["num_experts"]]
    if len(set(counts)) > 1:
        other = f"num_local_experts, {counts[1]}"
        keys.contradicts("num_experts", counts[0], other, "keep one of the two")
    return counts[0]


def _sparse_layers(keys: Section, sparse: Sparse, layers: int) -> tuple[bool, ...]:
    """Which layers have experts (SPEC 10.3)."""
    if sparse.layers == "all":
        return (True,) * layers
    if sparse.layers == "by mlp_layer_types":
        types = keys.names("mlp_layer_types", layers, ("sparse", "dense"))
        return tuple(name == "sparse" for name in types)
    step = keys.integer("decoder_sparse_step")
    dense = keys.value("mlp_only_layers") if keys.has("mlp_only_layers") else []
    if not isinstance(dense, list) or any(type(n) is not int or not 0 <= n < layers for n in dense):
        keys.refuse("mlp_only_layers", f"give a list of numbers of layers, 0 to {layers - 1}")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _context(keys: Section, rope: RopeParameters, positions: int) -> int:
    """Positions of the context: only `dynamic` exceeds `max_position_embeddings` (SPEC 10.3)."""
    if rope.kind != "dynamic":
        return positions
    extended = rope.factor * rope.original_max_positions
    if extended > MAX_POSITIONS:
        keys.refuse("max_position_embeddings", f"times factor it must not exceed {MAX_POSITIONS}")
    return max(positions, math.floor(extended))
