"""RMSNorm, exact and in plain float32 (SPEC 6)."""

from __future__ import annotations

import numpy as np

from reference.arithmetic import F32, dot64, one_nan, to_float32


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Divide each row of x, (..., K) float32, by its root mean square, and scale it (SPEC 6).

    weight: (K,) float32. Returns (..., K) float32. A row with a non-finite element is NaN
    throughout.
    """
    mean_square = dot64(x, x) / x.shape[-1]
    with np.errstate(all="ignore"):
        scale = to_float32(1 / np.sqrt(mean_square + eps))
        y: F32 = x * scale[..., None] * weight
    return one_nan(y)


def rms_norm_float32(x: F32, weight: F32, eps: float) -> F32:
    """The same in plain float32, summed in whatever order numpy does (SPEC 1.4)."""
    with np.errstate(all="ignore"):
        mean_square = np.vecdot(x, x) / np.float32(x.shape[-1])
        scale = np.float32(1) / np.sqrt(mean_square + np.float32(eps))
        y: F32 = x * scale[..., None]
        y *= weight
    return y
