"""The catalogue of known faults: a module or package an area, each fault a few lines."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from types import ModuleType

from conformance.errors import BackendError
from conformance.faults import (
    activations,
    attention,
    batching,
    ending,
    experts,
    linear,
    loading,
    model,
    norms,
    order,
    paging,
    prefix,
    quantization,
    rope,
    sampling,
    speculation,
    weight_only,
)
from conformance.faults.fault import AnyFault, Fault, SessionFault, applied, description

__all__ = [
    "AnyFault",
    "Fault",
    "SessionFault",
    "applied",
    "area",
    "areas",
    "description",
    "fault",
    "faults",
]

AREAS: tuple[ModuleType, ...] = (
    activations, linear, quantization, weight_only, norms, rope, attention, order, experts,
    sampling, speculation, model, ending, paging, prefix, batching, loading,
)  # fmt: skip
"""In the order of the catalogue; an area that is a package lists its modules as `MODULES`."""


@cache
def faults() -> tuple[AnyFault, ...]:
    """Every fault of the catalogue, by area and as its modules list them."""
    modules = (module for place in AREAS for module in getattr(place, "MODULES", (place,)))
    return tuple(fault for module in modules for fault in _of(module))


def _of(module: ModuleType) -> list[AnyFault]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, (Fault, SessionFault))
        and value.__module__ == module.__name__
        and "name" in vars(value)
    ]


def areas() -> tuple[str, ...]:
    """The areas, in the order of the catalogue."""
    return tuple(place.__name__.removeprefix(f"{__name__}.") for place in AREAS)


def area(fault: AnyFault) -> str:
    """The area of a fault: the module or package that it lies in."""
    return fault.__module__.removeprefix(f"{__name__}.").partition(".")[0]


def fault(name: str) -> AnyFault:
    """The fault of that name. Raises BackendError where there is none."""
    found = next((f for f in faults() if f.name == name), None)
    if found is None:
        near = [f.name for f in faults() if name and name in f.name]
        near = near or get_close_matches(name, [f.name for f in faults()], 3)
        meant = f"; did you mean {', '.join(near[:3])}?" if near else ""
        raise BackendError(f"{name}: no such fault{meant}; `bitforbit faults list` names all")
    return found
