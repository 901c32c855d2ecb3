"""Mistakes of sampling (SPEC 13.1, 13.2), each module those of one part of it."""

from __future__ import annotations

from conformance.faults.sampling import draws, filters, logits

MODULES = (filters, logits, draws)
