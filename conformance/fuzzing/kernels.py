"""Draws for elementary functions, norms, linear layers, quantization, rope, the gated layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from conformance.cases.linear import random_blocks
from conformance.cases.recipe import EXACT
from conformance.fuzzing.draw import BOUNDED, Draw, data, to_power
from conformance.fuzzing.drawn import Drawer, Drawn
from conformance.generator import seed_of, words
from reference.arithmetic import BLOCK, F32
from reference.blocks import BlockType
from reference.rotary import RopeParameters, rope_constants

WORK = 1 << 18
"""Products of one call of a linear layer, at most."""

LARGE = 36
"""The power of two of a block that another one cancels."""

TAME = tuple(kind for kind in BOUNDED if kind not in ("tiny", "subnormal"))
"""Data far from underflow."""


def function(draw: Draw) -> Drawn:
    """exp, log, sin, cos or tanh: any float32 at all, or some near 0 (SPEC 4.1)."""
    count = draw.size("count", 1024)
    kind = draw.pick("x", ("normal", "wide", "any-bits", "tiny", "subnormal", "huge"))
    x = draw.normal("x", count)
    if kind == "any-bits":
        bits = words(seed_of(f"{draw.name}/x/bits"), count) >> np.uint64(32)
        x = bits.astype(np.uint32).view(np.float32)
    else:
        x = to_power(x, {"normal": 3, "wide": 5, "tiny": -40, "subnormal": -140, "huge": 60}[kind])
    return Drawn({}, {"x": x})


def activation(draw: Draw) -> Drawn:
    """sigmoid, silu or gelu_tanh (SPEC 4.2)."""
    x = draw.data("x", draw.size("count", 1024)) * np.float32(draw.pick("scale", (1.0, 0.1, 8.0)))
    return Drawn({}, {"x": x}, not draw.extreme)


def softmax(draw: Draw) -> Drawn:
    """Rows alike, far apart, tied; -inf where bits are asked (SPEC 4.3)."""
    rows, width = draw.size("rows", 9), draw.size("width", 2049)
    scale = np.float32(draw.pick("scale", (1.0, 0.0, 4.0, 16.0, 100.0)))
    x = draw.data("x", rows, width)
    with np.errstate(invalid="ignore"):
        x = x * scale
    forbidden = draw.asked.exact and draw.flag("forbidden")
    if forbidden:
        x[draw.integers("forbidden", 3, rows, width) == 0] = -np.inf
    return Drawn({}, {"x": x}, not (draw.extreme or forbidden))


def rms_norm(draw: Draw) -> Drawn:
    """Rows whose mean square lies far above eps, near it, and below (SPEC 6)."""
    rows, width = draw.size("rows", 17), draw.size("width", 4097)
    eps = draw.pick("eps", (1e-6, 1e-5, 1e-12, 1e-3))
    x = draw.data("x", rows, width) * np.float32(draw.pick("scale", (1.0, 2**-10, 2**-7, 2**7)))
    return Drawn({"eps": eps}, {"x": x, "weight": draw.data("weight", width)}, not draw.extreme)


# ------------------------------------------------------------------------------ linear layers


def shape(draw: Draw, work: int = WORK) -> tuple[int, int, int]:
    """T, N and K of a linear layer, T N K at most `work`."""
    width = draw.size("width", 4097)
    rows = draw.size("rows", min(65, max(1, work // width)))
    if width**2 * rows <= work and draw.pick("square", (False, False, False, True)):
        return rows, width, width
    return rows, draw.size("columns", min(513, max(1, work // (width * rows)))), width


def linear(draw: Draw) -> Drawn:
    """With a bias or without (SPEC 10.1)."""
    rows, columns, width = shape(draw)
    inputs = {"x": draw.data("x", rows, width), "w": draw.data("w", columns, width)}
    if width >= 3 * BLOCK and not draw.asked.narrow and opposite(draw):
        x, w = inputs["x"].T, inputs["w"].T
        x[:BLOCK] = to_power(x[:BLOCK], LARGE)
        x[2 * BLOCK : 3 * BLOCK], w[2 * BLOCK : 3 * BLOCK] = -x[:BLOCK], w[:BLOCK]
    if draw.flag("bias"):
        inputs["bias"] = draw.data("b", columns)
    return Drawn({}, inputs, not draw.extreme)


def opposite(draw: Draw) -> bool:
    """Whether two blocks of a sum are large and cancel, so that its order shows in what is left."""
    return draw.pick("opposite-blocks", (False, False, False, True))


def weights(draw: Draw, rows: int, width: int) -> F32:
    """What int4 can hold, (rows, width): finite, its largest below 7 times 65,504 (SPEC 5.1)."""
    kind = draw.pick("w", (*BOUNDED, "halves"))
    if kind == "halves":  # every half between two codes, at scales that are powers of two
        halves = draw.integers("w/halves", 29, rows, width) - 14
        return to_power(halves.astype(np.float32), draw.pick("power", (-1, -4, 4, -25)))
    return data(f"{draw.name}/w", kind, rows, width)


def quantize_int4(draw: Draw) -> Drawn:
    """By group and by row (SPEC 5.1 to 5.3)."""
    group = draw.pick("group", (32, 0))
    w = weights(draw, draw.size("rows", 33), draw.size("width", 513))
    return Drawn({"group": group}, {"w": w})


def quantize_int8(draw: Draw) -> Drawn:
    """One scale a row (SPEC 5.4)."""
    x = draw.data("x", draw.size("rows", 33), draw.size("width", 513), kinds=BOUNDED)
    return Drawn({}, {"x": x})


def linear_int4(draw: Draw) -> Drawn:
    """On weights that the reference quantized (SPEC 5.5)."""
    group = draw.pick("group", (32, 0))
    rows, columns, width = shape(draw)
    packed, scales = EXACT.quantize_int4(weights(draw, columns, width), group)
    x = draw.data("x", rows, width, kinds=TAME)
    return Drawn({"group": group}, {"x": x, "packed": packed, "scales": scales}, not draw.extreme)


def linear_w4a16(draw: Draw) -> Drawn:
    """All codes, scales of either sign, zero points or none (SPEC 5.9)."""
    group = draw.pick("group", (128, 32, 64, 0))
    rows, columns, width = shape(draw)
    groups = -(-width // group) if group else 1
    steps = to_power(draw.normal("scales", columns, groups), draw.pick("power", (-6, 0, -13)))
    inputs: dict[str, Any] = {
        "x": draw.data("x", rows, width, kinds=TAME),
        "packed": draw.integers("codes", 256, columns, -(-width // 2)).astype(np.uint8),
        "scales": steps.astype(np.float16),
    }
    if draw.flag("zeros"):
        inputs["zeros"] = draw.integers("zeros/z", 16, columns, groups).astype(np.uint8)
    return Drawn({"group": group}, inputs, not draw.extreme)


def linear_blocks(kind: BlockType, draw: Draw) -> Drawn:
    """On the blocks of GGUF files (SPEC 5.7)."""
    rows = draw.size("rows", 65)
    groups = draw.size("groups", min(16, max(1, WORK // (32 * rows))))
    columns = draw.size("columns", min(129, max(1, WORK // (32 * rows * groups))))
    blocks = random_blocks(kind, f"{draw.name}/blocks", columns, groups)
    if draw.flag("zero-scales"):
        blocks[draw.integers("zero-scales", 4, columns, groups) == 0, :2] = 0
    x = draw.data("x", rows, 32 * groups, kinds=TAME)
    return Drawn({}, {"x": x, "blocks": blocks}, not draw.extreme)


def gated_mlp(draw: Draw) -> Drawn:
    """Both activations (SPEC 9.1)."""
    width = draw.size("width", 257)
    inner = draw.size("inner", min(257, WORK // (2 * width)))
    rows = draw.size("rows", min(33, max(1, WORK // (width * inner))))
    name = draw.pick("activation", ("silu", "gelu_tanh"))
    layer = {part: draw.normal(part, *s) for part, s in layer_shapes(width, inner).items()}
    inputs = {"x": draw.data("x", rows, width, kinds=TAME)}
    inputs |= {part: scaled(w) for part, w in layer.items()}
    return Drawn({"activation": name}, inputs, not draw.extreme)


def layer_shapes(width: int, inner: int) -> dict[str, tuple[int, int]]:
    """The three matrices of a gated layer."""
    return {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}


def scaled(w: F32) -> F32:
    """Weights (..., K) over about the root of K, a power of two, so that results are about 1."""
    return to_power(w, -(w.shape[-1].bit_length() // 2))


# ------------------------------------------------------------------------------ rope

THETAS = (10000.0, 500000.0, 1000000.0, 150000.0, 1.5)
FACTORS = (2.0, 1.0, 4.0, 2.5, 8.0, 32.0, 0.5)
LENGTHS = (1024, 4096, 8192, 131072)


def rotary(draw: Draw, least: int = 1) -> tuple[int, int]:
    """head_dim and the elements of it that rotate, an even number."""
    half = draw.size("half", 64, least)
    return 2 * half + draw.pick("passed-through", (0, 2, 32, 2 * half)), 2 * half


def constants(draw: Draw) -> Drawn:
    """Every kind of SPEC 7.2."""
    kind = draw.pick("kind", ("default", "linear", "dynamic", "llama3", "yarn", "longrope"))
    head_dim, turned = rotary(draw, least=2)
    about: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": draw.pick("theta", THETAS),
        "head_dim": head_dim,
        "max_position_embeddings": draw.pick("positions", LENGTHS),
    }
    if turned != head_dim:
        about["partial_rotary_factor"] = share(turned, head_dim)
    about |= _scaling(draw, kind, turned // 2)
    return Drawn({"parameters": about, "position": draw.size("position", 200_000, 0)}, {})


def share(turned: int, head_dim: int) -> float:
    """The `partial_rotary_factor` by which so many elements rotate, cut off as SPEC 7.2 cuts."""
    ratio = turned / head_dim
    return ratio if int(head_dim * ratio) == turned else math.nextafter(ratio, 1)


def _scaling(draw: Draw, kind: str, half: int) -> Mapping[str, Any]:
    """The keys of a kind; those that may be left out are left out as often as not."""
    about: dict[str, Any] = {}
    if kind != "default" and (kind != "longrope" or draw.flag("with-factor")):
        about["factor"] = draw.pick("factor", FACTORS)
    if kind in ("llama3", "yarn", "longrope"):
        about["original_max_position_embeddings"] = draw.pick("original", LENGTHS)
    if kind == "llama3":
        about |= {
            "low_freq_factor": draw.pick("low", (1.0, 0.5)),
            "high_freq_factor": draw.pick("high", (4.0, 1.5)),
        }
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            steps = draw.integers(name, 64, half)
            about[name] = (1.0 + steps / 4).tolist()
    if kind == "yarn":
        options: dict[str, tuple[Any, ...]] = {
            "beta_fast": (32.0, 16.0), "beta_slow": (1.0, 2.0), "truncate": (True, False),
            "mscale": (1.0, 0.707), "mscale_all_dim": (1.0, 0.8),
        }  # fmt: skip
        about |= {n: draw.pick(n, o) for n, o in options.items() if draw.flag(f"with-{n}")}
    if kind in ("yarn", "longrope") and draw.flag("with-attention_factor"):
        about["attention_factor"] = draw.pick("attention_factor", (1.0, 1.25))
    return about


def rope(draw: Draw) -> Drawn:
    """Both pairings, whole or partial, at any positions (SPEC 7.4)."""
    head_dim, turned = rotary(draw)
    rows, heads = draw.size("rows", 65), draw.size("heads", 9)
    x = draw.data("x", rows, heads, head_dim)
    most = draw.pick("positions", (1 << 12, 1 << 17, 1 << 24))
    positions = draw.integers("positions", most, rows)
    if draw.flag("in-order"):
        positions = positions[0] % (most - rows) + np.arange(rows)
    inv_freq, _ = rope_constants(RopeParameters("default", draw.pick("theta", THETAS), turned))
    factor = draw.pick("factor", (1.0, float(np.float32(1.1386294)), 0.5))
    about = {"interleaved": draw.flag("interleaved"), "factor": factor}
    inputs: dict[str, Any] = {"x": x, "positions": positions, "inv_freq": inv_freq.copy()}
    return Drawn(about, inputs, not draw.extreme)


ELEMENTARY: Mapping[str, Drawer] = {
    **dict.fromkeys(("exp", "log", "sin", "cos", "tanh"), function),
    **dict.fromkeys(("sigmoid", "silu", "gelu_tanh"), activation),
    "softmax": softmax,
}

KERNELS: Mapping[str, Drawer] = {
    "linear": linear,
    "quantize_int4": quantize_int4,
    "quantize_int8": quantize_int8,
    "linear_int4": linear_int4,
    "linear_w4a16": linear_w4a16,
    "linear_q4_0": partial(linear_blocks, "Q4_0"),
    "linear_q8_0": partial(linear_blocks, "Q8_0"),
    "rms_norm": rms_norm,
    "rope_constants": constants,
    "rope": rope,
    "gated_mlp": gated_mlp,
}
