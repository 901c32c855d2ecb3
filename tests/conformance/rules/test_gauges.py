"""Bounds hold for what is legitimate, and not for what is wrong (SPEC 16.3 to 16.6).

Legitimate: the orders of SPEC 3 with and without FMA, online softmax in tiles of any size, numpy's
own float32 functions. Wrong: the small faults that real engines have had. The largest margin found
is recorded beside each test (`pytest --junit-xml`), so that a bound far too wide shows as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from conformance.rules import gauges, judge, unit_roundoff
from conformance.rules.gauges import Gauge
from reference import elementary
from reference.arithmetic import Order, matmul, matmul_float32, multiply_add
from reference.attention import attention_exact, attention_fast
from reference.feedforward import ACTIVATIONS, ACTIVATIONS_FLOAT32
from reference.normalization import rms_norm
from reference.rotary import RopeParameters, rope_constants, rotate, turn
from tests.oracle import nasty
from tests.oracle.goldens import margins, real_values

F32 = NDArray[Any]
Record = Callable[[str, object], None]
Dot = Callable[[F32, F32], F32]

U = 2.0**-24
ORDERS: tuple[Order, ...] = ("blas", "sequential", "pairwise", "lanes8", "float64")
WAYS = [
    (o, fma) for o in ORDERS for fma in (False, True) if o not in ("blas", "float64") or not fma
]


def dots() -> Iterator[tuple[str, Dot]]:
    """(T, K), (N, K) -> (T, N) in every order of SPEC 3."""
    for order, fma in WAYS:
        yield f"{order}{'+fma' if fma else ''}", partial(matmul_float32, order=order, fma=fma)


DOTS = dict(dots())


def normal(seed: int, *shape: int, spread: float = 1.0) -> F32:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def heavy(seed: int, *shape: int) -> F32:
    """Values over 24 binades, a third of them exact zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 4, shape)
    return np.where(rng.random(shape) < 1 / 3, 0, x).astype(np.float32)


def margin(exact: F32, gauge: Gauge, answer: F32, u: float = U) -> float:
    """The largest share of its bound that an answer uses."""
    golden = Golden(
        "a/b/c", "16", "b", {}, {}, {"y": exact}, (), gauge.terms, gauge.models, gauge.distance
    )
    verdict = judge("gauge", golden, {"y": answer}, u)
    assert verdict.worst is not None, verdict.message
    return verdict.worst


class Worst:
    """The largest margin, and where."""

    def __init__(self) -> None:
        self.value, self.at, self.count = 0.0, "", 0

    def add(self, value: float, at: str) -> None:
        self.count += 1
        if value > self.value:
            self.value, self.at = value, at

    def settle(self, record: Record, least: float, computations: int) -> None:
        """Record it: none exceeded its bound, and some came near enough to show that it is one."""
        record("worst", f"{self.value:.3f} at {self.at}, of {self.count}")
        assert self.count >= computations
        assert least <= self.value <= 1, (self.value, self.at)


# Legitimate float32.


def test_linear(record_property: Record) -> None:
    worst = Worst()
    for seed, width in enumerate((1, 2, 3, 7, 31, 32, 33, 64, 100, 257, 1024, 3000)):
        for kind, make in (("normal", normal), ("heavy", heavy)):
            x, w = make(seed, 8, width), make(seed + 50, 12, width)
            for bias in (None, normal(seed, 12)):
                y = matmul(x, w) if bias is None else matmul(x, w) + bias
                gauge = gauges.linear(x, w, bias, y)
                for name, dot in DOTS.items():
                    answer = dot(x, w) if bias is None else dot(x, w) + bias
                    worst.add(margin(y, gauge, answer), f"{name} {kind} K={width}")
    worst.settle(record_property, 0.3, 300)


def test_linear_of_one_sign(record_property: Record) -> None:
    """Partial sums as large as they can be: rounding errors are at their largest."""
    worst = Worst()
    for width in (16, 64, 512, 4096):
        x, w = np.abs(normal(width, 4, width)), np.abs(normal(width + 1, 8, width))
        y = matmul(x, w)
        gauge = gauges.linear(x, w, None, y)
        for name, dot in DOTS.items():
            worst.add(margin(y, gauge, dot(x, w)), f"{name} K={width}")
    worst.settle(record_property, 0.05, 30)


