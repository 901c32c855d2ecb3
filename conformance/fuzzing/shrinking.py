"""Making a failing case small: choice by choice, the simplest that still fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic

from conformance.fuzzing.case import Made
from conformance.fuzzing.draw import Asked, Value
from reference.errors import BitforbitError

TRIES, SECONDS = 500, 30.0
"""Cases that are tried, and time that is taken, for one failure."""


def shrunk(
    failing: Made,
    fails: Callable[[Made], bool],
    asked: Asked,
    tries: int = TRIES,
    seconds: float = SECONDS,
) -> Made:
    """The case with its choices made simpler one by one, as long as it still fails.

    Each choice is tried from its simplest value on, until none can be replaced. fails: whether a
    case is a failure of the same kind.
    """
    end, left = monotonic() + seconds, tries
    progress = True
    while progress:
        progress = False
        for choice in failing.choices:
            for value in choice.simpler:
                if left == 0 or monotonic() >= end:
                    return failing
                left -= 1
                simpler = _with(failing, choice.name, value, asked)
                if simpler is not None and fails(simpler):
                    failing, progress = simpler, True
                    break
    return failing


def _with(made: Made, name: str, value: Value, asked: Asked) -> Made | None:
    """The case with one choice in place of another; None where the two do not go together."""
    kept: Mapping[str, Value] = {choice.name: choice.value for choice in made.choices}
    try:
        drawn = replace(made.case, given={**kept, name: value}).draw(asked)
    except BitforbitError:
        return None
    return drawn if drawn.choices != made.choices else None
