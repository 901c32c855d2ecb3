"""A model's logits in other processes: threads, BLAS kernels, instruction sets (SPEC 2)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import threadpoolctl

from tests.fingerprint import features
from tests.oracle.arrays import digest
from tests.reference.models import tiny, tokens_of
from tests.reference.processes import lines_of

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

PROGRAM = """
import json, sys
import numpy as np
from threadpoolctl import threadpool_info
from reference.model import load_model
from tests.fingerprint import features
from tests.oracle.arrays import digest
from tests.reference.test_model import tokens_of
blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
report = {
    "architecture": sorted(str(library.get("architecture")) for library in blas),
    "threads": sorted(int(library["num_threads"]) for library in blas),
    "features": features(),
    "digests": [],
}
if [report["architecture"], report["features"]] != json.loads(sys.argv[1]):
    model = load_model("fixtures/tiny-dense")
    report["digests"] = [digest(model.forward(tokens_of(n, 1024))) for n in (40, 600)]
print(json.dumps(report))
"""


@cache
def here() -> list[str]:
    return [digest(tiny().forward(tokens_of(count, 1024))) for count in (40, 600)]


def elsewhere(unless: Any = None, **environment: str) -> dict[str, Any]:
    """What a process of its own computes under these variables, `unless` it is just like this."""
    lines = lines_of("-c", PROGRAM, json.dumps(unless), **environment)
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def own_platform() -> list[Any]:
    blas = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]
    return [sorted(str(library.get("architecture")) for library in blas), features()]


@pytest.mark.parametrize("count", [1, 2])
def test_logits_do_not_depend_on_threads(count: int) -> None:
    report = elsewhere(OPENBLAS_NUM_THREADS=str(count))
    assert report["digests"] == here()
    if count not in report["threads"]:
        pytest.skip(f"this BLAS does not take {count} threads from the environment")


@pytest.mark.parametrize("core", ["Haswell", "SkylakeX"])
def test_logits_do_not_depend_on_blas_kernels(core: str) -> None:
    report = elsewhere(own_platform(), OPENBLAS_CORETYPE=core)
    if not report["digests"]:
        pytest.skip(f"OpenBLAS does not switch from {report['architecture']} to {core}")
    assert report["digests"] == here()


def test_logits_do_not_depend_on_instruction_sets_of_numpy() -> None:
    dropped = " ".join(features())
    if not dropped:
        pytest.skip("numpy dispatches to nothing beyond its baseline here")
    report = elsewhere(
        own_platform(), NPY_DISABLE_CPU_FEATURES=dropped, OPENBLAS_CORETYPE="Nehalem"
    )
    if not report["digests"]:
        pytest.skip("neither numpy nor OpenBLAS could be told to do without")
    assert report["features"] != features()
    assert report["digests"] == here()
