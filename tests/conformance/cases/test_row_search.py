"""The golden of the search for a row's int4 scale: the order of its sums decides (SPEC 5.3)."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from conformance.backends.composed import ComposedBackend
from conformance.calibration.trials import judged
from conformance.cases.model import ROW_SEARCH
from conformance.faults import applied, fault
from conformance.golden import Golden, read_all
from conformance.paths import data_folder, model_folder
from fixtures.make_row_search import make
from reference.loading import load_folder
from reference.quantization import quantize_int4_row


def golden() -> Golden:
    return next(read_all(data_folder("goldens"), {"model/forward/row_search"}))


def rows(*names: str) -> list[list[float]]:
    """Every row of these matrices; of the gates and ups by default."""
    wanted = names or ("gate_proj", "up_proj")
    tensors = load_folder(model_folder(ROW_SEARCH)).tensors
    found = [w for name, w in sorted(tensors.items()) if any(part in name for part in wanted)]
    return [row.tolist() for w in found for row in w]


def block_sums(row: list[float], scale: float) -> list[float]:
    """Of squared errors, each block exact."""
    sums = []
    for first in range(0, len(row), 32):
        total = Fraction(0)
        for w in row[first : first + 32]:
            code = min(7, math.floor(abs(Fraction(w) / Fraction(scale)) + Fraction(1, 2)))
            error = Fraction(w) - Fraction(scale) * int(math.copysign(code, w))
            assert Fraction(float(np.float32(float(error)))) == error
            total += error**2
        sums.append(float(total))
    return sums


def chosen(row: list[float], total: object) -> float:
    """f of the least sum, the largest f of equal ones."""
    best, least = 0.0, math.inf
    peak = max(map(abs, row))
    for step in range(40, 21, -1):
        scale = float(np.float16(peak * (step / 40) / 7))
        squares = total(block_sums(row, scale))  # type: ignore[operator]
        if squares < least:
            best, least = step / 40, squares
    return best


def ascending(sums: list[float]) -> float:
    total = 0.0
    for block_sum in sums:
        total += block_sum
    return total


FACTORS = [step / 40 for step in range(22, 41)]

ORDERS = {
    "descending": lambda sums: ascending(sums[::-1]),
    "pairwise": lambda sums: (sums[0] + sums[1]) + (sums[2] + sums[3]),
    "two lanes": lambda sums: (sums[0] + sums[2]) + (sums[1] + sums[3]),
    "once rounded": math.fsum,
}


def test_the_search_of_every_row_takes_another_scale_in_another_order() -> None:
    some = rows()[::5]
    assert len(some) > 10
    for row in some:
        assert chosen(row, ascending) == 39 / 40
        for name, order in ORDERS.items():
            assert chosen(row, order) == 1, name


def test_the_reference_adds_ascending() -> None:
    for row in rows():
        matrix = quantize_int4_row(np.array([row], np.float32), search=True)
        scale = np.float16(max(map(abs, row)) * (39 / 40) / 7)
        assert matrix.scales.item() == scale


def test_of_equal_scales_the_larger_is_taken() -> None:
    """Those of the values: two scales err by the same in every order, and less than all others."""
    for row in rows("v_proj"):
        matrix = quantize_int4_row(np.array([row], np.float32), search=True)
        assert matrix.scales.item() == np.float16(max(map(abs, row)) / 7)
    for row in rows("v_proj")[::5]:
        assert all(chosen(row, order) == 1 for order in (ascending, *ORDERS.values()))
        turned = {
            f: sum(block_sums(row, float(np.float16(max(map(abs, row)) * f / 7)))) for f in FACTORS
        }
        assert sorted(turned, key=turned.__getitem__)[:2] == [39 / 40, 1]
        assert turned[39 / 40] == turned[1]


@pytest.mark.parametrize("name", ["int4-row-search-smaller-of-equal", "int4-row-search-float32"])
def test_a_search_that_decides_otherwise_is_caught(name: str) -> None:
    trial = judged(applied(fault(name), ComposedBackend), [golden()], lambda g: ["bits"])
    assert trial.failed == ["model/forward/row_search:bits"]


def test_a_search_in_another_order_has_other_bits_and_is_float32s_right() -> None:
    known, about = fault("int4-row-search-descending"), golden()
    assert known.contract
    assert judged(ComposedBackend(), [about], lambda g: ["bits"]).passed
    trial = judged(applied(known, ComposedBackend), [about], lambda g: ["bits"])
    assert trial.failed == ["model/forward/row_search:bits"]
    assert about.rules == ("bits",)


@pytest.mark.parametrize("weights", ["int4", "int4-row"])
def test_the_fault_leaves_other_models_as_they_are(weights: str) -> None:
    """No row of the trained fixture is so near to a tie."""
    name = {"int4": "short_int4", "int4-row": "short_int4_row"}[weights]
    other = next(read_all(data_folder("goldens"), {f"model/forward/{name}"}))
    known = fault("int4-row-search-descending")
    assert judged(applied(known, ComposedBackend), [other], lambda g: ["bits"]).passed


def test_the_model_is_made_to_the_same_bytes(tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("config.json", "model.safetensors"):
        made = (tmp_path / name).read_bytes()
        assert made == (model_folder(ROW_SEARCH) / name).read_bytes(), name
