"""What a configuration says of a model: `config.json` in, a checked `ModelConfig` out (SPEC 10.3).

Every key of the file is read, known to be harmless, or refused by name: a setting that is silently
ignored is a wrong result that nobody sees. For the same reason a key which changes results has no
default here, even where a popular library has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

from reference.errors import ConfigError
from reference.rotary import RopeKind, RopeParameters

Activation = Literal["silu", "gelu_tanh"]
Name = TypeVar("Name", bound=str)

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_POSITIONS = 2**24  # a position is a float32 in the angle of rope (SPEC 7.3)


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder, as SPEC 10.2 runs it; `windows` holds one entry a layer, None for none.

    `max_positions` is the number of positions of the context: `max_position_embeddings`, extended
    by `factor` for `dynamic` rope.
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
    qk_norm: bool
    windows: tuple[int | None, ...]
    activation: Activation


# ------------------------------------------------------------------------------ families as data


@dataclass(frozen=True)
class Family:
    """One row of the table of SPEC 10.3.

    A bias is there (True), is not (False), or is as the key of that name says. `required` are keys
    for which the families' writers have different defaults, so that none may be assumed.
    """

    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "every layer", "by layer"] = "none"
    required: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        window="every layer",
        required=("num_key_value_heads", "sliding_window"),
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        qkv_bias=True,
        window="by layer",
        required=("num_key_value_heads",),
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="by layer",
        required=("num_key_value_heads", "head_dim"),
    ),
}

ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

HARMLESS = frozenset(
    {
        # Used in training only.
        "attention_dropout",
        "initializer_range",
        "neftune_noise_alpha",
        # How the file came about, and which classes read it elsewhere.
        "name_or_path",
        "tokenizer_class",
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
        "max_sequence_length",
    }
)

# Keys that are accepted with this one value.
FIXED: Mapping[str, int] = {"pretraining_tp": 1, "chunk_size_feed_forward": 0}

HARMLESS_IN_ROPE = frozenset({"finetuned"})  # whether the scaled model was trained further


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Check the JSON object of a `config.json`; `where` names the file in messages (SPEC 10.3, 12).

    Raises ConfigError, in one line that names the file, the key, its value and the remedy, for a
    key that is missing, contradictory, out of range, or not supported.
    """
    keys = Section(raw, where)
    architecture, family = _family(keys)
    layers = keys.integer("num_hidden_layers", most=MAX_LAYERS)
    heads, kv_heads, head_dim = _heads(keys)
    positions = keys.integer("max_position_embeddings", most=MAX_POSITIONS)
    rope = parse_rope(keys, head_dim, positions)
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
        tied=keys.flag("tie_word_embeddings"),
        qkv_bias=_switch(keys, family.qkv_bias),
        o_bias=_switch(keys, family.o_bias),
        mlp_bias=_switch(keys, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(keys, family, layers),
        activation=ACTIVATIONS[keys.choice("hidden_act", ACTIVATIONS)],
    )
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
            if value is None or value is False or value in ("", [], {}):
                continue
            if key not in FIXED:
                self.refuse(key, "this key is not supported; remove it if it changes no result")
            if type(value) is not int or value != FIXED[key]:
                self.refuse(key, f"only {FIXED[key]} is supported")

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
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(FAMILIES):
        keys.refuse("architectures", f"give a list of one of {', '.join(FAMILIES)}")
    family = FAMILIES[names[0]]
    kind = keys.value("model_type") if keys.has("model_type") else family.model_type
    if kind != family.model_type:
        remedy = f"give {family.model_type!r} or remove the key"
        keys.contradicts("model_type", kind, f"the architecture {names[0]}", remedy)
    for key in family.required:
        keys.require(key)
    return names[0], family


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


def _switch(keys: Section, switch: bool | str) -> bool:
    """Value of a switch of the family table."""
    return keys.flag(switch) if isinstance(switch, str) else switch


def _windows(keys: Section, family: Family, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer (SPEC 8.1, 10.3), None where it sees all that came before."""
    if family.window == "none":
        return (None,) * layers
    if family.window == "every layer":
        return (_window(keys),) * layers
    if keys.flag("use_sliding_window"):
        keys.require("sliding_window")
        window = _window(keys)
    else:
        _ignore(keys, "sliding_window")
        window = None
    if keys.has("layer_types"):
        _ignore(keys, "max_window_layers")
        return _windows_by_type(keys, window, layers)
    if window is None:
        _ignore(keys, "max_window_layers")
        return (None,) * layers
    first = keys.integer("max_window_layers", least=0)  # that many at the bottom see everything
    return tuple(window if layer >= first else None for layer in range(layers))


def _window(keys: Section) -> int | None:
    return keys.integer("sliding_window") if keys.has("sliding_window") else None


def _ignore(keys: Section, key: str) -> None:
    """Mark a key as read whose value another key has made void."""
    if keys.has(key):
        keys.value(key)


def _windows_by_type(keys: Section, window: int | None, layers: int) -> tuple[int | None, ...]:
    """Windows from `layer_types`, one name a layer."""
    types = keys.value("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        keys.refuse("layer_types", f"give a list of {layers} names, one a layer")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            keys.refuse("layer_types", "supported are full_attention and sliding_attention")
    if window is None and "sliding_attention" in types:
        remedy = "set use_sliding_window and sliding_window, or name the layers full_attention"
        keys.contradicts("layer_types", types, "the lack of a window in use", remedy)
    return tuple(window if name == "sliding_attention" else None for name in types)


# ------------------------------------------------------------------------------------------- rope

_IN_EITHER_PLACE = ("rope_theta", "partial_rotary_factor")


def parse_rope(keys: Section, head_dim: int, positions: int) -> RopeParameters:
    """Rope of SPEC 7.2 from `rope_theta` and `rope_scaling`, or from `rope_parameters`."""
    common, scaling = _rope_sections(keys)
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
    return keys.part(common), keys.part(new or old or {"rope_type": "default"}, f"{name}.")


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


_SCALINGS: Mapping[RopeKind, Callable[[Section, float, int, int], RopeParameters]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _context(keys: Section, rope: RopeParameters, positions: int) -> int:
    """Positions of the context: only `dynamic` goes beyond `max_position_embeddings`."""
    if rope.kind != "dynamic":
        return positions
    extended = rope.factor * rope.original_max_positions
    if extended > MAX_POSITIONS:
        keys.refuse("max_position_embeddings", f"times factor it must not exceed {MAX_POSITIONS}")
    return max(positions, math.floor(extended))
