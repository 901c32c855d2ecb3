"""The exact contract, built by a compiler that contracts products into sums (SPEC 16.9).

Each declares `fma`, and is asked for `either` in place of `bits` where that stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.cases.contraction import Experts, Gelu, Rotation
from conformance.variants.variant import Exact

CONTRACTS: Mapping[str, Any] = {**Exact.numerics, "fma": True}


class RopeCosine(Exact, Rotation):
    """Rope exact but for its cosine's products, which are contracted into both sums."""

    name, kernels_only = "rope-contracted-cosine", True
    numerics = CONTRACTS
    upper, lower = "first", "first"


class RopeSine(Exact, Rotation):
    """Rope exact but for its sine's products, which are contracted into both sums."""

    name, kernels_only = "rope-contracted-sine", True
    numerics = CONTRACTS
    upper, lower = "second", "second"


class Throughout(Exact, Gelu, Experts, Rotation):
    """Every sum of products contracted: rope, gelu_tanh, the sum over experts."""

    name, kernels_only = "contracted-throughout", True
    numerics = CONTRACTS
    upper, lower = "first", "second"
