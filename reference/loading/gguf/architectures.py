"""Metadata of a GGUF file to the keys of `config.json`, one row an architecture (SPEC 12.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from reference.config import Section, show
from reference.errors import ConfigError
from reference.families import FAMILIES
from reference.loading.gguf.file import GGUFFile
from reference.rotary import RopeParameters, rope_constants

Keys = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One row of the table of SPEC 12.2: what converters make of a family.

    name: the architecture in `config.json`. keys: metadata keys that only some families have,
    without the prefix, and the keys of `config.json` that they become. constants: keys that
    converters leave out, because the family has a single value of them. derived: keys that follow
    from the others. tensors: names of tensors that differ from the common ones; of two names in
    one, the rows alternate. by_turns: whether rows of q and k are permuted, so that the two
    elements which rotate together are neighbours. plus_one: whether 1 was added to norm weights.
    full_every: every n-th layer has no window, unless the file says otherwise.
    """

    name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Keys], Keys] = lambda raw: {}
    tensors: Mapping[str, str] = field(default_factory=dict)
    by_turns: bool = False
    plus_one: bool = False
    full_every: int | None = None


SIZES: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
NUMBERS: Mapping[str, str] = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
OPTIONAL = ("attention.head_count_kv", "attention.key_length")
"""Metadata keys that all architectures share, less their prefix, and their names in `config.json`;
and which of them may be absent."""

HARMLESS = frozenset({"rope.scaling.finetuned"})
"""Keys that change no result."""

AS_IF_ABSENT = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
}
"""Keys that say nothing if they have this value."""

SILU = {"hidden_act": "silu"}
SPARSE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
QWEN_SPARSE = {**SILU, "decoder_sparse_step": 1, "use_sliding_window": False}
AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
AFTER = {key: AROUND[key] for key in ("post_attention_layernorm", "post_feedforward_layernorm")}
WINDOW = {"attention.sliding_window": "sliding_window"}
PATTERN = "attention.sliding_window_pattern"
GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(largest: int) -> Callable[[Keys], Keys]:
    """Gemma's `query_pre_attn_scalar`: head_dim, but in the model of that many layers."""

    def derived(raw: Keys) -> Keys:
        is_largest = raw["num_hidden_layers"] == largest
        by_heads = raw["hidden_size"] // raw["num_attention_heads"]
        return {"query_pre_attn_scalar": by_heads if is_largest else raw["head_dim"]}

    return derived


def _mellum(raw: Keys) -> Keys:
    """Ropes by type of layer, without scaling in layers with a window; all layers are sparse."""
    full = {**(raw["rope_scaling"] or {"rope_type": "default"}), "rope_theta": raw["rope_theta"]}
    theta = raw.get("rope_local_base_freq", raw["rope_theta"])
    local = {"rope_type": "default", "rope_theta": theta}
    unused = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"))
    return {
        **unused,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "mlp_layer_types": ["sparse"] * raw["num_hidden_layers"],
    }


