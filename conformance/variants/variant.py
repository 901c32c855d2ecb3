"""What a variant is: another way to compute the same, which no case may fail."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.backends.composed import ComposedBackend, OwnOrderBackend


class Variant:
    """A legitimate implementation. The first line of its docstring is its description.

    exact: it reaches the exact contract, and is judged by bits and invariances too; others are
    judged by their bounds. kernels_only: it runs no whole model, being too slow in numpy.
    """

    name: str
    exact: ClassVar[bool] = False
    kernels_only: ClassVar[bool] = False


class Bounded(Variant, OwnOrderBackend):
    """float32, or less as declared, in some order."""


class Exact(Variant, ComposedBackend):
    """The exact contract, reached another way."""

    exact = True


AnyVariant = type[Any]
