"""What llama.cpp does otherwise than the reference, one named variant of the reference each.

A variant changes a model of the reference to do as llama.cpp does, so that what remains between the
two is rounding in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import elementary
from reference.arithmetic import F32
from reference.config import ModelConfig
from reference.model import Batch, Model, Part
from reference.rotary import RopeParameters, rope_constants, turn
from reference.threads import by_rows
from tools.engines.llama_cpp import EngineError

Seen = Mapping[str, F32]
"""Tensors of a run of llama.cpp, by name."""

GATES = r"ffn_gate-\d+"
"""Names of the outputs of gate projections, by layer."""

NEAR = 2e-5
"""How far a gate of llama.cpp may be from ours where both are rounded to half precision."""


@dataclass(frozen=True)
class Mechanism:
    """A variant: its name, what llama.cpp does, and the change of the reference.

    watch: the tensors of llama.cpp's run that the change needs.
    """

    name: str
    what: str
    change: Callable[[Model, Seen], Model]
    watch: str | None = None


# ----------------------------------------------------------------- what the configuration says


def _config(**changes: Any) -> Callable[[Model, Seen], Model]:
    """A change of the configuration; each value is made from it."""

    def change(model: Model, _: Seen) -> Model:
        config = model.config
        return replace(
            model, config=replace(config, **{key: make(config) for key, make in changes.items()})
        )

    return change


def _rope(**changes: Any) -> Callable[[Model, Seen], Model]:
    """A change of the rope; each value is made from it."""

    def rope(config: ModelConfig) -> RopeParameters:
        made = {key: make(config.rope) for key, make in changes.items()}
        return replace(config.rope, **made)

    return _config(rope=rope)


NO_WINDOW = Mechanism(
    "no window",
    "Its `llama` and `qwen2` have no sliding window, and converters write none for them; `phi3` "
    "reads the key, warns, and sets it to 0. Every layer sees all positions.",
    _config(windows=lambda config: (None,) * config.layers),
)
ONE_THETA = Mechanism(
    "one theta",
    "Mellum's layers with a window rotate by `rope.freq_base`; `rope.freq_base_swa`, theirs, is "
    "read and not used.",
    _config(local_rope=lambda config: replace(config.local_rope, theta=config.rope.theta)),
)
FACTOR_IGNORED = Mechanism(
    "factor ignored",
    "Converters store yarn's `attention_factor` as `rope.scaling.yarn_attn_factor`, which its "
    "OLMo 3 does not read: cos and sin have the factor that follows from yarn's scale.",
    _rope(attention_factor=lambda rope: None),
)
FACTOR_TWICE = Mechanism(
    "factor twice",
    "Where a file holds it as `rope.scaling.attn_factor`, as the converter of OLMo 3 once wrote "
    "it, llama.cpp multiplies the factor that it derives by it: cos and sin have both.",
    _rope(
        attention_factor=lambda rope: (
            float(rope_constants(replace(rope, attention_factor=None))[1]) * rope.attention_factor
        )
    ),
)
YARN_ROUNDED = Mechanism(
    "yarn rounded",
    "`ggml_rope_yarn_corr_dims` rounds the ends of yarn's range to integers, always; gpt-oss says "
    "`truncate: false`, which no key of a file says.",
    _rope(truncate=lambda rope: True),
)
LONG_FACTORS = Mechanism(
    "long factors",
    "LongRoPE's factors are chosen by the size of the context, not by the position: here 1,024 "
    "exceed the original 800, and all positions have the long ones.",
    _rope(short_factor=lambda rope: rope.long_factor),
)
LIMIT_7 = Mechanism(
    "limit of 7",
    "gpt-oss's gate and up outputs are clamped by 7, whatever `swiglu_limit` says, which "
    "converters do not write.",
    _config(glu_limit=lambda config: 7.0),
)


# ----------------------------------------------------------------------------------------- rope


def divisors(rope: RopeParameters) -> F32:
    """By what `rope_freqs` or `rope_factors` divide each frequency, (d/2,) float32."""
    if rope.kind == "longrope":
        return np.array(rope.short_factor, np.float32)
    plain = rope_constants(RopeParameters("default", rope.theta, rope.rotary_dim))[0]
    scaled = rope_constants(rope)[0].astype(np.float64)
    return (plain / scaled).astype(np.float32)


def angles(rope: RopeParameters, positions: NDArray[np.int64]) -> F32:
    """Angles as `ggml_rope_cache_init` has them, (T,) -> (T, d/2) float32.

    The first is the position, and each is the one before times `theta^(-2/d)`, rounded to float32
    every time. Scaling comes after.
    """
    pairs, f32 = rope.rotary_dim // 2, np.float32
    step = f32(np.float64(f32(rope.theta)) ** np.float64(f32(-2.0) / f32(rope.rotary_dim)))
    steps = np.full((len(positions), pairs), step)
    steps[:, 0] = positions
    angle: F32 = np.multiply.accumulate(steps, axis=1)
    if rope.kind in ("llama3", "longrope"):
        return np.asarray(angle / divisors(rope))
    interpolated: F32 = f32(1) / f32(rope.factor) * angle
    if rope.kind != "yarn":
        return interpolated
    low, high = (_pair(rope, beta) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, f32(0)), min(high, f32(rope.rotary_dim - 1))
    ramp = (np.arange(pairs, dtype=f32) - low) / max(high - low, f32(0.001))
    kept = f32(1) - np.clip(ramp, f32(0), f32(1))
    return np.asarray(interpolated * (f32(1) - kept) + angle * kept)


def _pair(rope: RopeParameters, beta: float) -> np.float32:
    """The pair that turns `beta` times within the original length, as float32."""
    f32 = np.float32
    turns = np.log(f32(rope.original_max_positions) / (f32(beta) * f32(2) * f32(np.pi)))
    return f32(rope.rotary_dim) * f32(turns) / (f32(2) * f32(np.log(f32(rope.theta))))


class _Products(Model):
    """A model that rotates by the angles above."""

    def _begin(self, parts: Sequence[Part]) -> Batch:
        batch = super()._begin(parts)
        positions = np.concatenate([p.start + np.arange(len(p.tokens)) for p in parts])
        return replace(
            batch,
            rotations={
                rope: turn(angles(rope, positions), rope_constants(rope)[1]) if rope else ()
                for rope in batch.rotations
            },
        )


def _products(model: Model, _: Seen) -> Model:
    return _Products(model.config, model.weights, model.operations)


PRODUCTS = Mechanism(
    "products",
    "An angle is the position times `theta^(-2/d)` again and again, rounded to float32 each time, "
    "where others multiply the position by `inv_freq` once.",
    _products,
)


# ----------------------------------------------------------------------------------------- GELU


def half(x: F32) -> F32:
    """Rounded to half precision."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def table_entry(x: F32) -> F32:
    """`ggml_table_gelu_f16` at x, which is a half-precision number.

    `0.5 x (1 + tanh(c x (1 + a x x)))` in float32, of which the inner sum is fused, as compilers
    do: all 65,536 entries of the build that was measured are these.
    """
    f32, f64 = np.float32, np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        inner = ((f32(0.044715) * x).astype(f64) * x.astype(f64) + 1).astype(f32)
        tanh = elementary.tanh(f32(0.7978846) * x * inner)
        return half(f32(0.5) * x * (f32(1) + tanh))


