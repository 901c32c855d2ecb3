"""Rotary position embedding: constants by decimal arithmetic, rotation in rounded steps (SPEC 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeParameters:
    """What a configuration says of rope (SPEC 7.2); numbers are the float64 of its JSON text.

    `original_max_positions` is the L0 and `old` of SPEC 7.2. Fields that the kind does not use stay
    at their defaults.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    interleaved: bool = False
