"""What a configuration says of a model: `config.json` in, a checked `ModelConfig` out (SPEC 10.3).

Every key of the file is read, known to be harmless, or refused by name: a setting that is silently
ignored is a wrong result that nobody sees. For the same reason a key which changes results has no
default here, even where a popular library has one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

from reference.errors import ConfigError
from reference.experts import Router
from reference.families import FAMILIES, Family, Sparse, Switch
from reference.rotary import RopeKind, RopeParameters

Activation = Literal["silu", "gelu_tanh", "quick_gelu"]
Name = TypeVar("Name", bound=str)

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
MIN_FLOAT32, MAX_FLOAT32 = 2.0**-126, 2.0**127
MAX_POSITIONS = 2**24  # a position is a float32 in the angle of rope (SPEC 7.3)


@dataclass(frozen=True)
class SparseConfig:
    """The experts of a model (SPEC 9.2, 9.3).

    width, shared_width: inner sizes of an expert and of the shared one, None where there is none.
    layers: which layers have experts; the others are dense. stored: how, by the table of families.
    """

    router: Router
    width: int
    shared_width: int | None
    layers: tuple[bool, ...]
    stored: Sparse


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, as SPEC 10.2 runs it. Its row of the table of families holds the rest.

    windows: one entry a layer, None for none. rope: of all layers, but for those with a window
    where `local_rope` is theirs, and for those that do not rotate. max_positions: of the context,
    `max_position_embeddings`, extended by `factor` for `dynamic` rope. query_scalar: scores are
    divided by its root; None is head_dim. attention_softcap, final_softcap: of scores and logits.
    glu_limit: of the gate and up outputs (SPEC 9.1).
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
        by_length = self.rope.kind in ("dynamic", "longrope")
        return not by_length and self.local_rope is None and all(self.rotates or (True,))

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
        "use_cache",
        # Token ids: `reference.loading` reads the first two, the rest is not for generation.
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

# Keys that are accepted with this one value.
FIXED: Mapping[str, int] = {"chunk_size_feed_forward": 0}

# Second names of a key, which must say the same where both are there.
SECOND_NAMES: Mapping[str, str] = {
    "hidden_act": "hidden_activation",
    "sliding_window_size": "sliding_window",
    "experts_per_token": "num_experts_per_tok",
}

HARMLESS_IN_ROPE = frozenset({"finetuned"})  # whether the scaled model was trained further


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Check the JSON object of a `config.json`; `where` names the file in messages (SPEC 10.3, 12).

    Raises ConfigError, in one line that names the file, the key, its value and the remedy, for a
    key that is missing, contradictory, out of range, or not supported.
    """
    keys = Section(raw, where)
    architecture, family = _family(keys)
    _check_second_names(keys)
    layers = keys.integer("num_hidden_layers", most=MAX_LAYERS)
    heads, kv_heads, head_dim = _heads(keys)
    positions = keys.integer("max_position_embeddings", most=MAX_POSITIONS)
    rope, local_rope = _ropes(keys, family, head_dim, positions)
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
    keys.refuse_the_rest(HARMLESS)
    return config


# ------------------------------------------------------------------------- one object of the file