def gelu_by_table(x: F32, index: F32 | None = None) -> F32:
    """`ggml_vec_gelu_f32`: the table's entry at x rounded to half precision.

    Outside of -10 to 10 it is 0, and x. index: what is rounded in x's stead.
    """
    inside = table_entry(half(x if index is None else index))
    return np.where(x <= -10, np.float32(0), np.where(x >= 10, x, inside))


def _gelu(function: Callable[[F32], F32], model: Model, **operations: Any) -> Model:
    activations = {**model.operations.activations, "gelu_tanh": function}
    return replace(
        model, operations=replace(model.operations, activations=activations, **operations)
    )


def _gelu_index(model: Model, seen: Seen) -> Model:
    """Layers are computed one after the other, whole, so that each finds its own gates."""
    gates = iter([seen[name] for name in sorted(seen, key=lambda name: int(name.split("-")[1]))])

    def gelu(x: F32) -> F32:
        theirs = next(gates)
        distance = np.abs(theirs - x).max()
        if not distance < NEAR:
            raise EngineError(
                f"gates differ by {distance:.1e}: something besides rounding is wrong"
            )
        return gelu_by_table(x, theirs)

    return _gelu(gelu, model, by_rows=lambda step, *rows: step(*rows))


GELU_TABLE = Mechanism(
    "GELU table",
    "GELU is looked up in a table of half-precision values by its argument rounded to half "
    "precision.",
    lambda model, _: _gelu(gelu_by_table, model, by_rows=by_rows),
)
GELU_INDEX = Mechanism(
    "its roundings",
    "The table is a step function, and a gate that float32 moves across a step changes by 2^-11 of "
    "itself. Where ours and llama.cpp's, within 2e-5 of one another, round to different halves, "
    "its half is the index.",
    _gelu_index,
    GATES,
)
