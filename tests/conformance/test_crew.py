"""Jobs shared out: all are done, some twice, and whoever disagrees or dies is named."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from conformance.crew import SHARE, Crew, cluster, machine, processes, share_out
from conformance.errors import CrewError
from reference.errors import RequestError


@contextmanager
def threads(count: int) -> Iterator[Crew]:
    pools = {f"thread {n}": ThreadPoolExecutor(1, f"thread {n}") for n in range(count)}
    try:
        yield Crew(pools)
    finally:
        for pool in pools.values():
            pool.shutdown()


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    raise RequestError(f"{number} will not do")


def die(number: int) -> int:
    os._exit(3)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_job_is_answered_once(workers: int) -> None:
    jobs = list(range(35))
    with threads(workers) as crew:
        found = list(share_out(crew, square, jobs))
    assert sorted(found) == [(n, n * n) for n in jobs]


def test_every_tenth_job_is_done_by_two_workers() -> None:
    by: dict[int, set[str]] = {n: set() for n in range(35)}

    def noted(number: int) -> int:
        by[number].add(threading.current_thread().name)
        return number

    with threads(3) as crew:
        list(share_out(crew, noted, list(by)))
    assert {n for n, names in by.items() if len(names) == 2} == set(range(0, 35, SHARE))


def test_a_single_worker_does_nothing_twice() -> None:
    seen: Counter[int] = Counter()
    with threads(1) as crew:
        list(share_out(crew, lambda n: seen.update([n]), [1, 2, 3]))
    assert set(seen.values()) == {1}


def test_two_answers_that_differ_stop_the_run() -> None:
    def by_thread(number: int) -> str:
        return threading.current_thread().name

    with threads(2) as crew, pytest.raises(CrewError, match=r"7: .* do not give the same bytes"):
        list(share_out(crew, by_thread, [7, 8]))


def test_what_a_job_raises_is_raised() -> None:
    with threads(2) as crew, pytest.raises(RequestError, match="4 will not do"):
        list(share_out(crew, refuse, [4]))


def test_no_jobs() -> None:
    with threads(2) as crew:
        assert list(share_out(crew, square, [])) == []


def test_processes_share_the_work_and_name_themselves() -> None:
    with processes(2) as crew:
        assert sorted(share_out(crew, square, [1, 2, 3])) == [(1, 1), (2, 4), (3, 9)]
        names = {name: pool.submit(machine).result() for name, pool in crew.workers.items()}
    assert len(set(names.values())) == 2
    assert all("numpy" in name for name in names.values())


def test_a_process_that_dies_is_named() -> None:
    with processes(1) as crew, pytest.raises(CrewError, match="worker 1 died at 5"):
        list(share_out(crew, die, [5]))


def test_a_worker_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.crew.POLL", 0.01)
    gone = threading.Event()
    with threads(1) as crew:
        watched = Crew(crew.workers, lambda name: False)
        with pytest.raises(CrewError, match="thread 0 died at 1"):
            list(share_out(watched, lambda job: gone.wait(30), [1]))
        gone.set()


def test_a_dask_cluster_shares_the_work() -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as local,
        cluster(local.scheduler_address) as crew,
    ):
        assert len(crew.workers) == 2
        assert all(map(crew.alive, crew.workers))
        found = sorted(share_out(crew, partial(pow, 2), list(range(12))))
    assert found == [(n, 2**n) for n in range(12)]


def test_no_scheduler_at_the_address() -> None:
    pytest.importorskip("distributed")
    message = "--scheduler: no Dask scheduler at nonsense"
    with pytest.raises(RequestError, match=message), cluster("nonsense://nowhere"):
        pass
