"""Attention: exact by bits, fast by its gauge, on the same inputs (SPEC 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conformance.cases.recipe import BOTH, Recipe
from conformance.generator import normal
from conformance.golden import Array
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    options = {k: v for k, v in arguments.items() if k != "mode"}
    return gauges.attention(out=outputs["y"], **options)


def _inputs(
    name: str, rows: int, keys: int, heads: int, kv_heads: int, width: int
) -> dict[str, F32]:
    at = f"kernel/attention/{name}"
    return {
        "q": normal(f"{at}/q", rows, heads, width),
        "k": normal(f"{at}/k", keys, kv_heads, width),
        "v": normal(f"{at}/v", keys, kv_heads, width),
    }


def _case(
    name: str, inputs: dict[str, F32], note: str = "", rules: tuple[str, ...] = BOTH, **options: Any
) -> Recipe:
    width = inputs["q"].shape[2]
    parameters = {
        "scale": float(np.float32(width**-0.5)),
        "window": None,
        "softcap": None,
        **options,
    }
    sinks = parameters.pop("sinks", None)
    arrays = dict(inputs) if sinks is None else {**inputs, "sinks": np.array(sinks, np.float32)}
    gauge = _gauge if "gauge" in rules else None
    return Recipe(f"kernel/attention/{name}", "8.2", parameters, arrays, rules, gauge, note)


def _shapes() -> Iterator[Recipe]:
    """Blocks, chunks, groups of heads, head sizes."""
    for keys in (1, 31, 32, 33, 64, 65):
        yield _case(f"prefill_{keys}", _inputs(f"prefill_{keys}", keys, keys, 2, 1, 32))
        yield _case(f"decode_{keys}", _inputs(f"decode_{keys}", 1, keys, 4, 2, 32))
    for rows, keys in ((4, 8), (5, 40), (33, 97)):
        name = f"warm_{rows}_of_{keys}"
        yield _case(
            name, _inputs(name, rows, keys, 2, 2, 32), "queries start after the cache's keys"
        )
    for heads, kv_heads in ((6, 2), (12, 4), (8, 1), (5, 5)):
        name = f"heads_{heads}_{kv_heads}"
        yield _case(name, _inputs(name, 7, 39, heads, kv_heads, 16), "groups that are not square")
    for heads, kv_heads in ((16, 1), (32, 2)):
        name = f"heads_{heads}_{kv_heads}"
        yield _case(name, _inputs(name, 2, 9, heads, kv_heads, 8), "more heads than 8, and groups")
    for width in (1, 31, 33, 48, 64, 128):
        name = f"head_dim_{width}"
        yield _case(name, _inputs(name, 5, 37, 2, 1, width))
    yield _case("head_dim_256", _inputs("head_dim_256", 2, 9, 2, 1, 256), "as Gemma has it")
    for rows in (511, 512, 513):
        yield _case(
            f"rows_{rows}",
            _inputs(f"rows_{rows}", rows, rows, 2, 1, 32),
            "at the floor of fast attention",
        )
    yield _case("decode_513", _inputs("decode_513", 1, 513, 2, 1, 8), "more keys than a partition")
    yield _case(
        "rows_513_warm", _inputs("rows_513_warm", 513, 545, 2, 1, 32), "on a cache of 32 keys"
    )


def _wide_heads() -> Iterator[Recipe]:
    """The heads that kernels are made for, in groups, with few rows."""
    for width in (64, 128):
        name = f"wide_{width}_decode"
        yield _case(name, _inputs(name, 1, 49, 8, 2, width), "one row, four heads to a key")
        name = f"wide_{width}_window_sinks"
        inputs = _inputs(name, 4, 49, 4, 1, width)
        sinks = [-1.0, 0.0, 1.0, 3.0]
        yield _case(name, inputs, "the window begins within a block", window=20, sinks=sinks)
    name = "wide_64_softcap"
    inputs = _inputs(name, 4, 36, 4, 2, 64)
    yield _case(name, inputs, "as Gemma 2 has it, with its window", window=32, softcap=50.0)


def _options() -> Iterator[Recipe]:
    """Window, softcap, sinks and scale, each alone and together."""
    for window in (1, 31, 32, 33, 64):
        name = f"window_{window}"
        yield _case(name, _inputs(name, 40, 72, 2, 1, 32), window=window)
    wide = _inputs("window_4096", 2, 4099, 1, 1, 8)
    wide["k"] *= np.float32(0.25)
    yield _case("window_4096", wide, "one key among 4,096 hardly matters", window=4096)
    base = _inputs("options", 9, 70, 4, 2, 32)
    yield _case("softcap", base, softcap=5.0)
    yield _case("sinks", base, "no sink, a small and a large one", sinks=[-np.inf, 0.0, 2.0, 20.0])
    yield _case("everything", base, window=33, softcap=30.0, sinks=[0.5, 1.0, -3.0, 4.0])
    yield _case("scale", base, "1 / sqrt(256) where head_dim is 32", scale=0.0625)
    one = _inputs("decode_everything", 1, 70, 6, 2, 16)
    sinks = [0.5, 1.0, -3.0, 4.0, 2.0, -np.inf]
    note = "one row with every option, a scale of its own among them"
    yield _case("decode_everything", one, note, window=33, softcap=5.0, sinks=sinks, scale=0.2)


def _exposed() -> Iterator[Recipe]:
    """Inputs whose output shows by itself who attended to whom."""
    for window in (None, 7, 8, 9):
        keys = 24
        one_hot = np.eye(keys, dtype=np.float32)[:, None]
        zero = np.zeros((keys, 1, keys), np.float32)
        note = "equal scores and one-hot values: each row shows its set"
        yield _case(f"one_hot_{window}", {"q": zero, "k": zero, "v": one_hot}, note, window=window)
    inputs = _inputs("constant", 4, 100, 2, 1, 32)
    yield _case(
        "constant", {**inputs, "v": np.full_like(inputs["v"], 3.0)}, "what is constant stays so"
    )
    inputs = _inputs("huge_scores", 6, 40, 2, 1, 32)
    huge = {**inputs, "q": inputs["q"] * np.float32(4096), "k": inputs["k"] * np.float32(64)}
    yield _case("huge_scores", huge, "below -50,000 all of them, or far apart")
    low = _inputs("low_scores", 6, 40, 2, 1, 4)
    low["q"][..., 0], low["k"][..., 0] = 1024, -128
    yield _case("low_scores", low, "all of them below -60,000, and near each other")
    low = _inputs("low_scores_window", 3, 70, 1, 1, 4)
    low["q"][..., 0], low["k"][..., 0] = 1024, -128
    note = "the same, where the first tiles lie behind the window as a whole"
    yield _case("low_scores_window", low, note, window=4)
    blind = {
        "q": np.zeros((5, 1, 2), np.float32),
        "k": np.zeros((2, 1, 2), np.float32),
        "v": np.eye(2, dtype=np.float32)[:, None],
    }
    yield _case("blind_rows", blind, "more rows than keys: the first three see nothing")
    shifted = _inputs("zero_values", 6, 40, 2, 1, 32)
    shifted["v"][::3] = 0
    shifted["v"][5] = -0.0
    yield _case("zero_values", shifted, "all-zero values are left out of the grid")
    wide = _inputs("wide_values", 6, 70, 2, 1, 32)
    wide["v"] = np.ldexp(wide["v"], (np.arange(70) % 23 - 11)[:, None, None])
    yield _case("wide_values", wide, "values over 22 binades")


def _poisoned() -> Iterator[Recipe]:
    """What is not visible is never read; what is visible and not finite makes NaN."""
    future = _inputs("poison_future", 6, 40, 2, 1, 32)
    future["k"][38], future["v"][39] = np.nan, np.inf
    yield _case("poison_future", future, "only the last two rows see it")
    past = _inputs("poison_past", 6, 70, 2, 1, 32)
    past["k"][:30], past["v"][:30] = np.inf, np.nan
    yield _case("poison_past", past, "all of it behind the window", window=34)
    edge = _inputs("poison_edge", 6, 70, 2, 1, 32)
    edge["v"][:35] = np.nan
    yield _case("poison_edge", edge, "rows leave it behind one by one", window=32)
    rows = _inputs("poison_query", 6, 40, 4, 2, 32)
    rows["q"][2, 1], rows["q"][3, 0, 31] = np.nan, np.inf
    yield _case("poison_query", rows, "one row and head each")
    overflow = _inputs("poison_overflow", 4, 40, 2, 1, 32)
    overflow["q"][1] = 2.0**127
    yield _case("poison_overflow", overflow, "a score beyond float32", ("bits",))
    capped = _inputs("poison_softcap", 3, 20, 2, 1, 32)
    capped["q"][1] = 2.0**127
    note = "a score beyond float32, which the softcap would hide"
    yield _case("poison_softcap", capped, note, ("bits",), softcap=5.0)
    blind = _inputs("poison_blind", 5, 2, 2, 1, 8)
    blind["q"][0], blind["q"][2, 1, 3], blind["q"][4, 1] = np.nan, -np.inf, np.inf
    yield _case("poison_blind", blind, "the first three rows see nothing, and are zero")
    sinks = _inputs("poison_sinks", 3, 40, 4, 2, 32)
    yield _case("poison_sinks", sinks, sinks=[np.nan, np.inf, 0.0, -np.inf])


def recipes() -> Iterator[Recipe]:
    """Every golden of attention."""
    yield from _shapes()
    yield from _wide_heads()
    yield from _options()
    yield from _exposed()
    yield from _poisoned()
