"""Worker processes: what they are prepared by, and how Ctrl-C ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from conformance.pools import pool
from tests.conformance.command_line import ROOT
from tests.conformance.signals import heeding_interrupts

_GIVEN: list[int] = []

PROGRAM = """
import sys, time
from conformance.pools import pool

def nothing(): pass

def main():
    with pool(2, nothing) as workers:
        for _ in range(20):
            workers.submit(time.sleep, {seconds})
        if {seconds}:
            workers.submit(nothing)
        print("ready", flush=True)
        while True:  # a signal just before a wait without end would be seen after it
            time.sleep(0.05)

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(7)
"""


def prepared(number: int) -> None:
    _GIVEN.append(number)


def given() -> int:
    return sum(_GIVEN)


def test_each_worker_is_prepared() -> None:
    with pool(2, prepared, 5) as workers:
        assert {job.result() for job in [workers.submit(given) for _ in range(4)]} == {5}


def test_a_worker_that_dies_is_told() -> None:
    with pool(1, prepared, 5) as workers, pytest.raises(BrokenExecutor):
        workers.submit(os._exit, 1).result()


def test_pools_are_opened_from_any_thread() -> None:
    found = []

    def work() -> None:
        with pool(1, prepared, 3) as workers:
            found.append(workers.submit(given).result())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [3]


def started(folder: Path, seconds: int) -> subprocess.Popen[bytes]:
    """The program, once it has given its workers something to do."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(seconds=seconds))
    running = subprocess.Popen(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=heeding_interrupts,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"ready\n"
    return running


def told(running: subprocess.Popen[bytes]) -> bytes:
    """What it says on its standard error until all of its processes have ended."""
    try:
        return running.communicate(timeout=25)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.parametrize("seconds", [30, 0], ids=["at work", "at rest"])
def test_ctrl_c_ends_all_without_a_word(tmp_path: Path, seconds: int) -> None:
    """A terminal's Ctrl-C goes to the parent and to the workers, which may still be importing."""
    running = started(tmp_path, seconds)
    os.killpg(running.pid, signal.SIGINT)
    assert (told(running), running.returncode) == (b"", 7)


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    running = started(tmp_path, 30)
    time.sleep(1)  # for the workers to be at work
    running.kill()
    told(running)
