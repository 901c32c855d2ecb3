"""The error models hold for random legitimate computations, and some come near (SPEC 16.4).

A sample of what `python tools/prove_error_models.py` tries, whose record is docs/error-models.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from conformance import rules
from tools import prove_error_models as tool
from tools.error_models import FORMATS, MANY, MODELS
from tools.prove_error_models import EACH, EXACT, LEAST_WORST, Found, prove

Record = Callable[[str, object], None]
SAMPLE = range(40)


@pytest.mark.parametrize("model", MODELS)
def test_no_computation_of_a_sample_violates_its_model(model: str, record_property: Record) -> None:
    for precision in FORMATS:
        found = prove(model, precision, SAMPLE)
        record_property(precision, round(found.worst, 3))
        assert found.computations > 0.9 * len(SAMPLE[:: MANY.get(model, 1)])
        assert found.violations == 0, found
        assert not found.wide, found


def test_the_record_says_so_of_ten_thousand_computations_a_model() -> None:
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\d,]+) \| ([\d,]+) \| (\d+) \| ([\d.]+) \|$",
                      tool.TABLE.read_text(), re.M)  # fmt: skip
    assert {(model, precision) for model, precision, *_ in rows} == {
        (model, precision) for model in MODELS for precision in FORMATS
    }
    for model in MODELS:
        column = 3 if model in MANY else 2  # one pass of a model computes hundreds of logits
        tried = sum(int(r[column].replace(",", "")) for r in rows if r[0] == model)
        assert tried >= 0.95 * EACH
    for model, precision, _, _, violations, worst in rows:
        assert violations == "0"
        assert LEAST_WORST < float(worst) <= 1 or (model, precision) == EXACT


@pytest.mark.parametrize("model", MODELS)
def test_a_thirtieth_of_the_bound_is_violated(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof sees a model that is wrong: with a thirtieth of its bound."""
    bound = rules.bound
    monkeypatch.setattr(tool, "bound", lambda golden, u: bound(golden, u) / 30)
    found = [prove(model, precision, SAMPLE) for precision in ("float32", "bfloat16", "float16")]
    assert sum(f.violations for f in found) > 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)],
)
def test_a_format_rounds_as_its_type_does(name: str, dtype: type) -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal(20000) * 2.0 ** rng.integers(-30, 8, 20000)
    x = wide.astype(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = x.astype(np.float32).astype(dtype).astype(np.float64)
    assert np.array_equal(FORMATS[name].rounded(x), expected)


def test_a_format_that_flushes_has_no_subnormals() -> None:
    x = np.array([2.0**-14, 2.0**-14 * (1 - 2.0**-10), 2.0**-15, -(2.0**-20), 1.0])
    flushed = FORMATS["float16"].rounded(x, flushes=True)
    assert flushed.tolist() == [2.0**-14, 0, 0, 0, 1]
    assert FORMATS["float16"].rounded(x).tolist() == x.tolist()


def test_a_violation_is_counted() -> None:
    found = Found("dot", "float32")
    found.add(np.array([0.5, 1.5]), 7)
    found.add(np.array([0.1]), 8)
    assert (found.computations, found.results, found.violations, found.seeds) == (2, 3, 1, [7])
    assert found.worst == 1.5
