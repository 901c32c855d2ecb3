"""Tiles on threads: each runs once, errors surface, and BLAS is left as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl

from reference import threads as module
from reference.errors import RequestError
from reference.threads import A_CORE, ROWS, Array, by_rows, share, single_blas
from tests.oracle.arrays import Float32, assert_same

WAIT = 20
"""Seconds after which a test that waits for another thread gives up."""

TASKS = Path("/proc/self/task").exists()


def blas_threads() -> list[int]:
    """Threads of the libraries that were there at first; torch may bring others later."""
    return [int(library["num_threads"]) for library in module._controller().info()]


@pytest.fixture(params=[1, 2])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Threads that work is shared out to, whatever the machine has."""
    count: int = request.param
    monkeypatch.setattr(module, "thread_count", lambda: count)
    return count


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "thread_count", lambda: 2)


@pytest.fixture(autouse=True)
def _blas_is_left_alone() -> Iterator[None]:
    before = blas_threads()
    yield
    assert blas_threads() == before


# share


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100])
def test_every_tile_is_worked_once(workers: int, count: int) -> None:
    done: list[int] = []
    share(done.append, range(count))
    assert Counter(done) == Counter(range(count))


def test_one_thread_works_in_order_and_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "thread_count", lambda: 1)
    seen: list[tuple[int, int]] = []
    share(lambda tile: seen.append((tile, threading.get_ident())), range(9))
    assert seen == [(tile, threading.get_ident()) for tile in range(9)]


@pytest.mark.usefixtures("two")
def test_two_threads_work_at_once() -> None:
    """Two tiles that wait for each other both end, and the caller is one of the two workers."""
    barrier, seen = threading.Barrier(2, timeout=WAIT), set()

    def tile(_: int) -> None:
        barrier.wait()
        seen.add(threading.get_ident())

    share(tile, [0, 1])
    assert len(seen) == 2
    assert threading.get_ident() in seen


@pytest.mark.usefixtures("two")
def test_work_that_is_not_worth_it_stays_here() -> None:
    seen: list[tuple[int, int]] = []
    share(lambda tile: seen.append((tile, threading.get_ident())), range(50), worth_it=False)
    assert seen == [(tile, threading.get_ident()) for tile in range(50)]


@pytest.mark.usefixtures("two")
def test_work_inside_a_tile_is_not_shared_out_again() -> None:
    barrier, inner = threading.Barrier(2, timeout=WAIT), {}

    def tile(index: int) -> None:
        barrier.wait()
        by: list[int] = []
        share(lambda _: by.append(threading.get_ident()), range(6))
        inner[index] = (threading.get_ident(), by)

    share(tile, [0, 1])
    assert all(by == [own] * 6 for own, by in inner.values())
    assert len({own for own, _ in inner.values()}) == 2
    seen = set()

    def afterwards(_: int) -> None:
        barrier.wait()
        seen.add(threading.get_ident())

    share(afterwards, [0, 1])
    assert len(seen) == 2, "work is shared out again once the tiles are done"


@pytest.mark.usefixtures("two")
def test_tiles_on_threads_see_blas_on_one() -> None:
    if not blas_threads():
        pytest.skip("threadpoolctl knows no library here")
    seen: list[list[int]] = []
    share(lambda _: seen.append(blas_threads()), range(4))
    assert all(count == 1 for counts in seen for count in counts)


@pytest.mark.parametrize("bad", [0, 3, 9])
def test_an_error_in_a_tile_surfaces(workers: int, bad: int) -> None:
    before = blas_threads()

    def tile(index: int) -> None:
        if index == bad:
            raise KeyError("the tile")

    with pytest.raises(KeyError, match="the tile"):
        share(tile, range(10))
    assert blas_threads() == before
    done: list[int] = []
    share(done.append, range(50))
    assert sorted(done) == list(range(50))


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("caller", [True, False])
def test_an_error_on_either_thread_surfaces(caller: bool) -> None:
    barrier, here = threading.Barrier(2, timeout=WAIT), threading.get_ident()

    def tile(_: int) -> None:
        barrier.wait()
        if (threading.get_ident() == here) == caller:
            raise ZeroDivisionError("on this one")

    with pytest.raises(ZeroDivisionError, match="on this one"):
        share(tile, [0, 1])
    seen = set()

    def afterwards(_: int) -> None:
        barrier.wait()
        seen.add(threading.get_ident())

    share(afterwards, [0, 1])
    assert len(seen) == 2, "neither thread takes itself to be inside a tile still"


@pytest.mark.usefixtures("two")
def test_no_tile_is_at_work_once_share_has_raised() -> None:
    """The caller may reuse its arrays: whatever else was running has ended."""
    running, barrier, here = [0], threading.Barrier(2, timeout=WAIT), threading.get_ident()
    slow = threading.Event()

    def tile(_: int) -> None:
        barrier.wait()
        if threading.get_ident() == here:
            raise ValueError("at once")
        running[0] += 1
        slow.wait(0.05)
        running[0] -= 1

    with pytest.raises(ValueError, match="at once"):
        share(tile, [0, 1])
    assert running == [0]


