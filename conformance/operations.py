"""The operations that a backend may implement, and how the suite calls them (SPEC 17)."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conformance.golden import Array
from conformance.paths import named_model

Outputs = dict[str, Array]


class NotImplementedByBackendError(Exception):
    """The backend has no such method: not a pass, and not a failure either."""


class WrongAnswerError(Exception):
    """The backend answered with something that is not what the operation returns."""


_SPECIAL = {
    "quantize_int4": ("packed", "scales"),
    "quantize_int8": ("codes", "scale"),
    "rope_constants": ("inv_freq", "factor"),
    "route": ("experts", "gates"),
    "generate": ("tokens", "logits"),
    "complete": ("tokens", "logits"),
    "forced": ("tokens",),
    "turns": ("tokens", "logits", "cache_n", "prompt_n"),
    "speculate": ("tokens", "logits", "accepted"),
    "serve": ("tokens", "logits"),
    "resume": ("tokens", "logits", "cache_n"),
}

_OF_SESSIONS = ("generate", "complete", "turns", "speculate", "serve")
"""Operations of a session that are called as they are."""

APPEND, FORK, TRUNCATE, FREE = range(4)
"""What a line of a paging script does (SPEC 17)."""


def output_names(operation: str) -> tuple[str, ...]:
    """The names of an operation's results, in order."""
    return _SPECIAL.get(operation, ("y",))


class Recorded(ABC):
    """A backend whose answers lie there already: it is asked for whole calls, and loads nothing."""

    @abstractmethod
    def answer(self, operation: str, arguments: Mapping[str, Any]) -> Array | tuple[Array, ...]:
        """An operation's results in order; of a session's operation too, by model and weights."""


class Sessions:
    """Models that a backend has loaded, each once a run.

    places: where models lie that are none of the fixtures, by name.
    """

    def __init__(self, backend: object, places: Mapping[str, str] | None = None) -> None:
        self._backend = backend
        self._places = places or {}
        self._loaded: dict[tuple[str, str], Any] = {}

    def get(self, model: str, weights: str) -> Any:
        """The backend's session for a model, fresh: `reset` was called."""
        key = (model, weights)
        if key not in self._loaded:
            load = _method(self._backend, "load")
            place = self._places.get(model) or str(named_model(model))
            self._loaded[key] = load(model=place, weights=weights)
        session = self._loaded[key]
        _method(session, "reset")()
        return session


def call(
    backend: object, sessions: Sessions, operation: str, arguments: Mapping[str, Any]
) -> Outputs:
    """Call an operation; arrays in, arrays out by name.

    Raises NotImplementedByBackendError, WrongAnswerError, or whatever the backend raises.
    """
    if isinstance(backend, Recorded):
        answer: Any = backend.answer(operation, arguments)
    elif operation == "forward":
        answer = _forward(sessions, **arguments)
    elif operation == "forced":
        answer = _forced(sessions, **arguments)
    elif operation == "resume":
        answer = _resume(sessions, **arguments)
    elif operation in _OF_SESSIONS:
        answer = _in_session(sessions, operation, **arguments)
    else:
        answer = _method(backend, operation)(**arguments)
    names = output_names(operation)
    values = answer if isinstance(answer, tuple) else (answer,)
    if len(values) != len(names) or not all(isinstance(v, np.ndarray) for v in values):
        kinds = ", ".join(type(v).__name__ for v in values)
        raise WrongAnswerError(
            f"{operation} must return {len(names)} numpy array(s), not ({kinds})"
        )
    # Copies, for a backend may answer into the same array again; and plain arrays, without a mask.
    return {name: np.array(value) for name, value in zip(names, values, strict=True)}


def _method(owner: object, name: str) -> Callable[..., Any]:
    method = getattr(owner, name, None)
    if not callable(method):
        raise NotImplementedByBackendError(name)
    return method  # type: ignore[no-any-return]


def _forward(
    sessions: Sessions,
    model: str,
    weights: str,
    attention: str,
    tokens: Array,
    chunks: list[int] | None = None,
    last: int | None = None,
) -> Array:
    """Logits of `tokens`, fed in `chunks` (whole by default); of the `last` rows, if given."""
    session = sessions.get(model, weights)
    forward = _method(session, "forward")
    stops = np.cumsum(chunks or [len(tokens)])
    pieces = np.split(tokens, stops[:-1])
    parts = [np.array(forward(tokens=piece, attention=attention)) for piece in pieces]
    logits = np.concatenate(parts)
    return logits if last is None else logits[-last:]


def _forced(
    sessions: Sessions, model: str, weights: str, attention: str, tokens: Array, last: int
) -> Array:
    """The greedy token after each of the last prefixes, by `forward` where there is no `forced`."""
    session = sessions.get(model, weights)
    own = getattr(session, "forced", None)
    if callable(own):
        return np.asarray(own(tokens=tokens, last=last))
    logits = np.asarray(_method(session, "forward")(tokens=tokens, attention=attention))
    if logits.ndim != 2 or len(logits) < last:
        raise WrongAnswerError(
            f"forward must return logits (T, V) of {len(tokens)} tokens, not {logits.shape}"
        )
    chosen: Array = logits[-last:].argmax(axis=1)
    return chosen


def _resume(sessions: Sessions, **arguments: Any) -> Any:
    """What is continued from a file, whose path no golden has: the suite gives one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.cache"
        answer = _in_session(sessions, "resume", path=str(path), **arguments)
        if not path.is_file() or path.stat().st_size == 0:
            raise WrongAnswerError("resume must write a file at `path`, and did not")
    return answer


def _in_session(
    sessions: Sessions, operation: str, model: str, weights: str, **arguments: Any
) -> Any:
    return _method(sessions.get(model, weights), operation)(**arguments)
