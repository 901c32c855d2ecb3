"""Numbers that a caller gives: any type of the kind, and nothing else."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from reference.arguments import flag, real, whole
from reference.errors import RequestError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_of_any_type_are_int(value: Any) -> None:
    found = whole("top_k", value, 3, 4)
    assert (type(found), found) == (int, 3)


@pytest.mark.parametrize("value", [3.0, "3", None, [3], np.float32(3), Decimal(3)])
def test_what_is_no_whole_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^top_k: .* is no whole number; it must be 0 or more$"):
        whole("top_k", value)


@pytest.mark.parametrize("value", [1, 5, -1, 10**400])
def test_the_range_is_kept(value: int) -> None:
    with pytest.raises(RequestError, match=r"^seed: .* out of range; it must be from 2 to 4$"):
        whole("seed", value, 2, 5)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5)])
def test_numbers_of_any_type_are_float(value: Any) -> None:
    found = real("top_p", value)
    assert (type(found), found) == (float, 0.5)


@pytest.mark.parametrize("value", ["0.5", None, 1j, 10**400])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^top_p: "):
        real("top_p", value)


@pytest.mark.parametrize("value", [True, False, np.bool_(True), np.bool_(False)])
def test_truth_values_of_any_type_are_bool(value: Any) -> None:
    found = flag("exact_prefill", value)
    assert (type(found), found) == (bool, bool(value))


@pytest.mark.parametrize("value", [None, 0, 1, "no", "", []])
def test_what_is_no_truth_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^exact_prefill: .* is neither true nor false$"):
        flag("exact_prefill", value)