@pytest.mark.parametrize(("accumulator", "bits"), [("bfloat16", 16), ("tf32", 13)])
def test_linear_of_rounded_operands(accumulator: str, bits: int, record_property: Record) -> None:
    """Operands rounded to the declared precision, sums in float32: within its bound."""
    worst = Worst()

    def rounded(x: F32) -> F32:
        half, keep = np.uint32(1 << (bits - 1)), np.uint32((0xFFFFFFFF << bits) & 0xFFFFFFFF)
        return ((x.view(np.uint32) + half) & keep).view(np.float32)

    u = {"bfloat16": 2.0**-8, "tf32": 2.0**-11}[accumulator]
    for width in (1, 2, 32, 300):
        x, w = normal(width, 16, width), normal(width + 1, 40, width)
        y = matmul(x, w)
        gauge = gauges.linear(x, w, None, y)
        worst.add(margin(y, gauge, rounded(x) @ rounded(w).T, u), f"K={width}")
        assert margin(y, gauge, rounded(x) @ rounded(w).T) > 1
    worst.settle(record_property, 0.3, 4)


def test_rms_norm(record_property: Record) -> None:
    worst = Worst()
    for seed, width in enumerate((1, 2, 31, 33, 192, 1000)):
        for kind, x in (("normal", normal(seed, 8, width)), ("heavy", heavy(seed, 4, width))):
            weight = normal(seed + 1, width)
            for eps in (1e-5, 1e-6):
                y = rms_norm(x, weight, eps)
                gauge = gauges.rms_norm(x, y)
                for name, dot in DOTS.items():
                    squares = np.concatenate([dot(row[None], row[None]) for row in x])
                    mean = squares / np.float32(width) + np.float32(eps)
                    roots = (np.float32(1) / np.sqrt(mean), mean ** np.float32(-0.5))
                    for r in roots:
                        answer = (x * r) * weight
                        worst.add(margin(y, gauge, answer), f"{name} {kind} K={width}")
                        worst.add(margin(y, gauge, x * (r * weight)), f"{name} {kind} K={width}")
                    divided = x / np.sqrt(mean) * weight
                    worst.add(margin(y, gauge, divided), f"{name} {kind} K={width} division")
    worst.settle(record_property, 0.2, 900)


def test_softmax(record_property: Record) -> None:
    worst = Worst()
    for seed, width in enumerate((1, 2, 3, 32, 33, 100, 1000)):
        for spread in (0.1, 1.0, 10.0, 100.0):
            x = normal(seed, 6, width, spread=spread)
            y = elementary.softmax(x)
            gauge = gauges.softmax(x, y)
            m = x.max(axis=-1, keepdims=True)
            p = np.exp(x - m)
            ones = np.ones((1, width), np.float32)
            for name, dot in DOTS.items():
                total = dot(p, ones)
                at = f"{name} K={width} spread={spread}"
                worst.add(margin(y, gauge, p / total), at)
                worst.add(margin(y, gauge, p * (np.float32(1) / total)), at)
    worst.settle(record_property, 0.1, 400)


def test_activations(record_property: Record) -> None:
    x = np.concatenate([normal(1, 4000, spread=4), np.linspace(-104, 104, 4001).astype(np.float32)])
    half, one = np.float32(0.5), np.float32(1)
    with np.errstate(all="ignore"):
        sigmoid = one / (one + np.exp(-x))
        ways = {
            "sigmoid": (3, [sigmoid, half + half * np.tanh(half * x)]),
            "silu": (4, [x / (one + np.exp(-x)), x * sigmoid]),
            "gelu_tanh": (8, [ACTIVATIONS_FLOAT32["gelu_tanh"](x)]),
        }
    worst = Worst()
    for name, (roundings, answers) in ways.items():
        y = getattr(elementary, name)(x)
        gauge = gauges.elementwise(y, y if name == "sigmoid" else x, roundings)
        for i, answer in enumerate(answers):
            if (name, i) != ("sigmoid", 1):  # 0.5 + 0.5 tanh cancels: no relative accuracy
                worst.add(margin(y, gauge, answer), name)
    worst.settle(record_property, 0.05, 4)


