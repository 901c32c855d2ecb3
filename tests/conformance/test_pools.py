"""Worker processes: what they are prepared by, and how Ctrl-C ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import BrokenExecutor
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


@pytest.mark.parametrize("seconds", [30, 0], ids=["at work", "at rest"])
def test_ctrl_c_ends_all_without_a_word(tmp_path: Path, seconds: int) -> None:
    """A terminal's Ctrl-C goes to the parent and to the workers, which may still be importing."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(seconds=seconds))
    started = subprocess.Popen(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=heeding_interrupts,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == b"ready\n"
    os.killpg(started.pid, signal.SIGINT)
    try:
        _, told = started.communicate(timeout=25)
    finally:
        started.kill()
    assert (started.returncode, told) == (7, b"")
