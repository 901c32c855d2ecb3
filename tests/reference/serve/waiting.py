"""Engines that take their time, and what must come true once they are left alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from reference.engine import Engine


def wait_for(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


def pages_go(engine: Engine) -> None:
    """Nothing is under way, and what is left in the cache can be given up."""
    wait_for(lambda: not engine.busy)
    engine.prefixes.evict(engine.pool.used_bytes)
    assert engine.pool.used_bytes == 0
    assert len(engine.prefixes) == 0


def long_request() -> dict[str, Any]:
    return {"prompt": [5], "ignore_eos": True, "stream": True, "cache_prompt": False}


def slowed(engine: Engine, seconds: float) -> Engine:
    engine.on_pass = lambda _: time.sleep(seconds)
    return engine
