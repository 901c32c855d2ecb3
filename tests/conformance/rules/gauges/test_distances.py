"""The exact lane lies within its distance from real values, on nasty inputs too (SPEC 16.3)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from conformance.rules import gauges
from reference import elementary
from reference.arithmetic import matmul
from reference.attention import attention_exact
from reference.feedforward import ACTIVATIONS
from reference.normalization import rms_norm
from reference.rotary import RopeParameters, rope_constants, rotate, turn
from tests.conformance.rules.gauges.margins import Record, heavy, normal
from tests.oracle import nasty
from tests.oracle.goldens import margins, real_values


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
