"""Mistakes of speculation (SPEC 13.3 to 13.5), a module an operation."""

from __future__ import annotations

from conformance.faults.speculation import passes, verification

MODULES = (verification, passes)
