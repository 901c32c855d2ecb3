"""Rotary position embedding (SPEC 7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conformance.backends.reference import Ints
from conformance.cases.contraction import rope_forms
from conformance.cases.recipe import Recipe
from conformance.generator import normal
from conformance.golden import Array
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32
from reference.rotary import RopeParameters, rope_constants, turn

POSITIONS = np.array([0, 1, 2, 3, 31, 32, 100, 256, 257, 511, 512, 2047, 4095, 100000], np.int64)

GAP = np.array([37, 38, 39, 291, 292, 1024, 1025, 1026], np.int64)
"""Three runs with something between them, as a shared prefix leaves them; 0 is not among them."""

FAR = np.array(
    [131_071, 131_072, 131_073, 262_144, 1_048_575, 1_048_576, 2**23, 2**24 - 2, 2**24 - 1],
    np.int64,
)
"""Behind the ends of tables. As many as in `from_37`, whose angles are no others' (SPEC 7.3)."""

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default_1e6": {"rope_type": "default", "rope_theta": 1000000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3_other": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 16.0,
        "original_max_position_embeddings": 4096,
    },
    "partial_cut": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.42,
    },
    "dynamic_original": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + i / 64 for i in range(32)],
        "long_factor": [1.5 + i * i / 16 for i in range(32)],
        "original_max_position_embeddings": 512,
    },
    "longrope_factor": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "short_factor": [1.0] * 32,
        "long_factor": [8.0] * 32,
        "original_max_position_embeddings": 512,
    },
    "longrope_attention_factor": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "attention_factor": 1.25,
        "short_factor": [1.0] * 32,
        "long_factor": [8.0] * 32,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn_betas": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "original_max_position_embeddings": 1024,
    },
    "yarn_equal_ends": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 6,
    },
    "yarn_beyond_the_last": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "beta_fast": 4096.0,
        "beta_slow": 0.5,
        "original_max_position_embeddings": 131072,
    },
    "yarn_before_the_first": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "beta_fast": 4096.0,
        "beta_slow": 0.5,
        "original_max_position_embeddings": 2048,
    },
    "yarn_shrunk": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 0.5,
        "original_max_position_embeddings": 1024,
    },
    "yarn_mscale_alone": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 0.707,
        "original_max_position_embeddings": 1024,
    },
    "yarn_long": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 131072,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    },
}


PLACES = {
    "dynamic": (0, 2047, 2048, 2500),
    "dynamic_original": (1500,),
    "longrope": (511, 512, 600),
}
"""Positions at which the constants of a kind are asked for: on both sides of where they change."""


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    angle: F32 = arguments["positions"].astype(np.float32)[:, None] * arguments["inv_freq"]
    factor = arguments["factor"]
    cos, sin = turn(angle, np.float32(factor))
    return gauges.rope(arguments["x"], cos, sin, angle, arguments["interleaved"], factor)


def _rope(
    name: str,
    rotary_dim: int,
    interleaved: bool,
    factor: float = 1.0,
    x: F32 | None = None,
    positions: Ints = POSITIONS,
) -> Recipe:
    inv_freq, _ = rope_constants(RopeParameters("default", 10000.0, rotary_dim))
    x = normal(f"kernel/rope/{name}/x", len(positions), 3, 64) if x is None else x
    rules = ("bits", "gauge", "either") if np.isfinite(x).all() else ("bits", "either")
    return Recipe(
        f"kernel/rope/{name}",
        "7.4",
        {"interleaved": interleaved, "factor": factor},
        {"x": x, "positions": positions, "inv_freq": inv_freq.copy()},
        rules,
        _gauge if "gauge" in rules else None,
        forms=rope_forms,
    )


def recipes() -> Iterator[Recipe]:
    """Constants of every kind; rotation in both pairings, whole, partial, and from later on."""
    for kind, parameters in KINDS.items():
        for position in PLACES.get(kind, (0,)):
            about = {"head_dim": 64, "max_position_embeddings": 2048, **parameters}
            yield Recipe(
                f"kernel/rope_constants/{kind}_{position}",
                "7.2",
                {"parameters": about, "position": position},
                {},
            )
    yield _rope("half", 64, False)
    yield _rope("interleaved", 64, True)
    yield _rope("partial_half", 32, False)
    yield _rope("partial_interleaved", 20, True)
    yield _rope("factor", 64, False, float(np.float32(1.1386294)))
    yield _rope("from_37", 64, False, positions=np.arange(37, 46))
    yield _rope("decode_at_300", 64, True, positions=np.array([300]))
    far = normal("kernel/rope/far/x", len(FAR), 3, 64)
    yield _rope("far", 64, False, x=far, positions=FAR)
    yield _rope("gap", 32, False, positions=GAP)
    yield _rope("one_pair", 2, False, x=normal("kernel/rope/one_pair/x", len(POSITIONS), 3, 4))
    broken = normal("kernel/rope/not_finite/x", len(POSITIONS), 3, 64)
    broken[1, 0, 3], broken[2, 1, 40], broken[0, 0, 0] = np.nan, np.inf, -np.inf
    yield _rope("not_finite", 48, False, x=broken)
