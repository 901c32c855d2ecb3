"""How one output differs from the golden's: in ulp, in bounds, where, and at its worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.bits import decimal_and_hex, raw
from conformance.diagnosis.explanation import U32, unit_of
from conformance.golden import Array, Golden, read_all
from conformance.results import Answers, Result
from conformance.rules import ASK_BITS, numerics_of, unit_roundoff
from conformance.rules.continuation import judged_part
from reference.arithmetic import F64

CELLS = 64
"""Cells of a heat map along an axis, at most."""

ULPS = [0.0] + [2.0**k for k in range(65)]
"""Upper edges of the histogram of distances: the same, 1, 2, 4, ... representable numbers apart."""

MARGINS = [0.0] + [2.0**k for k in range(-10, 21)]
"""Upper edges of the histogram of margins; 1 is the limit."""


def outputs(
    results: Iterable[Result], answers: Answers, folder: Path, numerics: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """By id of each failed case that was answered: its outputs that are not the golden's.

    numerics: what the backend declares. Under `bits` the unit is float32's, whatever it declares.
    """
    failed = {r.id for r in results if r.outcome == "fail"}
    wanted = {key for key in answers if f"{key[0]}:{key[1]}" in failed}
    found = {}
    for golden in read_all(folder, {golden for golden, _ in wanted}):
        for rule in golden.rules:
            if (golden.id, rule) in wanted:
                answer = answers[golden.id, rule]
                found[f"{golden.id}:{rule}"] = under_rule(golden, rule, answer, numerics)
    return found


def under_rule(
    golden: Golden, rule: str, answer: Mapping[str, Array], numerics: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The differences of an answer that a rule looks at, in that rule's unit."""
    own = numerics_of(numerics, golden.operation)
    u = U32 if rule in ASK_BITS else unit_roundoff(own)
    return differences(golden, judged_part(golden, rule, answer), u)


def differences(golden: Golden, answer: Mapping[str, Array], u: float) -> list[dict[str, Any]]:
    """Every output whose shape, dtype or bits are not the golden's, as the JSON report has it."""
    found = []
    for name, expected in golden.outputs.items():
        got = answer[name]
        about = {"name": name, "dtype": str(expected.dtype), "shape": list(expected.shape)}
        if got.shape != expected.shape or got.dtype != expected.dtype:
            found.append({**about, "got_dtype": str(got.dtype), "got_shape": list(got.shape)})
            continue
        differs = raw(expected) != raw(got)
        if differs.any():
            found.append({**about, **_difference(golden, name, got, differs, u)})
    return found


def _difference(golden: Golden, name: str, got: Array, differs: Array, u: float) -> dict[str, Any]:
    expected = golden.outputs[name]
    integers = expected.dtype.kind != "f"
    bound = np.ones(expected.shape) if integers else unit_of(golden, name, u)
    error = _error(expected, got)
    with np.errstate(all="ignore"):
        plain = error / bound
    # A zero of the other sign, or another NaN, is no error, and yet it is to be seen.
    margin = np.where(differs, np.maximum(plain, MARGINS[1] / 2), 0.0)
    apart, nan = _apart(expected, got)
    gauged = bool(golden.gauges) and not integers and name == _first_float(golden)
    heat = (-2, -1) if margin.ndim > 1 else (-1,)
    at = int(margin.argmax())
    return {
        "differing": int(differs.sum()),
        "unit": "bound" if gauged else "1" if integers else "8 u |y|",
        "ulp": histogram(apart, ULPS),
        "not_a_number": nan,
        "margins": {
            **{n: _rounded(np.quantile(margin, q, method="higher")) for n, q in QUANTILES.items()},
            "histogram": histogram(margin, MARGINS),
        },
        "heat": _map(margin, heat),
        "axes": [_map(margin, (axis,)) for axis in range(margin.ndim - 2)],
        "worst": {
            **_element(expected, got, at),
            "error": _rounded(error.flat[at]),
            "bound": _rounded(bound.flat[at]),
            "margin": _rounded(plain.flat[at]),
        },
    }


QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}


