"""Every operation as a sequence of small steps, so that a mistake or a variant is one method.

`ComposedBackend` gives the reference's own bits; `OwnOrderBackend` takes the same steps in float32,
in an order of its own. `ComposedSession` is a whole model made of a backend's operations. Faults
(`conformance.faults`) and variants (`conformance.variants`) replace single steps.
"""

from __future__ import annotations

from conformance.backends.composed.arithmetic import Floats
from conformance.backends.composed.backend import ComposedBackend
from conformance.backends.composed.own_order import OwnOrderBackend
from conformance.backends.composed.session import ComposedSession

__all__ = ["ComposedBackend", "ComposedSession", "Floats", "OwnOrderBackend"]
