"""What a fault is: a mistake of a few lines, put over any backend that works in steps."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeVar

import ml_dtypes
import numpy as np

from conformance.backends.composed import ComposedBackend, ComposedSession
from reference.arithmetic import F32

Severity = Literal["subtle", "wrong", "broken"]
"""What a user would see: figures a little off; worse text in some cases; garbage or NaN."""

GITHUB = "https://github.com/"


class Catalogued:
    """What the catalogue says of a fault. The first line of its docstring is its description.

    name: as diagnosis names it. reports: public threads, after GITHUB; () where none is known.
    operations: those of SPEC 17 whose results it changes. contract: it breaks the exact contract
    alone, and is legitimate float32. fma: it is that of a backend which declares `fma`. stored: it
    must be caught, too, where all tensors are bfloat16 and declared so.
    """

    name: str
    reports: ClassVar[tuple[str, ...]]
    severity: ClassVar[Severity]
    operations: ClassVar[tuple[str, ...]]
    contract: ClassVar[bool] = False
    fma: ClassVar[bool] = False
    stored: ClassVar[bool] = False


class Fault(Catalogued, ComposedBackend):
    """A mistake in an operation."""


class SessionFault(Catalogued, ComposedSession):
    """A mistake in how a model is put together from operations that are right."""

    operations: ClassVar[tuple[str, ...]] = ("forward", "generate", "forced")


AnyFault = type[Fault] | type[SessionFault]
Base = TypeVar("Base", bound=ComposedBackend)


def description(fault: type[object]) -> str:
    """What is wrong, in a line."""
    return (fault.__doc__ or "").split("\n")[0]


def applied(fault: AnyFault, base: type[Base]) -> Base:
    """A backend that is `base` but for the fault."""
    if issubclass(fault, SessionFault):
        session = type(fault.__name__, (fault, base.session), {})
        whole: Base = type(fault.__name__, (base,), {"session": session, "name": fault.name})()
        return whole
    numerics = {**base.numerics, "fma": True} if fault.fma else base.numerics
    members = {"numerics": numerics, "name": fault.name}
    made: Base = type(fault.__name__, (fault, base), members)()
    return made


def bfloat16(x: F32) -> F32:
    """Rounded to bfloat16, to nearest even."""
    with np.errstate(all="ignore"):
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def half(x: F32) -> F32:
    """Rounded to float16, to nearest even."""
    with np.errstate(all="ignore"):
        return x.astype(np.float16).astype(np.float32)


def cut_to_bfloat16(x: F32) -> F32:
    """Cut off to bfloat16, towards zero: the upper half of the bits."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
