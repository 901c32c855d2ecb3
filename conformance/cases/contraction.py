"""The other answers that a step has where products are contracted into sums (SPEC 16.9).

A compiler that may contract turns `a * b + c` into one operation that rounds once. The exact
contract forbids it (SPEC 2), and its bits are the form `unfused`; these are all the others. The
rounding of each is emulated exactly, so that a golden is the same to the byte on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, Literal

import numpy as np

from conformance.backends.composed import ComposedBackend
from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.reference import Ints
from conformance.golden import Array
from reference.arithmetic import F32, multiply_add, one_nan

Forms = dict[str, dict[str, Array]]
"""Outputs by name, by the name of their form."""

Kept = Literal["first", "second", "neither"]
"""Which of two products goes into their sum unrounded."""


def sum_of_two(a: F32, b: F32, c: F32, d: F32, kept: Kept) -> F32:
    """a b + c d in float32, of any one shape; one product is left unrounded, or neither."""
    if kept == "first":
        return multiply_add(a, b, c * d, True)
    if kept == "second":
        return multiply_add(c, d, a * b, True)
    return a * b + c * d


class Rotation(ComposedBackend):
    """Rope whose cosine's (`first`) or sine's (`second`) product is not rounded (SPEC 7.4)."""

    upper: Kept = "neither"
    lower: Kept = "neither"

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """The two lines of SPEC 7.4, each contracted in its way; of the shape of a and b."""
        return (
            sum_of_two(a, cos, -b, sin, self.upper),
            sum_of_two(b, cos, a, sin, self.lower),
        )


class Gelu(ComposedBackend):
    """gelu_tanh whose cubic term is added without being rounded (SPEC 4.2)."""

    def gelu_tanh(self, x: F32) -> F32:
        """x + 0.044715 x^3 rounds once."""
        cubic, root = np.array([0x3D372713, 0x3F4C422A], np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            inner = multiply_add(np.full_like(x, cubic), x * x * x, x, True)
            tanh = self.tanh(one_nan(root * inner))
            return one_nan(np.float32(0.5) * x * (np.float32(1) + tanh))


class Experts(ExpertsBackend):
    """Experts added without rounding what their gates make of them (SPEC 9.3)."""

    routed = True
    shared = True

    def added(self, total: F32, y: F32, gate: F32) -> F32:
        """RN32(total + gate * y)."""
        if not self.routed:
            return super().added(total, y, gate)
        return one_nan(multiply_add(gate, y, total, True))

    def moe(self, x: F32, experts: Ints, gates: F32, *weights: Any, **options: Any) -> F32:
        """The routed experts, and a gated shared one onto them."""
        if options.get("shared_router") is None or not self.shared:
            return super().moe(x, experts, gates, *weights, **options)
        gate, up, down, router = (
            options.pop(f"shared_{name}") for name in ("gate", "up", "down", "router")
        )
        total = super().moe(x, experts, gates, *weights, **options)
        with np.errstate(all="ignore"):
            y = self.gated_mlp(x, gate, up, down, options["activation"])
            return one_nan(multiply_add(self.sigmoid(self.linear(x, router)), y, total, True))


def rope_forms(arguments: Mapping[str, Any]) -> Forms:
    """Every way to contract the two lines of rope but the unfused one: eight."""
    names = {"first": "cos", "second": "sin", "neither": "none"}
    found: Forms = {}
    for upper, lower in product(names, names):
        if (upper, lower) != ("neither", "neither"):
            made = type("Made", (Rotation,), {"upper": upper, "lower": lower})()
            found[f"{names[upper]}-{names[lower]}"] = {"y": made.rope(**arguments)}
    return found


def gelu_forms(arguments: Mapping[str, Any]) -> Forms:
    """The one way to contract gelu_tanh."""
    return {"cubic": {"y": Gelu().gelu_tanh(arguments["x"])}}


def mlp_forms(arguments: Mapping[str, Any]) -> Forms:
    """The one way to contract a gated layer, that of its gelu_tanh."""
    return {"cubic": {"y": Gelu().gated_mlp(**arguments)}}


class GeluExperts(Gelu, Experts):
    """Experts whose gelu_tanh adds its cubic term unrounded, whatever is made of their sum."""


def moe_forms(arguments: Mapping[str, Any]) -> Forms:
    """The sum over routed experts contracted, that with a gated shared one, or both.

    With gelu_tanh each of them, and none, with a contracted activation too. A form with the bits
    of one before it is left out, for these inputs do not tell the two apart.
    """
    sums: dict[str, dict[str, bool]] = {"routed": {"routed": True, "shared": False}}
    if "shared_router" in arguments:
        sums["shared"] = {"routed": False, "shared": True}
        sums["both"] = {"routed": True, "shared": True}
    ways = {name: type("Made", (Experts,), flags) for name, flags in sums.items()}
    if arguments["activation"] == "gelu_tanh":
        none = {"routed": False, "shared": False}
        ways["cubic"] = type("Made", (GeluExperts,), none)
        ways |= {f"cubic-{n}": type("Made", (GeluExperts,), flags) for n, flags in sums.items()}
    seen, found = {ExpertsBackend().moe(**arguments).tobytes()}, Forms()
    for name, made in ways.items():
        y = made().moe(**arguments)
        if y.tobytes() not in seen:
            seen.add(y.tobytes())
            found[name] = {"y": y}
    return found
