"""Mistakes of int4, Q4_0 and Q8_0 weights and of int8 activations (SPEC 5), a module a step."""

from __future__ import annotations

from conformance.faults.quantization import blocks, decoding, encoding, int8, row_search

MODULES = (decoding, encoding, int8, blocks, row_search)
