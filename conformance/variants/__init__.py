"""Legitimate variants: whatever the suite says of one of these, it must pass."""

from __future__ import annotations

from functools import cache

from conformance.variants import (
    contracted,
    engines,
    exact,
    functions,
    kernels,
    orders,
    precision,
    serving,
    storage,
)
from conformance.variants.variant import AnyVariant, Variant

__all__ = ["AnyVariant", "Variant", "variants"]

MODULES = (exact, contracted, orders, kernels, engines, functions, precision, storage, serving)


@cache
def variants() -> tuple[AnyVariant, ...]:
    """Every variant, as its module lists them."""
    return tuple(
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Variant)
        and value.__module__ == module.__name__
        and "name" in vars(value)
    )