def test_no_tile_is_at_work_once_another_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two workers fails at once; the second is waited for all the same."""
    workers = [ThreadPoolExecutor(1, f"worker-{number}") for number in range(2)]
    left, running, barrier = iter(workers), [0], threading.Barrier(3, timeout=WAIT)

    class Pool:
        def submit(self, work: Callable[[], None]) -> Future[None]:
            return next(left).submit(work)

    def tile(_: int) -> None:
        barrier.wait()
        if threading.current_thread().name.startswith("worker-0"):
            raise ValueError("at once")
        if threading.current_thread().name.startswith("worker-1"):
            running[0] += 1
            threading.Event().wait(0.1)
            running[0] -= 1

    monkeypatch.setattr(module, "thread_count", lambda: 3)
    monkeypatch.setattr(module, "_pool", lambda process, workers: Pool())
    with pytest.raises(ValueError, match="at once"):
        share(tile, [0, 1, 2])
    assert running == [0]
    for worker in workers:
        worker.shutdown()


def test_two_callers_at_once_each_get_their_tiles(workers: int) -> None:
    results: dict[int, list[int]] = {0: [], 1: []}
    callers = [
        threading.Thread(target=lambda i=i: share(results[i].append, range(200))) for i in results
    ]
    with threadpoolctl.threadpool_limits(1):  # two limits that overlap need not nest
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(WAIT)
    assert [sorted(done) for done in results.values()] == [list(range(200))] * 2


# single_blas


def test_single_blas_limits_and_restores() -> None:
    before = blas_threads()
    with single_blas():
        assert set(blas_threads()) <= {1}
        with single_blas():
            assert set(blas_threads()) <= {1}
        assert set(blas_threads()) <= {1}
    assert blas_threads() == before
    with pytest.raises(ValueError, match="inside"), single_blas():
        raise ValueError("inside")
    assert blas_threads() == before


def test_thread_count_is_what_blas_was_told_before_any_limit() -> None:
    count = module.thread_count()
    with single_blas():
        assert module.thread_count() == count
    assert count >= 1


# by_rows


def rows(count: int) -> Float32:
    return np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)


def work(x: Array, y: Array) -> tuple[Array, Array]:
    return np.sqrt(np.abs(x)) - y[:, :1], np.stack([y, x], axis=-1)


def noting(sizes: list[int]) -> Callable[..., tuple[Array, Array]]:
    def noted(x: Array, y: Array) -> tuple[Array, Array]:
        assert len(x) == len(y)
        sizes.append(len(x))
        return work(x, y)

    return noted


@pytest.mark.parametrize("length", sorted({m * ROWS + d for m in (1, 2, 3) for d in (-1, 0, 1)}))
def test_by_rows_is_the_unsplit_call(workers: int, length: int) -> None:
    x, y, sizes = rows(length), rows(length)[::-1], list[int]()
    for actual, expected in zip(by_rows(noting(sizes), x, y), work(x, y), strict=True):
        assert_same(actual, expected)
    assert sum(sizes) == length
    if length < 2 * ROWS:
        assert sizes == [length]
    else:
        assert max(sizes) == ROWS


@pytest.mark.parametrize("length", [0, 1, 2])
def test_by_rows_takes_few_rows(workers: int, length: int) -> None:
    x = rows(length)
    for actual, expected in zip(by_rows(work, x, x), work(x, x), strict=True):
        assert_same(actual, expected)


def test_by_rows_passes_errors_on(workers: int) -> None:
    def fails(x: Array) -> tuple[Array]:
        raise ArithmeticError("no rows")

    with pytest.raises(ArithmeticError, match="no rows"):
        by_rows(fails, rows(3 * ROWS))


# limited_to


def test_a_limit_holds_for_tiles_and_for_blas_and_ends() -> None:
    before = module.thread_count()
    for count in (1, 2):
        with module.limited_to(count):
            assert module.thread_count() == count
            assert set(blas_threads()) == {count}
            with single_blas():
                assert set(blas_threads()) == {1}
            assert set(blas_threads()) == {count}
        assert module.thread_count() == before


def test_a_limit_ends_with_an_error_too() -> None:
    before = module.thread_count()
    with pytest.raises(ZeroDivisionError), module.limited_to(1):
        raise ZeroDivisionError
    assert module.thread_count() == before


def test_more_threads_than_the_cores_are_for_are_refused_before_any_starts() -> None:
    before, most = module.thread_count(), max(module.thread_count(), A_CORE * module.cores())
    running = len(os.listdir("/proc/self/task")) if TASKS else 0
    with pytest.raises(RequestError, match=rf"^threads: {most + 1} were asked for; give {most} "):  # noqa: SIM117
        with module.limited_to(most + 1):
            pytest.fail("it was let in")
    assert module.thread_count() == before
    assert not TASKS or len(os.listdir("/proc/self/task")) == running


def test_more_threads_than_blas_can_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = module.thread_count()
    monkeypatch.setattr(module, "_demand_threads", lambda count: None)
    with pytest.raises(RequestError, match=r"^threads: 100000 were asked for, BLAS has"):  # noqa: SIM117
        with module.limited_to(100_000):
            pytest.fail("it was let in")
    assert module.thread_count() == before


STARVED = """
import resource
import numpy as np
from reference.errors import RequestError
from reference.threads import A_CORE, cores, limited_to

square = np.ones((512, 512))
square @ square
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (30 << 20)  # the stacks of a few threads
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    with limited_to(A_CORE * cores()):
        square @ square
except RequestError as error:
    print(error)
"""


@pytest.mark.skipif(not TASKS, reason="what a process holds is read from /proc")
def test_threads_that_the_system_does_not_start_are_refused_and_nothing_waits_for_them() -> None:
    run = [sys.executable, "-c", STARVED]
    told = subprocess.run(run, capture_output=True, text=True, timeout=WAIT, check=True)
    assert "this system starts no more" in told.stdout
