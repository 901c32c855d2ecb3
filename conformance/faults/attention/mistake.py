"""What all mistakes of attention share."""

from __future__ import annotations

import numpy as np

from conformance.faults.fault import Fault
from reference.arithmetic import F32
from reference.attention import Scores


class Attention(Fault):
    """A mistake in the operation `attention`; each step may look up the options of its head."""

    operations = ("attention",)

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """Note the options."""
        self.about = about
        return super().head(q, k, v, about, sink)
