"""The machine on which a figure was measured, which every table and file of figures names."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from reference.threads import cores


@dataclass(frozen=True)
class Machine:
    """cpu: its name. cores: those that this process may use. blas: library, version and kernel."""

    cpu: str
    cores: int
    blas: str
    numpy: str
    system: str


def this_machine() -> Machine:
    """The machine that this process runs on."""
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    parts = ("internal_api", "version", "architecture")
    blas = [" ".join(str(library.get(part, "")) for part in parts).strip() for library in libraries]
    return Machine(
        _cpu(),
        cores(),
        ", ".join(dict.fromkeys(blas)) or "unknown",
        np.__version__,
        f"{platform.system()} {platform.machine()}",
    )


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpu() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Spread:
    """What repetitions of a figure gave. deviation: the sample's standard one, 0 for one value."""

    repetitions: int
    mean: float
    deviation: float
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one value or more."""
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        mean, median = statistics.fmean(values), statistics.median(values)
        return cls(len(values), mean, deviation, median, min(values), max(values))