class Section:
    """A JSON object whose keys are read one by one; those never read are refused at the end.

    `prefix` stands before a key in messages, as in `rope_scaling.factor`.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._raw = raw
        self._where = where
        self._prefix = prefix
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._raw.get(key) is not None

    def require(self, key: str) -> None:
        """Refuse a file without this key; null will do."""
        if key not in self._raw:
            self._missing(key)

    def value(self, key: str) -> Any:
        """Value of a key that must be there, of whatever type."""
        self._read.add(key)
        if not self.has(key):
            self._missing(key)
        return self._raw[key]

    def peek(self, key: str) -> Any:
        """Value of a key, or None, without counting it as read."""
        return self._raw.get(key)

    def integer(self, key: str, most: int = MAX_SIZE, least: int = 1) -> int:
        """Value of a key that must be an integer in least..most."""
        value = self.value(key)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"give an integer from {least} to {most}")
        return value

    def number(self, key: str, above: float = 0.0) -> float:
        """Value of a key that must be a finite number greater than `above`, as a float64."""
        value = self.value(key)
        if type(value) not in (int, float) or not above < value < math.inf:
            self.refuse(key, f"give a finite number greater than {above:g}")
        try:
            return float(value)
        except OverflowError:
            self.refuse(key, "give a number within the range of float64")

    def float32(self, key: str) -> float:
        """Value of a key that must be positive and finite as a float32 too."""
        value = self.number(key)
        if not MIN_FLOAT32 <= value <= MAX_FLOAT32:
            self.refuse(key, f"give a number from {MIN_FLOAT32:g} to {MAX_FLOAT32:g}")
        return value

    def number_or_zero(self, key: str) -> float:
        """Value of a key that must be 0 or a finite positive number, as a float64."""
        value = self.value(key)
        return 0.0 if type(value) in (int, float) and value == 0 else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Value of a key that must be true or false; absent or null is `default`."""
        self._read.add(key)
        value = self._raw.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(key, "give true or false")
        return value

    def choice(self, key: str, among: Iterable[Name]) -> Name:
        """Value of a key that must be one of a few names."""
        names, value = list(among), self.value(key)
        if value not in names:
            self.refuse(key, f"supported are {', '.join(names)}")
        return names[names.index(value)]

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Value of a key that must be a list of `count` finite positive numbers, as float64."""
        values = self.value(key)
        if not isinstance(values, list) or len(values) != count:
            self.refuse(key, f"give a list of {count} numbers")
        for value in values:
            if type(value) not in (int, float) or not 0 < value < 1e300:
                self.refuse(key, "every number must be finite and greater than 0")
        return tuple(map(float, values))

    def names(self, key: str, count: int, among: tuple[Name, ...]) -> tuple[Name, ...]:
        """Value of a key that must be a list of `count` names, one a layer."""
        names = self.value(key)
        if not isinstance(names, list) or len(names) != count:
            self.refuse(key, f"give a list of {count} names, one a layer")
        for name in names:
            if name not in among:
                self.refuse(key, f"supported are {' and '.join(among)}")
        return tuple(among[among.index(name)] for name in names)

    def mapping(self, key: str) -> dict[str, Any]:
        """Value of a key that must be a JSON object; absent or null is an empty one."""
        self._read.add(key)
        value = self._raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(key, "give a JSON object or null")
        return dict(value)

    def refuse(self, key: str, remedy: str) -> NoReturn:
        """Raise ConfigError for the value of this key."""
        plain = key.isidentifier() and len(key) <= 80
        name = self._prefix + (key if plain else show(key))
        raise ConfigError(f"{self._where}: {name} is {show(self._raw.get(key))}; {remedy}")

    def contradicts(self, key: str, value: object, other: str, remedy: str) -> NoReturn:
        """Raise ConfigError for a value that does not agree with another place of the file."""
        name = f"{self._where}: {self._prefix}{key}"
        raise ConfigError(f"{name} is {show(value)}, which contradicts {other}; {remedy}")

    def part(self, raw: Mapping[str, Any], prefix: str = "") -> Section:
        """Section of the same file for an object within it."""
        return Section(raw, self._where, prefix)

    def refuse_the_rest(self, harmless: frozenset[str]) -> None:
        """Refuse the first key that was neither read nor is harmless, fixed, empty or private."""
        for key in self._raw:
            if key in self._read or key in harmless or key.startswith("_"):
                continue
            value = self._raw[key]
            if value is None:
                continue
            if key in FIXED:
                if type(value) is not type(FIXED[key]) or value != FIXED[key]:
                    self.refuse(key, f"only {FIXED[key]} is supported")
            elif value is not False and value not in ("", [], {}):
                self.refuse(key, "this key is not supported; remove it if it changes no result")

    def _missing(self, key: str) -> NoReturn:
        raise ConfigError(
            f"{self._where}: {self._prefix}{key} is missing; add it, its value is never assumed"
        )


def show(value: object) -> str:
    """Text of a value for a message: one line, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
    experts = _expert_count(keys)
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


def _expert_count(keys: Section) -> int:
    """Number of experts, under either of its names; both must agree."""
    names = [key for key in ("num_experts", "num_local_experts") if keys.has(key)]
    counts = [keys.integer(key, most=MAX_EXPERTS) for key in names or ["num_experts"]]
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


# ------------------------------------------------------------------------------------------- rope

_IN_EITHER_PLACE = ("rope_theta", "partial_rotary_factor")


