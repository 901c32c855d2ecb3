"""A model made of operations gives the bits of the reference's model (SPEC 10, 17)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import ComposedBackend, ComposedSession
from conformance.backends.reference import ReferenceBackend
from conformance.cases.model import prompt
from conformance.paths import model_folder


def test_a_session_of_operations_gives_the_bits_of_the_reference_model() -> None:
    folder = str(model_folder("fixtures/tiny-dense"))
    for weights in ("float32", "int4"):
        ours = ComposedBackend().load(folder, weights)
        theirs = ReferenceBackend().load(folder, weights)
        assert isinstance(ours, ComposedSession)
        for part in (prompt(20)[:13], prompt(20)[13:]):
            a, b = ours.forward(part, "exact"), theirs.forward(part, "exact")
            assert np.array_equal(a.view(np.uint32), b.view(np.uint32))
