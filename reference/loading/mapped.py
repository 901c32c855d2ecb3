"""Arrays in a file, mapped into memory for as long as they are used (SPEC 12.3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.errors import WeightsError

SHORTER = "it became shorter while it was read"


def mapped(
    path: Path, dtype: np.dtype[Any], begin: int, shape: tuple[int, ...], again: str
) -> NDArray[Any]:
    """A read-only array of that dtype and shape, whose bytes begin at byte `begin` of the file.

    Raises WeightsError, with the remedy `again`, where the file cannot be read or is too short now.
    Where it becomes shorter later, reading the array ends the process.
    """
    try:
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        return np.asarray(np.memmap(path, dtype, "r", begin, shape))
    except (OSError, ValueError) as reason:
        why = reason.strerror if isinstance(reason, OSError) else SHORTER
        raise WeightsError(f"{path}: {why}; {again}") from None
