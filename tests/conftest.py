"""Settings that every test shares."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

for name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES"):
    os.environ.pop(name, None)  # each changes what pytest, rich or typer print, wherever tests run

settings.register_profile(
    "bitforbit",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("bitforbit")


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores out to the processes of `-n`, which inherit this, and so do theirs.

    BLAS and OpenMP have as many threads as there are cores in each of them otherwise, and these
    spin while they wait for each other. Tests of threads ask for theirs.
    """
    processes = config.getoption("numprocesses", None)
    if processes:
        threads = max(1, (os.cpu_count() or 1) // processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
