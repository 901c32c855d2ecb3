"""One digest of the exact lane, printed by a process of its own (SPEC 2, 4, 5, 6, 8).

Run as `python -m tests.fingerprint`, under whatever environment is to be tried: the digest
must not depend on it. Printed beside it is what the environment really led to.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from reference import elementary
from reference.arithmetic import matmul
from reference.attention import attention_exact
from reference.normalization import rms_norm
from reference.quantization import linear_int4, quantize_int4
from reference.rotary import RopeParameters, cos_sin, rotate
from tests.oracle import nasty
from tests.oracle.arrays import digest, f32


def compute() -> dict[str, str]:
    """A digest for each operation, over seeded data."""
    rng = np.random.default_rng(20)
    x = nasty.matrix(rng, 2500, 100)
    w = nasty.matrix(rng, 70, 100)
    x[:600] = nasty.steps(rng, 600, 100)
    w[:20] = 1
    normal = rng.standard_normal((2500, 100)).astype(np.float32)
    q = rng.standard_normal((150, 4, 40)).astype(np.float32) * np.float32(2)
    k, v = (rng.standard_normal((170, 2, 40)).astype(np.float32) for _ in range(2))
    sinks = f32([0.5, -np.inf, 20.0, -3.0])
    words = rng.integers(0, 2**32, 30000, dtype=np.uint64).astype(np.uint32)
    points = np.concatenate([words.view(np.float32), normal.ravel()[:10000] * np.float32(9)])
    cos, sin = cos_sin(RopeParameters("default", 10000.0, 40), np.arange(150))
    return {
        "matmul": digest(matmul(x, w), matmul(normal, normal[:50])),
        "rms_norm": digest(rms_norm(x, w[0], 1e-5), rms_norm(normal, normal[0], 1e-6)),
        "linear_int4": digest(linear_int4(normal, quantize_int4(normal[:70]))),
        "attention": digest(
            attention_exact(q, k, v),
            attention_exact(q, k, v, window=50, softcap=5.0, sinks=sinks),
        ),
        "rotate": digest(rotate(q, cos, sin), rotate(q, cos, sin, interleaved=True)),
        "elementary": digest(*(getattr(elementary, name)(points) for name in FUNCTIONS)),
        "softmax": digest(elementary.softmax(normal * np.float32(5))),
    }


FUNCTIONS = ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh")


def features() -> list[str]:
    """The instruction sets that numpy dispatches to here."""
    core: Any = np
    umath = core._core._multiarray_umath
    return [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]


if __name__ == "__main__":
    blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
    report = {
        "architecture": sorted(str(library.get("architecture")) for library in blas),
        "threads": sorted(int(library["num_threads"]) for library in blas),
        "features": features(),
        "digests": compute(),
    }
    print(json.dumps(report))