def _gpt_oss(raw: Keys) -> Keys:
    """This family does not round yarn's range (`truncate`, SPEC 7.2), which files do not say."""
    scaling = raw["rope_scaling"]
    return {"rope_scaling": scaling and {**scaling, "truncate": False}}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", constants=SILU, by_turns=True),
    "qwen2": Architecture("Qwen2ForCausalLM", constants=SILU),
    "qwen3": Architecture("Qwen3ForCausalLM", constants=SILU),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        {**SPARSE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {**QWEN_SPARSE, "norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", SPARSE, {**QWEN_SPARSE, "norm_topk_prob": True}
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        {key: SPARSE[key] for key in ("expert_count", "expert_used_count")},
        {**SILU, "norm_topk_prob": False},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", constants=SILU, tensors=AFTER),
    "mellum": Architecture(
        "MellumForCausalLM",
        {**SPARSE, **WINDOW, "rope.freq_base_swa": "rope_local_base_freq"},
        {**SILU, "norm_topk_prob": True},
        _mellum,
        full_every=4,
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        constants={**SILU, "use_sliding_window": False, "no_rope_layer_interval": 4},
        by_turns=True,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {
            **WINDOW,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        {**SILU, "swiglu_limit": 7.0},
        _gpt_oss,
        {
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks",
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": "ffn_gate_exps ffn_up_exps",
            "mlp.experts.down_proj": "ffn_down_exps",
        },
        full_every=2,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        WINDOW,
        {**SILU, "sliding_window": None},
        tensors={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        {
            **WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        GEMMA,
        _query_scalar(46),
        AROUND,
        plus_one=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {**WINDOW, "rope.freq_base_swa": "rope_local_base_freq"},
        {
            **GEMMA,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        _query_scalar(62),
        AROUND,
        plus_one=True,
    ),
}


class _Keys:
    """The metadata of a file's architecture, by keys without its name, which messages add."""

    def __init__(self, file: GGUFFile) -> None:
        self._prefix = f"{file.metadata['general.architecture']}."
        nothing = {(self._prefix + key, value) for key, value in AS_IF_ABSENT.items()}
        given = {
            key: value
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
            and (isinstance(value, list) or (key, value) not in nothing)
        }
        self._section = Section(given, str(file.path))

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return self._section.has(self._prefix + key)

    def value(self, key: str) -> Any:
        """Value of a key that must be there."""
        return self._section.value(self._prefix + key)

    def integer(self, key: str) -> int:
        """Value of a key that must be a positive integer."""
        return self._section.integer(self._prefix + key, most=2**24)

    def number(self, key: str) -> float:
        """Value of a key that must be a finite positive number."""
        return self._section.number(self._prefix + key)

    def choice(self, key: str, among: tuple[str, ...]) -> str:
        """Value of a key that must be one of a few names."""
        return self._section.choice(self._prefix + key, among)

    def refuse(self, key: str, remedy: str) -> NoReturn:
        """Raise ConfigError for the value of this key."""
        self._section.refuse(self._prefix + key, remedy)

    def contradicts(self, key: str, other: str, remedy: str) -> NoReturn:
        """Raise ConfigError for a value that does not agree with another place of the file."""
        self._section.contradicts(self._prefix + key, self.value(key), other, remedy)

    def refuse_the_others(self) -> None:
        """Raise ConfigError for the first key that was not asked for and changes results."""
        self._section.refuse_the_rest(frozenset(self._prefix + key for key in HARMLESS))


VARIANTS: Mapping[str, tuple[str, Architecture]] = {
    "llama": (
        "expert_count",
        Architecture(
            "MixtralForCausalLM",
            {key: SPARSE[key] for key in ("expert_count", "expert_used_count")},
            {**SILU, "sliding_window": None},
            tensors={
                "block_sparse_moe.gate": "ffn_gate_inp",
                "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
                "block_sparse_moe.experts.*.w3": "ffn_up_exps",
                "block_sparse_moe.experts.*.w2": "ffn_down_exps",
            },
            by_turns=True,
        ),
    ),
    "olmo2": (
        "attention.sliding_window",
        Architecture("Olmo3ForCausalLM", WINDOW, SILU, tensors=AFTER, full_every=4),
    ),
}
"""Architectures that mean another family where this key is above 0."""


def architecture_of(file: GGUFFile) -> Architecture:
    """The row of a file's architecture. Raises ConfigError where there is none."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: general.architecture is {show(name)}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    key, variant = VARIANTS.get(name, ("", ARCHITECTURES[name]))
    return variant if file.metadata.get(f"{name}.{key}") else ARCHITECTURES[name]


def to_config(file: GGUFFile, row: Architecture) -> Keys:
    """The object that `config.json` would hold, for `parse_config` (SPEC 10.3, 12.2).

    Raises ConfigError for a key that is missing, contradictory, or not supported.
    """
    keys = _Keys(file)
    raw: Keys = {"architectures": [row.name], **row.constants}
    raw |= {n: keys.integer(k) for k, n in SIZES.items() if k not in OPTIONAL or keys.has(k)}
    raw |= {name: keys.number(key) for key, name in NUMBERS.items()}
    raw |= {name: keys.value(key) for key, name in row.keys.items() if keys.has(key)}
    if row.full_every is not None:
        raw["layer_types"] = _layer_types(keys, row.full_every, raw["num_hidden_layers"])
    raw["vocab_size"] = _vocab_size(file, keys)
    raw["tie_word_embeddings"] = "output.weight" not in file.entries
    raw |= _biases(file, row)
    _check_rotating(keys, raw, row)
    raw["rope_scaling"] = _rope_scaling(file, keys, raw)
    raw |= row.derived(raw)
    keys.refuse_the_others()
    return raw


def _layer_types(keys: _Keys, every: int, layers: int) -> list[str]:
    """`layer_types`: layers have a window as the file lists them, or all but every n-th."""
    windows = keys.value(PATTERN) if keys.has(PATTERN) else every
    if type(windows) is int and windows > 0:
        windows = [(layer + 1) % windows != 0 for layer in range(layers)]
    if not isinstance(windows, list) or not all(type(flag) is bool for flag in windows):
        keys.refuse(PATTERN, "give a truth value for each layer, or a period")
    return ["sliding_attention" if flag else "full_attention" for flag in windows]


def _biases(file: GGUFFile, row: Architecture) -> Keys:
    """The keys that switch biases, by whether the first layer has them."""
    family = FAMILIES[row.name]
    switches = ((family.qkv_bias, "attn_q"), (family.mlp_bias, "ffn_gate"))
    return {
        switch: f"blk.0.{name}.bias" in file.entries
        for switch, name in switches
        if isinstance(switch, str)
    }


def _vocab_size(file: GGUFFile, keys: _Keys) -> int:
    """Rows of the embedding, with which `vocab_size` must agree where it is given."""
    if "token_embd.weight" not in file.entries:
        raise ConfigError(f"{file.path}: there is no tensor token_embd.weight; convert it again")
    rows = file.entries["token_embd.weight"].shape[0]
    if keys.has("vocab_size") and keys.value("vocab_size") != rows:
        other = f"the {rows} rows of token_embd.weight"
        keys.contradicts("vocab_size", other, "convert the model again")
    return rows


def _check_rotating(keys: _Keys, raw: Keys, row: Architecture) -> None:
    """Check that the sizes of a head agree, and add `head_dim` and the share of it that rotates.

    If only part of a permuted head rotates, the permutation mixes that part with the rest: refused.
    """
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if "head_dim" not in raw and hidden % heads:
        keys.refuse("attention.head_count", f"it must divide embedding_length, {hidden}")
    head_dim: int = raw.setdefault("head_dim", hidden // heads)
    if keys.has("attention.value_length") and keys.value("attention.value_length") != head_dim:
        remedy = "values of another size are not supported"
        keys.contradicts("attention.value_length", f"the size of a key, {head_dim}", remedy)
    if not keys.has("rope.dimension_count") or keys.value("rope.dimension_count") == head_dim:
        return
    turning = keys.integer("rope.dimension_count")
    if row.by_turns or turning > head_dim:
        keys.refuse("rope.dimension_count", f"only {head_dim}, a whole head, is supported")
    raw["partial_rotary_factor"] = turning / head_dim


# ------------------------------------------------------------------------------------------- rope

_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def _rope_scaling(file: GGUFFile, keys: _Keys, raw: Keys) -> Keys | None:
    """The `rope_scaling` of `config.json`, None where there is none."""
    kind = "none"
    if keys.has("rope.scaling.type"):
        kind = keys.choice("rope.scaling.type", ("none", "linear", "yarn"))
    factors = "rope_freqs.weight" in file.entries
    if kind == "none":
        return _llama3(file, keys, raw) if factors else None
    if factors:
        other = "the factors in rope_freqs.weight"
        keys.contradicts("rope.scaling.type", other, "convert the model again")
    scaling: Keys = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        for key, name in _YARN.items():
            if keys.has(key) and scaling.setdefault(name, keys.value(key)) != keys.value(key):
                keys.contradicts(key, f"{show(scaling[name])} elsewhere", "convert it again")
    return scaling


def _llama3(file: GGUFFile, keys: _Keys, raw: Keys) -> Keys | None:
    """The llama3 scaling that the divisors of inv_freq in `rope_freqs.weight` come from.

    The largest divisor is `factor`. The others show where the range between scaled and unscaled
    pairs begins and ends: two figures, for three numbers of the configuration. So low_freq_factor
    is taken to be 1 and high_freq_factor 4, as in all of Meta's models, and the original length to
    be a power of two that fits, unless the file gives it (SPEC 12.2).
    """
    factors = file.read("rope_freqs.weight").astype(np.float64)
    head_dim, theta = raw["head_dim"], raw["rope_theta"]
    if factors.shape == (head_dim // 2,) and factors.max() >= 1:
        if (factors == 1).all():
            return None
        factor = float(str(np.float32(factors.max())))
        default = rope_constants(RopeParameters("default", theta, head_dim))[0]
        for length in _lengths(keys):
            rope = RopeParameters("llama3", theta, head_dim, factor, length, 1.0, 4.0)
            ratio = default.astype(np.float64) / rope_constants(rope)[0]
            if np.allclose(ratio, factors, rtol=1e-5, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": length,
                }
    raise ConfigError(
        f"{file.path}: rope_freqs.weight holds no llama3 scaling with low_freq_factor 1 and "
        "high_freq_factor 4; no other is supported"
    )


def _lengths(keys: _Keys) -> list[int]:
    """Original lengths that come into question: the one that is given, else powers of two."""
    if keys.has("rope.scaling.original_context_length"):
        return [keys.integer("rope.scaling.original_context_length")]
    return [2**power for power in range(5, 21)]


def where_of(path: Path) -> str:
    """How messages name the configuration that metadata was turned into."""
    return f"{path}: metadata, as config.json"