LAYER_TYPES = ("full_attention", "sliding_attention")


def _ropes(
    keys: Section, family: Family, head_dim: int, positions: int
) -> tuple[RopeParameters, RopeParameters | None]:
    """The rope of all layers, and that of layers with a window where they have their own."""
    if family.local_theta is None:
        return parse_rope(keys, head_dim, positions), None
    by_type = keys.part(keys.mapping("rope_parameters"), "rope_parameters.")
    if any(map(by_type.has, LAYER_TYPES)):
        full, local = (_rope_of_type(by_type, name, head_dim, positions) for name in LAYER_TYPES)
        by_type.refuse_the_rest(frozenset())
        return full, local
    if family.local_theta == "rope_parameters":
        keys.refuse("rope_parameters", f"give an object for each of {' and '.join(LAYER_TYPES)}")
    full = parse_rope(keys, head_dim, positions)
    own = family.local_theta != "rope_theta"
    theta = keys.number(family.local_theta, above=1.0) if own else full.theta
    return full, RopeParameters("default", theta, full.rotary_dim)


def _rope_of_type(by_type: Section, name: str, head_dim: int, positions: int) -> RopeParameters:
    """Rope of one type of layer, from `rope_parameters`."""
    by_type.value(name)
    style = _with_rope_type(by_type, name) or {"rope_type": "default"}
    common = {key: style.pop(key) for key in _IN_EITHER_PLACE if key in style}
    prefix = f"rope_parameters.{name}."
    return _rope(by_type.part(common, prefix), by_type.part(style, prefix), head_dim, positions)


def parse_rope(keys: Section, head_dim: int, positions: int) -> RopeParameters:
    """Rope of SPEC 7.2 from `rope_theta` and `rope_scaling`, or from `rope_parameters`."""
    return _rope(*_rope_sections(keys), head_dim, positions)


def _rope(common: Section, scaling: Section, head_dim: int, positions: int) -> RopeParameters:
    """Rope from theta and partial rotary factor, and the keys of the scaling."""
    theta = common.number("rope_theta", above=1.0)
    rotary_dim = _rotary_dim(common, head_dim)
    kind = scaling.choice("rope_type", _SCALINGS)
    rope = _SCALINGS[kind](scaling, theta, rotary_dim, positions)
    scaling.refuse_the_rest(HARMLESS_IN_ROPE)
    return rope


def _rope_sections(keys: Section) -> tuple[Section, Section]:
    """Theta and partial rotary factor, which stand in either place, and the keys of the scaling.

    Both styles at once are accepted only where they say the same.
    """
    new = _with_rope_type(keys, "rope_parameters")
    old = _with_rope_type(keys, "rope_scaling")
    common: dict[str, Any] = {key: keys.value(key) for key in _IN_EITHER_PLACE if keys.has(key)}
    for name, style in (("rope_parameters", new), ("rope_scaling", old)):
        for key in _IN_EITHER_PLACE:
            value = style.pop(key, None)
            if value is not None and common.setdefault(key, value) != value:
                other = f"{show(common[key])} elsewhere in the file"
                keys.contradicts(f"{name}.{key}", value, other, "keep one of the two")
    if keys.mapping("rope_parameters") and keys.mapping("rope_scaling") and new != old:
        keys.contradicts("rope_parameters", new, "rope_scaling", "keep one of the two")
    name = "rope_parameters" if keys.mapping("rope_parameters") else "rope_scaling"
    style = new or old or {"rope_type": "default"}
    _take_original_length(keys, style)
    return keys.part(common), keys.part(style, f"{name}.")


def _take_original_length(keys: Section, style: dict[str, Any]) -> None:
    """Put the original length, which Phi-3 has outside, among the keys of longrope."""
    key, kind = "original_max_position_embeddings", style["rope_type"]
    if kind not in ("default", "longrope") or not keys.has(key):
        return
    value = keys.value(key)
    if kind == "longrope" and style.setdefault(key, value) != value:
        keys.contradicts(key, value, f"that of the rope, {show(style[key])}", "keep one of the two")


def _with_rope_type(keys: Section, name: str) -> dict[str, Any]:
    """Rope object of that name without its nulls, the older `type` renamed to `rope_type`."""
    style = {key: value for key, value in keys.mapping(name).items() if value is not None}
    older = style.pop("type", None)
    if older is not None and style.setdefault("rope_type", older) != older:
        other = f"rope_type, {show(style['rope_type'])}"
        keys.contradicts(f"{name}.type", older, other, "keep one of the two")
    if style:
        style.setdefault("rope_type", "default")
    return style


