"""What all mistakes of sampling share."""

from __future__ import annotations

from typing import ClassVar

from conformance.faults.fault import Fault


class Sampling(Fault):
    """A mistake in the operation `sample`."""

    operations: ClassVar[tuple[str, ...]] = ("sample",)
