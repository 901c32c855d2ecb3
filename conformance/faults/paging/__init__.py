"""Mistakes of pages (SPEC 11.1, 11.2), a module an operation."""

from __future__ import annotations

from conformance.faults.paging import reading, storing, tables

MODULES = (reading, storing, tables)
