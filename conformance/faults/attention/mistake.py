"""What all mistakes of attention share."""

from __future__ import annotations

from conformance.faults.fault import Fault


class Attention(Fault):
    """A mistake in the operation `attention`."""

    operations = ("attention",)
