"""Mistakes in the search for a row's scale (SPEC 5.3)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conformance.faults.fault import SessionFault
from reference.arithmetic import BLOCK, F32, F64, dot64
from reference.quantization import Int4Matrix, quantize_int4_row


class Search(SessionFault):
    """A mistake in the search for a row's scale (SPEC 5.3)."""

    operations: ClassVar[tuple[str, ...]] = ("forward",)
    contract = True
    steps: ClassVar[range] = range(40, 21, -1)
    """40 times the factors, in the order of their trial; the first of the best stays."""

    def searched(self, w: F32) -> Int4Matrix:
        """One scale after the other."""
        peak, width = np.abs(w).max(axis=1, keepdims=True).astype(np.float64), w.shape[1]
        best, least = np.ones_like(peak), np.full(len(w), np.inf)
        for step in self.steps:
            scales = (peak * (step / 40) / 7).astype(np.float16).astype(np.float64)
            scales[scales == 0] = 1
            error = (w - scales * self.backend.codes(w, scales)).astype(np.float32)
            squares = self.squares(error)
            better = squares < least
            best[better], least[better] = scales[better], squares[better]
        codes = self.backend.codes(w, best)
        return Int4Matrix(self.backend.pack(codes), best.astype(np.float16), width, width)

    def squares(self, error: F32) -> F64:
        """The squared errors of each row, (N, K) -> (N,)."""
        return dot64(error, error)


class SearchTakesSmaller(Search):
    """Of equally good scales of a row the smaller is taken."""

    name = "int4-row-search-smaller-of-equal"
    reports = ()
    severity = "subtle"
    steps = range(22, 41)


class SearchFloat32(Search):
    """The squared errors of a row's scales are computed and added in float32."""

    name = "int4-row-search-float32"
    reports = ()
    severity = "subtle"

    def squares(self, error: F32) -> F64:
        """Term by term."""
        return np.cumsum(error * error, axis=1, dtype=np.float32)[:, -1].astype(np.float64)


class SearchDescending(SessionFault):
    """The search for a row's scale adds its blocks' squared errors from the last to the first."""

    name = "int4-row-search-descending"
    reports = ()
    severity = "subtle"
    operations = ("forward",)
    contract = True

    def searched(self, w: F32) -> Int4Matrix:
        """Scales of the row with its blocks turned round, codes of the row as it is."""
        width = w.shape[1]
        blocks = np.split(np.arange(width), range(BLOCK, width, BLOCK))
        turned = np.ascontiguousarray(w[:, np.concatenate(blocks[::-1])])
        scales = quantize_int4_row(turned, search=True).scales
        codes = self.backend.codes(w, scales.astype(np.float64))
        return Int4Matrix(self.backend.pack(codes), scales, width, width)
