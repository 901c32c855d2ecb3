"""The cases: one module an area with the recipes of its goldens, and the invariances (SPEC 18)."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.cases import (
    attention,
    brinks,
    cache,
    elementary,
    ending,
    experts,
    families,
    feedforward,
    linear,
    model,
    normalization,
    one_sided,
    order,
    rotary,
    sampling,
    serving,
    sparse,
    speculation,
)
from conformance.cases.recipe import Recipe

MODULES = (
    elementary,
    linear,
    normalization,
    one_sided,
    rotary,
    attention,
    feedforward,
    experts,
    sampling,
    speculation,
    brinks,
    cache,
    model,
    families,
    sparse,
    ending,
    serving,
    order,
)


def recipes() -> Iterator[Recipe]:
    """Every golden's recipe."""
    for module in MODULES:
        yield from module.recipes()
