"""Rotary embedding in a configuration: its keys in both styles and by type of layer (SPEC 7.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reference.config.section import Section, show
from reference.families import Family
from reference.rotary import RopeKind, RopeParameters

MAX_POSITIONS = 2**24  # a position is a float32 in the angle of rope (SPEC 7.3)
MIN_DIVISOR = 1e-30  # so that no angle overflows: MAX_POSITIONS / 1e-30 is a float32 (SPEC 7.3)
MAX_MSCALE = 1e30  # so that yarn's factor, 0.1 * mscale * ln(factor) + 1, is a float32 (SPEC 7.2)
HARMLESS_IN_ROPE = frozenset({"finetuned"})  # whether the scaled model was trained further

_IN_EITHER_PLACE = ("rope_theta", "partial_rotary_factor")

LAYER_TYPES = ("full_attention", "sliding_attention")


def parse_ropes(
    keys: Section, family: Family, head_dim: int, positions: int
) -> tuple[RopeParameters, RopeParameters | None]:
    """The rope of all layers, and that of layers with a window if they have their own.

    positions: `max_position_embeddings`. Raises ConfigError (SPEC 7.2, 10.3).
    """
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
    """Rope of SPEC 7.2 from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

    positions: `max_position_embeddings`. Raises ConfigError.
    """
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
    return RopeParameters(
        "linear", theta, rotary_dim, factor=scaling.number("factor", above=MIN_DIVISOR)
    )


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
        factor=scaling.number("factor", above=MIN_DIVISOR),
        original_max_positions=scaling.integer("original_max_position_embeddings", MAX_POSITIONS),
        low_freq_factor=low,
        high_freq_factor=scaling.number("high_freq_factor", above=low),
    )


def _yarn(scaling: Section, theta: float, rotary_dim: int, positions: int) -> RopeParameters:
    def mscale(key: str) -> float | None:
        if not scaling.has(key):
            return None
        value = scaling.number_or_zero(key)
        if value > MAX_MSCALE:
            scaling.refuse(key, f"give a number up to {MAX_MSCALE:g}")
        return value

    beta_slow = scaling.number("beta_slow") if scaling.has("beta_slow") else 1.0
    beta_fast = scaling.number("beta_fast") if scaling.has("beta_fast") else 32.0
    if beta_fast < beta_slow:
        scaling.refuse("beta_fast", f"it must not be below beta_slow, {beta_slow:g}")
    return RopeParameters(
        "yarn",
        theta,
        rotary_dim,
        factor=scaling.number("factor", above=MIN_DIVISOR),
        original_max_positions=scaling.integer("original_max_position_embeddings", MAX_POSITIONS),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=scaling.flag("truncate", default=True),
        attention_factor=_attention_factor(scaling),
        mscale=mscale("mscale"),
        mscale_all_dim=mscale("mscale_all_dim"),
    )


def _longrope(scaling: Section, theta: float, rotary_dim: int, positions: int) -> RopeParameters:
    original = scaling.integer("original_max_position_embeddings", MAX_POSITIONS, least=2)
    return RopeParameters(
        "longrope",
        theta,
        rotary_dim,
        factor=scaling.number("factor") if scaling.has("factor") else positions / original,
        original_max_positions=original,
        attention_factor=_attention_factor(scaling),
        short_factor=scaling.numbers("short_factor", rotary_dim // 2, above=MIN_DIVISOR),
        long_factor=scaling.numbers("long_factor", rotary_dim // 2, above=MIN_DIVISOR),
    )


def _attention_factor(scaling: Section) -> float | None:
    """The factor on cos and sin where it is given, None where it is to be computed (SPEC 7.2)."""
    return scaling.float32("attention_factor") if scaling.has("attention_factor") else None


_SCALINGS: Mapping[RopeKind, Callable[[Section, float, int, int], RopeParameters]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
