"""Mistakes of prefix reuse and of saved caches (SPEC 11.3, 11.4), a module an operation."""

from __future__ import annotations

from conformance.faults.prefix import files, hashes, lookup, turns

MODULES = (hashes, lookup, turns, files)
