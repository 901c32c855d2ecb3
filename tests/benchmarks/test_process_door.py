"""What the process door adds to a small case: a call's way to a program and back.

pytest tests/benchmarks/test_process_door.py --benchmark-only -s
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from conformance.backends import resolve_process

from .test_speed import seconds

PROGRAM = Path(__file__).parents[1] / "conformance" / "programs" / "misbehaving.py"


def test_a_small_call_through_the_door(benchmark: Any) -> None:
    """1 KiB there and back, to a Python program that doubles it."""
    backend = resolve_process(shlex.join([sys.executable, "-I", "-S", str(PROGRAM), "right"]))
    x = np.ones(256, np.float32)
    try:
        there, here = seconds(lambda: backend.cos(x=x), 300), seconds(lambda: 2 * x, 300)
        benchmark.pedantic(lambda: backend.cos(x=x), rounds=100)
    finally:
        backend.close()
    added = (median(there) - median(here)) * 1e3
    benchmark.extra_info.update(milliseconds=added, wanted="below 2 ms")
    print(f"\nthe process door adds {added:.3f} ms to a small case (aim: below 2 ms)")
