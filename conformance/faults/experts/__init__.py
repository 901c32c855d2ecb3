"""Mistakes of experts (SPEC 9.2, 9.3), a module an operation."""

from __future__ import annotations

from conformance.faults.experts import dispatch, routing

MODULES = (routing, dispatch)