def _first_float(golden: Golden) -> str | None:
    return next((n for n, a in golden.outputs.items() if a.dtype.kind == "f"), None)


def _error(expected: Array, got: Array) -> F64:
    """The distance of each element; none between two NaN, infinite where only one is finite."""
    with np.errstate(all="ignore"):  # a signalling NaN warns when it is cast
        error = np.abs(expected.astype(np.float64) - got.astype(np.float64))
    same = (raw(expected) == raw(got)) | (np.isnan(expected) & np.isnan(got))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


def _apart(expected: Array, got: Array) -> tuple[F64, int]:
    """How many representable numbers (of integers: how much) each element is off; NaN left out.

    Returns the distances and the number of elements of which one is a NaN and the other is not,
    or is another NaN.
    """
    if expected.dtype.kind != "f":
        return np.abs(expected.astype(np.float64) - got.astype(np.float64)), 0
    nan = np.isnan(expected) | np.isnan(got)
    apart = np.abs(_ordered(expected) - _ordered(got))
    return apart[~nan], int((nan & (raw(expected) != raw(got))).sum())


def _ordered(x: Array) -> F64:
    """Floats as whole numbers in the order of the reals, neighbours one apart, both zeros 0."""
    words = raw(x)
    sign = words >> (8 * x.dtype.itemsize - 1)
    size = (words & (np.iinfo(words.dtype).max >> 1)).astype(np.float64)
    return np.where(sign == 1, -size, size)


def worst_line(found: Sequence[Mapping[str, Any]], message: str = "") -> str:
    """The element farthest from the golden's, in a line: both values, error and bound.

    found: the differences of an answer. message: what it says of the same element is not said
    again. "" where nothing is left.
    """
    known = [output for output in found if "worst" in output]
    if not known:
        return ""
    output = max(known, key=lambda o: _or_infinite(o["worst"]["margin"]))
    at = output["worst"]
    index = f"[{', '.join(map(str, at['index']))}]"
    parts = [f"{at['expected']} ({at['expected_hex']}) expected, {at['got']} ({at['got_hex']}) got"]
    if output["unit"] != "1":
        error, bound = _or_infinite(at["error"]), _or_infinite(at["bound"])
        parts.append(f"error {error:.3g}, bound {bound:.3g}")
    said = message if f"at {index}" in message else ""
    left = [part for part in parts if part not in said]
    return f"worst {output['name']}{index}: {'; '.join(left)}" if left else ""


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def histogram(values: F64, edges: Sequence[float]) -> list[dict[str, Any]]:
    """Counts by upper edge, from the first to the last that is not empty; null is beyond all."""
    bins = np.searchsorted(edges, values.ravel(), side="left")
    counts = np.bincount(bins, minlength=1)
    tops: list[float | None] = [*edges, None]
    first = int(np.flatnonzero(counts)[0]) if counts.any() else 0
    return [{"upto": tops[i], "count": int(counts[i])} for i in range(first, len(counts))]


def _map(margin: F64, axes: tuple[int, ...]) -> dict[str, Any]:
    """The worst margin by position along `axes`, in at most `CELLS` cells each; null is infinite.

    Along one axis the map has one row.
    """
    kept = [axis % margin.ndim for axis in axes]
    pooled = margin.max(axis=tuple(a for a in range(margin.ndim) if a not in kept))
    for axis, length in enumerate(pooled.shape):
        if length > CELLS:
            pooled = np.maximum.reduceat(pooled, np.arange(CELLS) * length // CELLS, axis)
    rows = [[_rounded(x) for x in row] for row in np.atleast_2d(pooled)]
    return {"axes": kept, "cells": rows}


def _element(expected: Array, got: Array, at: int) -> dict[str, Any]:
    """Where an element lies, and both values."""
    index = [int(i) for i in np.unravel_index(at, expected.shape)]
    about: dict[str, Any] = {"index": index}
    for name, array in (("expected", expected), ("got", got)):
        about[name], about[f"{name}_hex"] = decimal_and_hex(array, at)
    return about


def _rounded(value: Any) -> float | None:
    """Three digits, for a report; null where it is infinite."""
    return float(f"{value:.3g}") if math.isfinite(value) else None
