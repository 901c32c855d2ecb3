"""Mistakes of rotary position embedding (SPEC 7), each module those of one part of it."""

from __future__ import annotations

from conformance.faults.rope import constants, rotation, scaling

MODULES = (rotation, constants, scaling)
