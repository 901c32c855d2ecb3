"""RMSNorm (SPEC 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.cases.recipe import BOTH, Recipe
from conformance.generator import normal
from conformance.rules import gauges
from reference.arithmetic import F32


def _norm(name: str, x: F32, eps: float, rules: tuple[str, ...] = BOTH, note: str = "") -> Recipe:
    weight = normal(f"kernel/rms_norm/{name}/weight", x.shape[1])
    gauge = (lambda a, o: gauges.rms_norm(a["x"], o["y"])) if "gauge" in rules else None
    inputs = {"x": x, "weight": weight}
    return Recipe(f"kernel/rms_norm/{name}", "6", {"eps": eps}, inputs, rules, gauge, note)


def recipes() -> Iterator[Recipe]:
    """Widths at the edges of blocks, mean squares near eps, spikes, and what is not finite."""
    for width in (1, 31, 32, 33, 64, 65, 192, 288):
        yield _norm(f"k{width}", normal(f"rms_norm/k{width}", 4, width), 1e-6)
    yield _norm("k2049", normal("rms_norm/k2049", 1, 2049), 1e-6, note="more than 1,024 at once")
    unit = normal("rms_norm/eps", 4, 192)
    for name, eps in (("eps_1e-5", 1e-5), ("eps_1e-6", 1e-6)):
        ratio = np.sqrt(np.array([[0.1], [1], [10], [1000]]) * eps).astype(np.float32)
        yield _norm(name, unit * ratio, eps, note="mean squares of 0.1, 1, 10 and 1,000 eps")
    spiky = unit * np.float32(0.01)
    spiky[:, 7] = 1000
    yield _norm("spike", spiky, 1e-6, note="one element of 1,000, the rest about 0.01")
    zero = unit.copy()
    zero[0], zero[1] = 0, -0.0
    yield _norm("zero_row", zero, 1e-6)
    broken = unit.copy()
    broken[0, 0], broken[1, 100], broken[2, 191] = np.nan, np.inf, -np.inf
    yield _norm("not_finite", broken, 1e-6, ("bits",))
    yield _norm(
        "overflow",
        unit * np.float32(2.0**100),
        1e-6,
        ("bits",),
        "squares beyond float32 stay in float64",
    )
    yield _norm("subnormal", np.ldexp(unit, -140), 1e-6, ("bits",))