def _rotary_dim(common: Section, head_dim: int) -> int:
    """Elements of a head that rotate: `int(head_dim * partial_rotary_factor)`, even (SPEC 7.2)."""
    share = 1.0
    if common.has("partial_rotary_factor"):
        share = common.number("partial_rotary_factor")
    rotary_dim = int(head_dim * share) if share <= 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        key = "partial_rotary_factor" if common.has("partial_rotary_factor") else "head_dim"
        where = common if common.has(key) else common.part({key: head_dim})
        where.refuse(key, f"an even number of the {head_dim} elements of a head must rotate")
    return rotary_dim


def _default(scaling: Section, theta: float, rotary_dim: int, positions: int) -> RopeParameters:
    return RopeParameters("default", theta, rotary_dim)


def _linear(scaling: Section, theta: float, rotary_dim: int, positions: int) -> RopeParameters:
    return RopeParameters("linear", theta, rotary_dim, factor=scaling.number("factor"))


def _dynamic(scaling: Section, theta: float, rotary_dim: int, positions: int) -> RopeParameters:
    if rotary_dim == 2:
        scaling.refuse("rope_type", "a rotary dimension of 2 has no such scaling; use default")
    if scaling.has("original_max_position_embeddings"):
        positions = scaling.integer("original_max_position_embeddings", MAX_POSITIONS)
    return RopeParameters(
        "dynamic",
        theta,
        rotary_dim,
        factor=scaling.number("factor"),
        original_max_positions=positions,
    )


def _llama3(scaling: Section, theta: float, rotary_dim: int, positions: int) -> RopeParameters:
    low = scaling.number("low_freq_factor")
    return RopeParameters(
        "llama3",
        theta,
        rotary_dim,
        factor=scaling.number("factor"),
        original_max_positions=scaling.integer("original_max_position_embeddings", MAX_POSITIONS),
        low_freq_factor=low,
        high_freq_factor=scaling.number("high_freq_factor", above=low),
    )


def _yarn(scaling: Section, theta: float, rotary_dim: int, positions: int) -> RopeParameters:
    def optional(key: str) -> float | None:
        return scaling.number_or_zero(key) if scaling.has(key) else None

    beta_slow = scaling.number("beta_slow") if scaling.has("beta_slow") else 1.0
    beta_fast = scaling.number("beta_fast") if scaling.has("beta_fast") else 32.0
    if beta_fast < beta_slow:
        scaling.refuse("beta_fast", f"it must not be below beta_slow, {beta_slow:g}")
    return RopeParameters(
        "yarn",
        theta,
        rotary_dim,
        factor=scaling.number("factor"),
        original_max_positions=scaling.integer("original_max_position_embeddings", MAX_POSITIONS),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=scaling.flag("truncate", default=True),
        attention_factor=scaling.number("attention_factor")
        if scaling.has("attention_factor")
        else None,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


def _longrope(scaling: Section, theta: float, rotary_dim: int, positions: int) -> RopeParameters:
    original = scaling.integer("original_max_position_embeddings", MAX_POSITIONS, least=2)
    return RopeParameters(
        "longrope",
        theta,
        rotary_dim,
        factor=scaling.number("factor") if scaling.has("factor") else positions / original,
        original_max_positions=original,
        attention_factor=scaling.number("attention_factor")
        if scaling.has("attention_factor")
        else None,
        short_factor=scaling.numbers("short_factor", rotary_dim // 2),
        long_factor=scaling.numbers("long_factor", rotary_dim // 2),
    )


_SCALINGS: Mapping[RopeKind, Callable[[Section, float, int, int], RopeParameters]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _context(keys: Section, rope: RopeParameters, positions: int) -> int:
    """Positions of the context: only `dynamic` goes beyond `max_position_embeddings`."""
    if rope.kind != "dynamic":
        return positions
    extended = rope.factor * rope.original_max_positions
    if extended > MAX_POSITIONS:
        keys.refuse("max_position_embeddings", f"times factor it must not exceed {MAX_POSITIONS}")
    return max(positions, math.floor(extended))
