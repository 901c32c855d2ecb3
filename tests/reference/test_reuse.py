"""Memory that is used again: never while somebody holds it, and only where a pass may keep it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reference import reuse
from reference.reuse import LARGE, LARGEST, keep_freed_memory, result_memory, scratch
from tests.oracle.arrays import Float32

FAULTS = """
import resource, sys
import numpy as np
from reference.reuse import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    activations = [np.ones(1 << 18, np.float32) for _ in range(8)]
    del activations
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc keeps and returns memory")
def test_freed_memory_is_kept() -> None:
    """8 MiB, 20 times: with the call they are faulted in but once."""

    def faults(what: str) -> int:
        command = [sys.executable, "-c", FAULTS, what]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        return int(subprocess.check_output(command, env=environment, text=True))

    assert 4 * faults("keep") < faults("leave")


def test_scratch_is_one_array_of_a_thread() -> None:
    there: list[Float32] = []
    here = scratch((4, 5))
    assert here.shape == (4, 5)
    assert here.dtype == np.float32
    assert np.shares_memory(here, scratch((2, 3)))
    thread = threading.Thread(target=lambda: there.append(scratch((4, 5))))
    thread.start()
    thread.join()
    assert not np.shares_memory(here, there[0])


SHAPE = (3, LARGE // 8)
"""48 MiB, of the size that is kept."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of this test's own, gone after it."""
    monkeypatch.setattr(reuse, "_memory", reuse._Memory())
    keep_freed_memory()


def address(x: Float32) -> int:
    return int(x.__array_interface__["data"][0])


def test_a_result_that_is_let_go_lends_its_memory_to_the_next() -> None:
    first = result_memory(SHAPE)
    assert first.shape == SHAPE
    assert first.dtype == np.float32
    assert first.flags.c_contiguous
    assert first.flags.writeable
    was = address(first)
    del first
    smaller = result_memory((2, LARGE // 8))
    assert smaller.shape == (2, LARGE // 8)
    assert address(smaller) == was


VIEWS: dict[str, Callable[[Float32], Any]] = {
    "itself": lambda x: x,
    "rows": lambda x: x[1:],
    "a view of a view": lambda x: x[1:].T[5:].reshape(-1, 2)[::2],
    "other type": lambda x: x.view(np.int32)[0],
    "buffer": lambda x: x.data,
    "strides": lambda x: np.lib.stride_tricks.as_strided(x, (3,), (4,)),
    "subclass": lambda x: x.view(np.recarray)[1:],
    "iterator": lambda x: iter(x.flat),
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_is_not_lent_again_as_long_as_a_view_is_held(view: str) -> None:
    first = result_memory(SHAPE)
    held, was = VIEWS[view](first), address(first)
    del first
    second = result_memory(SHAPE)
    kept = address(second)
    assert kept != was
    del held, second
    assert address(result_memory(SHAPE)) == kept


def test_a_torch_tensor_holds_it_too() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(result_memory(SHAPE))
    tensor[...] = 1
    result_memory(SHAPE)[...] = 2
    assert bool((tensor == 1).all())


def test_a_held_result_keeps_its_numbers() -> None:
    first = result_memory(SHAPE)
    first[...] = 1
    second = result_memory(SHAPE)
    second[...] = 2
    third = result_memory(SHAPE)
    third[...] = 3
    assert [float(x.max()) for x in (first, second, third)] == [1, 2, 3]


@pytest.mark.parametrize("size", [LARGE // 4 - 1, LARGEST // 4 + 1])
def test_what_is_small_or_very_large_is_not_kept(size: int) -> None:
    result_memory((size,))
    assert reuse._memory.result.size == 0


def test_nothing_is_kept_where_no_pass_may_keep_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_keeping", threading.Event())
    result_memory(SHAPE)
    assert reuse._memory.result.size == 0


def test_another_thread_has_memory_of_its_own() -> None:
    there: list[Float32] = []
    here = result_memory(SHAPE)
    was = address(here)
    del here
    thread = threading.Thread(target=lambda: there.append(result_memory(SHAPE)))
    thread.start()
    thread.join()
    assert address(there[0]) != was
