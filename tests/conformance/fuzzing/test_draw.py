"""Choices: by name, each for itself, replaced by those that are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.fuzzing.draw import (
    BOUNDED,
    EDGES,
    EXTREME,
    FLOAT16,
    Asked,
    Draw,
    Value,
    data,
)


def some(draw: Draw) -> tuple[Value, ...]:
    """Choices of each kind, the last depending on the first."""
    rows = draw.size("rows", 100)
    kind, warm = draw.pick("kind", ("a", "b", "c")), draw.flag("warm")
    return rows, kind, warm, draw.size("keys", 1000 // rows, 0)


def test_a_draw_is_the_same_again_and_others_are_others() -> None:
    drawn = {some(Draw(f"case {i}", Asked())) for i in range(50)}
    assert drawn == {some(Draw(f"case {i}", Asked())) for i in range(50)}
    assert len(drawn) > 40


@given(st.integers(0, 10**6), st.integers(1, 100), st.sampled_from("abc"), st.booleans())
@settings(max_examples=50, deadline=None)
def test_what_is_given_is_taken_and_all_else_stays(
    number: int, rows: int, kind: str, warm: bool
) -> None:
    plain = Draw(f"{number}", Asked())
    _, _, _, before = some(plain)
    draw = Draw(f"{number}", Asked(), {"rows": rows, "kind": kind, "warm": warm})
    got = some(draw)
    assert got[:3] == (rows, kind, warm)
    kept = {choice.name: choice.value for choice in plain.made}
    assert draw.forced == {
        name: value
        for name, value in (("rows", rows), ("kind", kind), ("warm", warm))
        if kept[name] != value
    }
    if rows == kept["rows"]:
        assert got[3] == before
    # The fewest that must be given give the same.
    again = Draw(f"{number}", Asked(), draw.forced)
    assert some(again) == got
    assert again.made == draw.made


@pytest.mark.parametrize(
    "wrong", [{"rows": 0}, {"rows": 101}, {"rows": True}, {"rows": 2.0}, {"kind": "d"}, {"warm": 1}]
)
def test_what_may_not_be_is_not_taken(wrong: Mapping[str, Value]) -> None:
    draw = Draw("x", Asked(), wrong)
    assert some(draw) == some(Draw("x", Asked()))
    assert draw.forced == {}


def test_simpler_values_come_first_and_may_be() -> None:
    for i in range(40):
        draw = Draw(f"case {i}", Asked())
        some(draw)
        for choice in draw.made:
            for value in choice.simpler:
                assert value != choice.value
                again = Draw(f"case {i}", Asked(), {choice.name: value})
                some(again)
                assert {c.name: c.value for c in again.made}[choice.name] == value
            if isinstance(choice.value, int) and not isinstance(choice.value, bool):
                assert list(choice.simpler) == sorted(choice.simpler)  # type: ignore[type-var]


def test_sizes_lie_at_edges_and_between() -> None:
    drawn = [Draw(f"{i}", Asked()).size("n", 600) for i in range(3000)]
    assert min(drawn) == 1
    assert max(drawn) <= 600
    edges = [edge for edge in EDGES if edge <= 600]
    assert set(edges) <= set(drawn)
    assert len(set(drawn) - set(edges)) > 100
    assert sum(n > 256 for n in drawn) > 100


@pytest.mark.parametrize("kind", [*BOUNDED, *EXTREME])
@pytest.mark.parametrize("shape", [(1,), (5, 1), (3, 40), (2, 3, 33)])
def test_data_are_float32_and_finite_where_a_bound_is_asked(
    kind: str, shape: tuple[int, ...]
) -> None:
    x = data("x", kind, *shape)
    assert x.dtype == np.float32
    assert x.shape == shape
    assert bool(np.isfinite(x).all()) == (kind != "not-finite")
    assert np.array_equal(x, data("x", kind, *shape), equal_nan=True)


def test_kinds_are_what_they_are_called() -> None:
    x = {kind: data("x", kind, 4, 64) for kind in (*BOUNDED, *EXTREME)}
    assert set(x["whole-numbers"].ravel()) <= {-2, -1, 0, 1, 2}
    assert not x["zeros"].any()
    assert 0 < np.signbit(x["zeros"]).sum() < 256
    assert (x["one-hot"].sum(axis=1) == 1).all()
    assert (np.abs(x["subnormal"]) < 2.0**-126).all()
    assert x["subnormal"].any()
    assert np.ptp(np.frexp(x["heavy-tails"])[1]) > 20
    assert (np.abs(x["outlier-channels"]).max(axis=0) > 100).sum() in (1, 2, 3)
    assert np.allclose(x["cancelling"][:, :32], -x["cancelling"][:, 32:], rtol=1e-3)
    assert np.abs(x["huge"]).max() > 2.0**70


DECLARED: list[tuple[dict[str, Any], Asked]] = [
    ({"accumulator": "exact"}, Asked(True, False)),
    ({"accumulator": "float32"}, Asked(False, False)),
    ({}, Asked(False, False)),
    ({"accumulator": "float32", "operands": "float16"}, Asked(False, True)),
    ({"accumulator": "float16"}, Asked(False, True)),
    ({"accumulator": "float32", "operands": "exact"}, Asked(False, False)),
]


@pytest.mark.parametrize(("numerics", "wanted"), DECLARED)
def test_what_a_declaration_can_be_asked(numerics: dict[str, Any], wanted: Asked) -> None:
    assert Asked.of(numerics) == wanted


def test_only_the_exact_are_given_extremes_and_float16_stays_in_range() -> None:
    for asked in (Asked(True), Asked(False), Asked(False, True)):
        draws = [Draw(f"{i}", asked) for i in range(60)]
        arrays = [draw.data("x", 3, 40) for draw in draws]
        assert any(draw.extreme for draw in draws) == asked.exact
        largest = max(float(np.nan_to_num(np.abs(x)).max()) for x in arrays)
        assert (largest <= FLOAT16) == asked.narrow
