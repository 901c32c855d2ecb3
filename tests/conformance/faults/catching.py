"""Whether a case fails, which is all that a fault must show: the smallest first, until one does."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from conformance.calibration.trials import judged
from conformance.cases.checks import Invariance
from conformance.golden import Golden, read_all
from conformance.paths import data_folder

SHORT = {
    "turns": ("short", "answered", "same", "two_users", "window_mistral", "window_qwen2"),
    "speculate": ("longer_than_left", "prose", "sizes", "across_a_page", "far_back"),
    "serve": ("small", "drafted"),
    "resume": ("short", "answered", "same", "window_mistral"),
    "complete": ("first_id", "second_id", "one_id", "at_once", "in_the_prompt", "at_the_limit"),
}


@cache
def goldens() -> tuple[Golden, ...]:
    return tuple(read_all(data_folder("goldens")))


def bits(golden: Golden) -> list[str]:
    return [rule for rule in golden.rules if rule == "bits"]


def size(golden: Golden) -> int:
    """Bytes of the inputs and outputs."""
    return sum(array.nbytes for array in (*golden.inputs.values(), *golden.outputs.values()))


def is_caught(backend: Any, own: Iterable[Golden], checks: Iterable[Invariance] = ()) -> bool:
    """Whether some golden or invariance fails; what comes after the first that does is not run."""
    failed = (judged(backend, [golden], bits).failed for golden in sorted(own, key=size))
    return any(failed) or any(judged(backend, [], bits, [check]).failed for check in checks)


def short(operation: str) -> list[Golden]:
    """The goldens of serving that take a moment."""
    names = SHORT.get(operation, ())
    return [g for g in goldens() if g.operation == operation and g.id.split("/")[2] in names]