def test_rope(record_property: Record) -> None:
    worst = Worst()
    positions = np.array([0, 1, 2, 5, 33, 100, 1000, 4095, 30000, 131071])
    for seed, (d, interleaved, factor) in enumerate(
        itertools.product((64, 32, 2), (False, True), (1.0, 1.25))
    ):
        inv_freq, _ = rope_constants(RopeParameters("default", 10000.0, d))
        angle = positions.astype(np.float32)[:, None] * inv_freq
        scale = np.float32(factor)
        x = normal(seed, len(positions), 3, 64)
        cos, sin = turn(angle, scale)
        y = rotate(x, cos, sin, interleaved)
        gauge = gauges.rope(x, cos, sin, angle, interleaved, factor)
        first = slice(0, d, 2) if interleaved else slice(0, d // 2)
        second = slice(1, d, 2) if interleaved else slice(d // 2, d)
        exact_angle = positions[:, None] * inv_freq.astype(np.float64)
        for name, (c, s) in {
            "float32": (np.cos(angle) * scale, np.sin(angle) * scale),
            "float64": (
                (np.cos(exact_angle) * scale).astype(np.float32),
                (np.sin(exact_angle) * scale).astype(np.float32),
            ),
        }.items():
            worst.add(margin(y, gauge, rotate(x, c, s, interleaved)), f"{name} d={d}")
            fused = x.copy()
            a, b, c, s = x[..., first], x[..., second], c[:, None], s[:, None]
            fused[..., first] = multiply_add(a, c, -(b * s), True)
            fused[..., second] = multiply_add(b, c, a * s, True)
            worst.add(margin(y, gauge, fused), f"{name} fma d={d}")
    worst.settle(record_property, 0.2, 40)


def online(
    q: F32,
    k: F32,
    v: F32,
    dot: Dot,
    tile: int,
    scale: np.float32,
    window: int | None = None,
    softcap: np.float32 | None = None,
    sinks: F32 | None = None,
) -> F32:
    """Attention as other engines compute it: float32, an online softmax over tiles of keys."""
    rows, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    positions = np.arange(len(k) - rows, len(k))[:, None]
    for h in range(heads):
        m = np.full((rows, 1), -np.inf, np.float32)
        total, acc = np.zeros((rows, 1), np.float32), np.zeros((rows, width), np.float32)
        for start in range(0, len(k), tile):
            j = np.arange(start, min(start + tile, len(k)))
            u = dot(q[:, h], np.ascontiguousarray(k[j, h // group])) * scale
            if softcap is not None:
                u = softcap * np.tanh(u / softcap)
            back = positions - j
            visible = (back >= 0) & (back < (window or len(k)))
            u = np.where(visible, u, np.float32(-np.inf))
            higher = np.maximum(m, u.max(axis=-1, keepdims=True))
            safe = np.where(np.isfinite(higher), higher, np.float32(0))
            p, rescale = np.exp(u - safe), np.exp(m - safe)
            total = total * rescale + dot(p, np.ones((1, len(j)), np.float32))
            acc = acc * rescale + dot(p, np.ascontiguousarray(v[j, h // group].T))
            m = higher
        if sinks is not None and np.isfinite(sinks[h]):
            higher = np.maximum(m, sinks[h])
            total = total * np.exp(m - higher) + np.exp(sinks[h] - higher)
            acc = acc * np.exp(m - higher)
        out[:, h] = acc / total
    return out


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": np.array([-np.inf, 0.0, 20.0, -3.0], np.float32)},
    "all": {"window": 33, "softcap": 30.0, "sinks": np.array([0.5, 1, 5, 8], np.float32)},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention(options: dict[str, Any], record_property: Record) -> None:
    worst = Worst()
    shapes = ((5, 5, 8), (6, 40, 16), (3, 100, 64), (12, 130, 1))
    for seed, ((rows, keys, width), spread) in enumerate(
        itertools.product(shapes, (0.3, 2.0, 12.0))
    ):
        q = normal(seed, rows, 4, width, spread=spread)
        k, v = normal(seed + 100, keys, 2, width), normal(seed + 200, keys, 2, width)
        scale = np.float32(width**-0.5)
        about = {"scale": scale, **options}
        y = attention_exact(q, k, v, **about)
        gauge = gauges.attention(q, k, v, y, **about)
        worst.add(margin(y, gauge, attention_fast(q, k, v, **about)), "fast")
        exact = {
            **about,
            "softcap": None if "softcap" not in options else np.float32(options["softcap"]),
        }
        for name, dot in DOTS.items():
            for tile in (1, 13, keys):
                if tile == 1 and name not in ("blas", "sequential"):
                    continue
                with np.errstate(all="ignore"):
                    answer = online(q, k, v, dot, tile, **exact)
                at = f"{name} tile={tile} S={keys} D={width} spread={spread}"
                worst.add(margin(y, gauge, answer), at)
    worst.settle(record_property, 0.05, 200)


def test_gated_mlp(record_property: Record) -> None:
    worst = Worst()
    for seed, (width, inner) in enumerate(((1, 1), (7, 3), (32, 64), (100, 37), (192, 512))):
        for (name, act), spread in itertools.product(ACTIVATIONS.items(), (0.1, 1.0, 4.0)):
            x = normal(seed, 5, width, spread=spread)
            gate, up = normal(seed + 1, inner, width), normal(seed + 2, inner, width)
            down = normal(seed + 3, width, inner)
            g, u = matmul(x, gate), matmul(x, up)
            a = act(g)
            y = matmul(a * u, down)
            gauge = gauges.gated_mlp(x, gate, up, down, g, a, u)
            for order, dot in DOTS.items():
                hidden = ACTIVATIONS_FLOAT32[name](dot(x, gate)) * dot(x, up)
                worst.add(margin(y, gauge, dot(hidden, down)), f"{order} {name} K={width}")
    worst.settle(record_property, 0.02, 200)


# The exact lane lies within its distance from real values, on nasty inputs too.


def settle_distance(record: Record, found: list[float], least: float) -> None:
    record("worst", round(float(max(found)), 3))
    assert least <= max(found) <= 1, max(found)


def test_distance_of_linear(record_property: Record) -> None:
    found = []
    for seed in range(14):
        rng = np.random.default_rng(seed)
        width = (1, 5, 32, 40, 70)[seed % 5]
        x, w = (
            np.clip(nasty.matrix(rng, 6, width), -(2.0**60), 2.0**60).astype(np.float32)
            for _ in "xw"
        )
        bias = None if seed % 2 else normal(seed, 6)
        y = matmul(x, w) if bias is None else matmul(x, w) + bias
        gauge = gauges.linear(x, w, bias, y)
        inputs = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
        assert gauge.distance is not None
        found.append(margins(y, real_values("linear", inputs, {}), gauge.distance).max())
    settle_distance(record_property, found, 0.5)


def test_distance_of_rms_norm(record_property: Record) -> None:
    found = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        width = (1, 5, 32, 40, 70)[seed % 5]
        x = np.clip(nasty.matrix(rng, 6, width), -(2.0**60), 2.0**60).astype(np.float32)
        weight = normal(seed, width)
        eps = (1e-5, 1e-6)[seed % 2]
        y = rms_norm(x, weight, eps)
        distance = gauges.rms_norm(x, y).distance
        assert distance is not None
        values = real_values("rms_norm", {"x": x, "weight": weight}, {"eps": eps})
        found.append(margins(y, values, distance).max())
    settle_distance(record_property, found, 0.3)


def test_distance_of_softmax(record_property: Record) -> None:
    found = []
    for seed in range(10):
        width = (2, 5, 32, 40, 70)[seed % 5]
        x = normal(seed, 5, width, spread=(0.1, 3, 30, 60)[seed % 4])
        x[0, 0] = -np.inf
        x[1] = x[1, 0]
        y = elementary.softmax(x)
        distance = gauges.softmax(x, y).distance
        assert distance is not None
        found.append(margins(y, real_values("softmax", {"x": x}, {}), distance).max())
    settle_distance(record_property, found, 0.3)


def test_distance_of_attention(record_property: Record) -> None:
    found = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        rows, keys, width = ((2, 9, 5), (3, 40, 8), (2, 70, 33))[seed % 3]
        kinds = ("normal", "spike", "cancelling", "halves", "signed zeros", "subnormal")
        q, k = (
            np.stack([nasty.row(rng, kinds[int(i)], width) for i in rng.integers(0, 6, n * 2)])
            .reshape(n, 2, width)
            .clip(-64, 64)
            .astype(np.float32)
            for n in (rows, keys)
        )
        milder = ("normal", "halves", "cancelling", "zero blocks", "signed zeros")
        v = np.stack([nasty.row(rng, milder[int(i)], width) for i in rng.integers(0, 5, keys * 2)])
        v = np.ldexp(v, rng.integers(-12, 12, (keys * 2, 1))).reshape(keys, 2, width)
        scale = float(np.float32(width**-0.5))
        options: dict[str, Any] = {"scale": scale, "window": None, "softcap": None}
        options["window"] = (None, 7, 33)[seed % 3 - 1]
        options["softcap"] = 5.0 if seed % 4 == 1 else None
        inputs: dict[str, Any] = {"q": q, "k": k, "v": v}
        if seed % 4 == 2:
            inputs["sinks"] = np.array([1.0, -np.inf], np.float32)
        y = attention_exact(**inputs, **options)
        distance = gauges.attention(out=y, **inputs, **options).distance
        assert distance is not None
        found.append(margins(y, real_values("attention", inputs, options), distance).max())
    settle_distance(record_property, found, 0.1)


def test_distance_of_rope(record_property: Record) -> None:
    found = []
    positions = np.array([0, 1, 77, 4095, 100000, 2**24 - 1])
    for seed, (d, interleaved, factor) in enumerate(
        itertools.product((16, 8), (False, True), (1.0, 1.25))
    ):
        inv_freq, _ = rope_constants(RopeParameters("default", 10000.0, d))
        angle = positions.astype(np.float32)[:, None] * inv_freq
        cos, sin = turn(angle, np.float32(factor))
        x = heavy(seed, len(positions), 2, 16)
        y = rotate(x, cos, sin, interleaved)
        distance = gauges.rope(x, cos, sin, angle, interleaved, factor).distance
        assert distance is not None
        inputs = {"x": x, "positions": positions, "inv_freq": inv_freq}
        values = real_values("rope", inputs, {"factor": factor, "interleaved": interleaved})
        found.append(margins(y, values, distance).max())
    settle_distance(record_property, found, 0.3)


def test_distance_of_gated_mlp(record_property: Record) -> None:
    found = []
    for seed, (width, inner) in enumerate(((1, 1), (5, 7), (33, 34), (40, 12))):
        for name, act in ACTIVATIONS.items():
            make = heavy if seed % 2 else normal
            x, gate, up = (
                make(seed, 3, width),
                make(seed + 1, inner, width),
                make(seed + 2, inner, width),
            )
            down = make(seed + 3, width, inner)
            g, u = matmul(x, gate), matmul(x, up)
            y = matmul(act(g) * u, down)
            distance = gauges.gated_mlp(x, gate, up, down, g, act(g), u).distance
            assert distance is not None
            inputs = {"x": x, "gate": gate, "up": up, "down": down}
            values = real_values("gated_mlp", inputs, {"activation": name})
            found.append(margins(y, values, distance).max())
    settle_distance(record_property, found, 0.02)


# Faults of real engines exceed the bound.


def golden(name: str) -> Golden:
    return next(read_all(data_folder("goldens"), {name}))


def fault(name: str, answer: Callable[..., F32], **changed: Any) -> float:
    """The margin of a wrong answer to a golden's question."""
    asked = golden(name)
    y = answer(**{**asked.parameters, **asked.inputs, **changed})
    verdict = judge("gauge", asked, {"y": y}, U)
    assert verdict.worst is not None, verdict.message
    return verdict.worst


def test_the_right_answers_pass() -> None:
    for name in ("window_33", "sinks", "everything", "softcap"):
        assert fault(f"kernel/attention/{name}", attention_exact) == 0
    assert fault("kernel/rms_norm/k192", rms_norm) == 0
    assert fault("kernel/linear/k65_t5", matmul) == 0


@pytest.mark.parametrize("window", [31, 32, 33, 64])
@pytest.mark.parametrize("by", [1, -1])
def test_one_key_more_or_less(window: int, by: int) -> None:
    name = f"kernel/attention/window_{window}"
    assert fault(name, attention_exact, window=window + by) > 100


def test_queries_one_position_early() -> None:
    def early(**about: Any) -> F32:
        q = about.pop("q")
        return attention_exact(np.concatenate([q, q[-1:]]), **about)[: len(q)]

    assert fault("kernel/attention/warm_5_of_40", early) > 100


@pytest.mark.parametrize(
    "changed",
    [
        {"sinks": np.array([-np.inf, np.log(2), 2 + np.log(2), 20 + np.log(2)], np.float32)},
        {"sinks": None},
        {"softcap": 50.0},
        {"scale": 0.0625},
    ],
    ids=["sink counted twice", "sinks left out", "softcap where there is none", "another scale"],
)
def test_faults_of_attention(changed: dict[str, Any]) -> None:
    assert fault("kernel/attention/sinks", attention_exact, **changed) > 100


def test_softcap_left_out() -> None:
    assert fault("kernel/attention/softcap", attention_exact, softcap=None) > 100


def test_heads_read_the_wrong_group() -> None:
    """h modulo Hkv in place of h // (Hq / Hkv)."""

    def wrong(q: F32, k: F32, v: F32, **about: Any) -> F32:
        heads = np.arange(q.shape[1]) % k.shape[1]
        return attention_exact(q, k[:, heads], v[:, heads], **about)

    for heads in ("6_2", "12_4"):
        assert fault(f"kernel/attention/heads_{heads}", wrong) > 100


def test_scores_of_bfloat16() -> None:
    def coarse(q: F32, k: F32, **about: Any) -> F32:
        kept = (k.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return attention_exact(q, kept, **about)

    assert fault("kernel/attention/prefill_64", coarse) > 10


@pytest.mark.parametrize(("name", "eps"), [("eps_1e-6", 1e-5), ("eps_1e-5", 1e-6)])
def test_another_eps(name: str, eps: float) -> None:
    assert fault(f"kernel/rms_norm/{name}", rms_norm, eps=eps) > 1000


def test_eps_outside_the_root() -> None:
    def outside(x: F32, weight: F32, eps: float) -> F32:
        mean = (x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True)
        y: F32 = (x / (np.sqrt(mean) + eps) * weight).astype(np.float32)
        return y

    assert fault("kernel/rms_norm/eps_1e-6", outside) > 1000


def test_mean_over_one_element_less() -> None:
    def short(x: F32, weight: F32, eps: float) -> F32:
        y: F32 = rms_norm(x, weight, eps) * np.float32(np.sqrt((x.shape[1] - 1) / x.shape[1]))
        return y

    for width in (32, 65, 192, 288):
        assert fault(f"kernel/rms_norm/k{width}", short) > 100


@pytest.mark.parametrize("name", ["k31_t5", "k33_t5", "k65_t5", "k127_t1", "k288_t5"])
def test_the_last_term_dropped(name: str) -> None:
    def dropped(x: F32, w: F32) -> F32:
        return matmul(np.ascontiguousarray(x[:, :-1]), np.ascontiguousarray(w[:, :-1]))

    assert fault(f"kernel/linear/{name}", dropped) > 100


def test_a_block_counted_in_half_precision() -> None:
    def half(x: F32, w: F32) -> F32:
        return (x.astype(np.float16) @ w.T.astype(np.float16)).astype(np.float32)

    assert fault("kernel/linear/k64_t5", half) > 10


def turned(
    x: F32,
    positions: NDArray[np.int64],
    inv_freq: F32,
    factor: float,
    interleaved: bool,
    sign: float = 1.0,
    late: int = 0,
) -> F32:
    angle = (positions + late).astype(np.float32)[:, None] * inv_freq
    cos, sin = turn(angle, np.float32(factor))
    return rotate(x, cos, np.float32(sign) * sin, interleaved)


def test_faults_of_rope() -> None:
    assert fault("kernel/rope/half", turned) == 0
    coarse = golden("kernel/rope/half").inputs["inv_freq"].view(np.uint32) & np.uint32(0xFFFF0000)
    faults: dict[str, dict[str, Any]] = {
        "pairs swapped": {"interleaved": True},
        "the other way round": {"sign": -1.0},
        "one position late": {"late": 1},
        "bfloat16 inv_freq": {"inv_freq": coarse.view(np.float32)},
    }
    for name, changed in faults.items():
        assert fault("kernel/rope/half", turned, **changed) > 100, name
    assert fault("kernel/rope/factor", turned, factor=1.0) > 1000


BFLOAT16 = unit_roundoff({"operands": "bfloat16", "accumulator": "float32"})


def stored(x: F32) -> F32:
    return np.asarray(x.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("name", ["partial_half", "partial_interleaved", "gap"])
def test_what_does_not_turn_may_be_stored(name: str) -> None:
    """It errs by half a unit of bfloat16 where that is declared, and by nothing where not."""
    made = golden(f"kernel/rope/{name}")
    x = {**made.inputs, **made.parameters}
    y = stored(turned(**{**x, "x": stored(made.inputs["x"])}))
    assert judge("gauge", made, {"y": y}, BFLOAT16).outcome == "pass"
    rest = 2 * len(made.inputs["inv_freq"])
    kept = np.array(made.outputs["y"])
    kept[..., rest:] = stored(kept[..., rest:])
    assert judge("gauge", made, {"y": kept}, BFLOAT16).worst > 0.9  # type: ignore[operator]
    assert judge("gauge", made, {"y": kept}, U).worst > 1000  # type: ignore[operator]
    kept[..., rest:] = made.inputs["x"][..., rest:] * np.float32(1 + 2.0**-7)
    assert judge("gauge", made, {"y": kept}, BFLOAT16).worst > 1.5  # type: ignore[operator]


def test_terms_of_a_rotation() -> None:
    """A rest only where there is one, and an angle that no declaration makes coarser."""
    x, angle = normal(1, 2, 1, 8), np.array([[1, 2], [3, 4]], np.float32)
    cos, sin = turn(angle, np.float32(1))
    partial = gauges.rope(x, cos, sin, angle, False)
    assert partial.models == {"products": "ops(5)", "angle": "float32(1)", "rest": "stored(1)"}
    assert np.array_equal(partial.terms["rest"][..., 4:], np.abs(x[..., 4:]))
    assert not partial.terms["rest"][..., :4].any()
    assert not partial.terms["products"][..., 4:].any()
    whole = gauges.rope(np.ascontiguousarray(x[..., :4]), cos, sin, angle, False)
    assert set(whole.terms) == {"products", "angle"}


@pytest.mark.parametrize("accumulator", ["float32", "bfloat16", "tf32"])
def test_no_declaration_excuses_positions_in_bfloat16(accumulator: str) -> None:
    made = golden("kernel/rope/half")
    given = {**made.inputs, **made.parameters}
    u = unit_roundoff({"operands": "bfloat16", "accumulator": accumulator})
    assert judge("gauge", made, {"y": stored(turned(**given))}, u).outcome == "pass"
    cut = given["positions"].astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    for wrong in (
        {"positions": cut.view(np.float32)},
        {"inv_freq": stored(given["inv_freq"])},
        {"positions": stored(given["positions"].astype(np.float32))},
    ):
        y = turned(**{**given, **wrong})
        assert judge("gauge", made, {"y": y}, u).outcome == "fail", list(wrong)


@pytest.mark.parametrize("name", ["from_37", "decode_at_300", "gap"])
def test_positions_counted_from_a_calls_own_first_fail(name: str) -> None:
    made = golden(f"kernel/rope/{name}")
    given = {**made.inputs, **made.parameters}
    y = turned(**{**given, "positions": given["positions"] - given["positions"][0]})
    assert judge("gauge", made, {"y": y}, BFLOAT16).worst > 10  # type: ignore[operator]


def test_faults_of_gated_mlp() -> None:
    def mlp(x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        return matmul(ACTIVATIONS[activation](matmul(x, gate)) * matmul(x, up), down)

    def swapped(gate: F32, up: F32, **rest: Any) -> F32:
        return mlp(gate=up, up=gate, **rest)

    assert fault("kernel/gated_mlp/silu_33_65", mlp) == 0
    assert fault("kernel/gated_mlp/silu_33_65", swapped) > 100
    assert fault("kernel/gated_mlp/silu_33_65", mlp, activation="gelu_tanh") > 100


def test_softmax_without_its_last_element() -> None:
    def wrong(x: F32) -> F32:
        p = np.exp(x - x.max(axis=-1, keepdims=True))
        y: F32 = p / p[:, :-1].sum(axis=-1, keepdims=True)
        return y

    for width in (2, 33, 65):
        assert fault(f"elementary/softmax/k{width}", wrong) > 100
