"""What of a config.json decides the result: one row a family, each key read or refused (SPEC 10.3).

The table is that of SPEC 10.3; what it leaves to a family's row is said by functions of the
configuration, which tell the layers of a model by truth values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.backends.torch.experts import Router
from conformance.operations import NotImplementedByBackendError

Raw = Mapping[str, Any]
Which = Callable[[Raw, int], list[bool]]
"""Of a configuration and a number of layers: for each layer, whether it has something."""

FULL, SLIDING = "full_attention", "sliding_attention"

IGNORED = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    ]
)
"""Keys that change no result."""

READ = frozenset(
    [
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    ]
)
"""Keys that every family reads."""

ROPE_READ = frozenset(
    [
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "short_factor",
        "truncate",
        "type",
    ]
)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class UnknownFamilyError(NotImplementedByBackendError, ValueError):
    """A family of SPEC 10.3 that this backend does not have."""


def _need(raw: Raw, key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(f"configuration key {key!r} is missing")
    return raw[key]


# Which layers.


def nowhere(raw: Raw, layers: int) -> list[bool]:
    """No layer."""
    return [False] * layers


def everywhere(raw: Raw, layers: int) -> list[bool]:
    """Every layer."""
    return [True] * layers


def named(raw: Raw, layers: int) -> list[bool]:
    """Those that `layer_types` calls sliding; it must be there."""
    types = _need(raw, "layer_types")
    if len(types) != layers or set(types) - {FULL, SLIDING}:
        raise ValueError("layer_types does not name each layer full or sliding")
    return [kind == SLIDING for kind in types]


def _named_or(default: Which) -> Which:
    return lambda raw, layers: (default if raw.get("layer_types") is None else named)(raw, layers)


def upper(raw: Raw, layers: int) -> list[bool]:
    """Those from `max_window_layers` on, unless they are named."""
    return [i >= _need(raw, "max_window_layers") for i in range(layers)]


def all_but(period: int | str) -> Which:
    """All but each n-th, n a number or the key of one, unless they are named."""

    def which(raw: Raw, layers: int) -> list[bool]:
        n = _need(raw, period) if isinstance(period, str) else period
        return [(i + 1) % n != 0 for i in range(layers)]

    return _named_or(which)


def stepped(raw: Raw, layers: int) -> list[bool]:
    """Each `decoder_sparse_step`-th, without `mlp_only_layers`."""
    step, dense = _need(raw, "decoder_sparse_step"), raw.get("mlp_only_layers") or ()
    return [(i + 1) % step == 0 and i not in dense for i in range(layers)]


def by_mlp_type(raw: Raw, layers: int) -> list[bool]:
    """Those that `mlp_layer_types` calls sparse."""
    types = _need(raw, "mlp_layer_types")
    if len(types) != layers or set(types) - {"dense", "sparse"}:
        raise ValueError("mlp_layer_types does not name each layer dense or sparse")
    return [kind == "sparse" for kind in types]


def with_rope(raw: Raw, layers: int) -> list[bool]:
    """Those with 1 in `no_rope_layers`, else all but each `no_rope_layer_interval`-th."""
    given = raw.get("no_rope_layers")
    if given is None:
        n = _need(raw, "no_rope_layer_interval")
        return [(i + 1) % n != 0 for i in range(layers)]
    if len(given) != layers or set(given) - {0, 1}:
        raise ValueError("no_rope_layers does not have 0 or 1 for each layer")
    return [bool(one) for one in given]


# Families.


@dataclass(frozen=True)
class Mixture:
    """The experts of a family (9.2). renormalise: None is as `norm_topk_prob` says.

    stored: `each` expert by itself, as `mixtral` does, or `stacked` as in gpt-oss (12.1).
    """

    layers: Which = everywhere
    inner: str = "moe_intermediate_size"
    score: str = "softmax"
    renormalise: bool | None = None
    shared: bool = False
    stored: str = "each"


@dataclass(frozen=True)
class Family:
    """A row of the table of SPEC 10.3. keys: what it reads besides READ."""

    keys: str = ""
    required: str = ""
    qkv_bias: bool = False
    norms: str = "before"
    offset: bool = False
    qk_norm: str | None = None
    windows: Which = nowhere
    switched: bool = False
    rope: Which = everywhere
    typed_rope: bool = False
    local_theta: str | None = None
    mixture: Mixture | None = None
    gemma: bool = False
    fused: bool = False
    sinks: bool = False
    tied: bool = False


KV, TYPES, WINDOW, BIAS = "num_key_value_heads", " layer_types", " sliding_window", "attention_bias"
SWITCHED = " sliding_window use_sliding_window"
MOE = " num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"
STEPPED = MOE + " decoder_sparse_step mlp_only_layers"
GEMMA = (
    BIAS + WINDOW + TYPES + " attn_logit_softcapping final_logit_softcapping hidden_activation"
    " query_pre_attn_scalar"
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(f"{BIAS} mlp_bias"),
    "MistralForCausalLM": Family(WINDOW, KV, windows=everywhere),
    "MixtralForCausalLM": Family(
        WINDOW + MOE,
        KV,
        windows=everywhere,
        mixture=Mixture(inner="intermediate_size", renormalise=True, stored="mixtral"),
    ),
    "Qwen2ForCausalLM": Family(
        SWITCHED + TYPES + " max_window_layers",
        KV,
        qkv_bias=True,
        windows=_named_or(upper),
        switched=True,
    ),
    "Qwen2MoeForCausalLM": Family(
        STEPPED + SWITCHED + TYPES + " max_window_layers qkv_bias shared_expert_intermediate_size",
        KV,
        qkv_bias=True,
        windows=named,
        switched=True,
        mixture=Mixture(stepped, shared=True),
    ),
    "Qwen3ForCausalLM": Family(
        BIAS + SWITCHED + TYPES + " max_window_layers",
        f"{KV} head_dim",
        qk_norm="head",
        windows=_named_or(upper),
        switched=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        BIAS + STEPPED + SWITCHED + " max_window_layers",
        KV,
        qk_norm="head",
        windows=everywhere,
        switched=True,
        mixture=Mixture(stepped),
    ),
    "MellumForCausalLM": Family(
        BIAS + MOE + WINDOW + TYPES + " mlp_layer_types",
        f"{KV} head_dim sliding_window",
        qk_norm="head",
        windows=named,
        typed_rope=True,
        mixture=Mixture(by_mlp_type),
    ),
    "OlmoeForCausalLM": Family(
        BIAS + MOE, qk_norm="row", mixture=Mixture(inner="intermediate_size")
    ),
    "Olmo2ForCausalLM": Family(BIAS, norms="after", qk_norm="row"),
    "Olmo3ForCausalLM": Family(
        BIAS + WINDOW + TYPES,
        "sliding_window",
        norms="after",
        qk_norm="row",
        windows=all_but(4),
        typed_rope=True,
        local_theta="rope_theta",
    ),
    "Gemma2ForCausalLM": Family(
        GEMMA,
        f"{KV} head_dim sliding_window",
        norms="around",
        offset=True,
        windows=all_but(2),
        gemma=True,
        tied=True,
    ),
    "Gemma3ForCausalLM": Family(
        GEMMA + " sliding_window_pattern rope_local_base_freq",
        f"{KV} head_dim sliding_window",
        norms="around",
        offset=True,
        qk_norm="head",
        windows=all_but("sliding_window_pattern"),
        typed_rope=True,
        local_theta="rope_local_base_freq",
        gemma=True,
        tied=True,
    ),
    "SmolLM3ForCausalLM": Family(
        BIAS + SWITCHED + TYPES + " mlp_bias max_window_layers no_rope_layers"
        " no_rope_layer_interval",
        KV,
        windows=named,
        switched=True,
        rope=with_rope,
        tied=True,
    ),
    "Phi3ForCausalLM": Family(WINDOW, windows=everywhere, fused=True),
    "GptOssForCausalLM": Family(
        BIAS + MOE + WINDOW + TYPES + " swiglu_limit experts_per_token initial_context_length",
        f"{KV} head_dim sliding_window attention_bias",
        windows=all_but(2),
        sinks=True,
        mixture=Mixture(
            inner="intermediate_size", score="logits", renormalise=False, stored="stacked"
        ),
    ),
}


# What is read.


@dataclass(frozen=True)
class Experts:
    """The experts of a layer. inner, shared: sizes, of each and of a shared one."""

    count: int
    inner: int
    router: Router
    shared: int | None
    stored: str


@dataclass(frozen=True)
class LayerConfig:
    """What tells the layers of a model apart: window, parameters of rope, experts."""

    window: int | None
    rope: Mapping[str, Any] | None
    experts: Experts | None


@dataclass(frozen=True)
class Config:
    """What of a config.json decides the result.

    scale: of attention, None as 8.2 has it. limit: of gated layers (9.1).
    """

    family: Family
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    scale: float | None
    softcap: float | None
    final_softcap: float | None
    limit: float | None
    layers: tuple[LayerConfig, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.layers)


def _windows(family: Family, raw: Raw, layers: int) -> list[int | None]:
    """Sliding window of each layer."""
    window = raw.get("sliding_window")
    if window is None or (family.switched and not raw.get("use_sliding_window")):
        if SLIDING in (raw.get("layer_types") or ()):
            raise ValueError("layer_types names windows, but no window is in use")
        return [None] * layers
    return [window if there else None for there in family.windows(raw, layers)]


def _merged(*sources: Raw | None) -> dict[str, Any]:
    """Parameters of rope from several places, which must not contradict each other (12.1)."""
    merged: dict[str, Any] = {}
    for source in sources:
        given = {name: value for name, value in (source or {}).items() if value is not None}
        if "type" in given:
            given = {"rope_type": given["type"]} | given
            if given.pop("type") != given["rope_type"]:
                raise ValueError("rope type and rope_type contradict each other")
        for name, value in given.items():
            if name not in ROPE_READ:
                raise ValueError(f"rope parameter {name!r} is not supported")
            if merged.setdefault(name, value) != value:
                raise ValueError(f"rope parameter {name!r} is given twice, differently")
    _need(merged, "rope_theta")
    return merged


def _ropes(family: Family, raw: Raw, head_dim: int, local: Sequence[bool]) -> list[Raw | None]:
    """Parameters of rope of each layer. local: those that have a window."""
    common = ("partial_rotary_factor", "original_max_position_embeddings")
    top = {name: raw[name] for name in common if name in raw}
    given = raw.get("rope_parameters") or {}
    if family.typed_rope and {FULL, SLIDING} <= set(given):
        whole, near = (_merged(given[kind], top) for kind in (FULL, SLIDING))
    else:
        theta = {"rope_theta": raw.get("rope_theta")}
        whole = near = _merged(given, raw.get("rope_scaling"), theta, top)
        if family.typed_rope:
            if family.local_theta is None:
                raise ValueError(f"rope_parameters does not tell {FULL} and {SLIDING}")
            theta = {"rope_theta": _need(raw, family.local_theta)}
            near = _merged({"rope_type": "default"}, theta, top)
    places = {"head_dim": head_dim, "max_position_embeddings": raw["max_position_embeddings"]}
    whole, near = whole | places, near | places
    has = family.rope(raw, len(local))
    return [
        (near if at else whole) if there else None for at, there in zip(local, has, strict=True)
    ]


def _experts(family: Family, raw: Raw, layers: int) -> list[Experts | None]:
    """The experts of each layer."""
    m = family.mixture
    if m is None:
        return [None] * layers
    renormalise = _need(raw, "norm_topk_prob") if m.renormalise is None else m.renormalise
    counts = {raw[key] for key in ("num_experts", "num_local_experts") if raw.get(key) is not None}
    if len(counts) != 1:
        raise ValueError("num_experts and num_local_experts do not give one number")
    router = Router(_need(raw, "num_experts_per_tok"), m.score, renormalise=bool(renormalise))
    shared = _need(raw, "shared_expert_intermediate_size") if m.shared else None
    experts = Experts(counts.pop(), _need(raw, m.inner), router, shared, m.stored)
    return [experts if there else None for there in m.layers(raw, layers)]


def _activation(family: Family, raw: Raw) -> str:
    """Name of the activation among those of 9.1."""
    name = _need(raw, "hidden_activation" if family.gemma else "hidden_act")
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported")
    if family.mixture is None or family.mixture.stored != "stacked":
        return ACTIVATIONS[name]
    if name != "silu":
        raise ValueError(f"activation {name!r} is not that of gpt-oss")
    return "quick_gelu"


def parse(raw: Raw) -> Config:
    """Read a config.json, refusing by name what is not supported (10.3)."""
    (architecture,) = raw["architectures"]
    if architecture not in FAMILIES:
        raise UnknownFamilyError(f"model of {architecture}")
    family = FAMILIES[architecture]
    known = READ | IGNORED | set(family.keys.split())
    for name, value in raw.items():
        if name not in known and value not in (None, False):
            raise ValueError(f"configuration key {name!r} is not supported")
    for name in family.required.split():
        if name not in raw:
            raise ValueError(f"configuration key {name!r} is missing")
    if raw.get("qkv_bias") is False:
        raise ValueError("configuration key 'qkv_bias' is false, and this family has biases")
    heads, layers = _need(raw, "num_attention_heads"), _need(raw, "num_hidden_layers")
    head_dim = raw.get("head_dim") or _need(raw, "hidden_size") // heads
    biased = "attention_bias" in known and bool(raw.get("attention_bias"))
    windows = _windows(family, raw, layers)
    ropes = _ropes(family, raw, head_dim, [window is not None for window in windows])
    tied = raw.get("tie_word_embeddings")
    scalar = _need(raw, "query_pre_attn_scalar") if family.gemma else None
    return Config(
        family=family,
        vocab=_need(raw, "vocab_size"),
        hidden=_need(raw, "hidden_size"),
        intermediate=_need(raw, "intermediate_size"),
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        positions=_need(raw, "max_position_embeddings"),
        eps=float(_need(raw, "rms_norm_eps")),
        activation=_activation(family, raw),
        tied=family.tied if tied is None else bool(tied),
        qkv_bias=family.qkv_bias or biased,
        o_bias=biased,
        mlp_bias=bool(raw.get("mlp_bias")),
        scale=None if scalar is None else 1 / math.sqrt(scalar),
        softcap=raw.get("attn_logit_softcapping"),
        final_softcap=raw.get("final_logit_softcapping"),
        limit=_need(raw, "swiglu_limit") if "swiglu_limit" in known else None,
        layers=tuple(map(LayerConfig, windows, ropes, _experts(family, raw, layers))),
    )


def end_tokens(folder: Path) -> list[int]:
    """The ids that end a text, of generation_config.json before config.json (12.1)."""
    paths = [folder / f"{name}.json" for name in ("generation_config", "config")]
    told = [json.loads(path.read_text()).get("eos_token_id") for path in paths if path.exists()]
    ids: Any = next((value for value in told if value is not None), [])
    return ids if isinstance(ids, list) else [ids]
