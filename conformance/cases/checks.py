"""What a check without a golden is made of: it calls a backend and gives a verdict (SPEC 18)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.bits import raw
from conformance.golden import Array
from conformance.operations import Outputs, Sessions, call
from conformance.rules import Verdict


@dataclass(frozen=True)
class Invariance:
    """One check: an id, the section it tests, and a function of a caller to a verdict."""

    id: str
    section: str
    check: Callable[[Caller], Verdict]

    @property
    def operation(self) -> str:
        """What is called."""
        return self.id.split("/")[1]

    @property
    def rules(self) -> tuple[str, ...]:
        """The one rule that there is."""
        return ("bits",)


class Caller:
    """Calls operations of one backend."""

    def __init__(self, backend: object, sessions: Sessions) -> None:
        self._backend, self._sessions = backend, sessions
        self._known: dict[str, Outputs] = {}

    def __call__(self, operation: str, **arguments: Any) -> Outputs:
        """The operation's outputs by name, on copies, so that one call cannot spoil the next."""
        copies = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        return call(self._backend, self._sessions, operation, copies)

    def once(self, operation: str, **arguments: Any) -> Outputs:
        """The same, computed only once a run: for what several checks compare with."""
        key = repr((operation, {n: np.asarray(a).tolist() for n, a in arguments.items()}))
        if key not in self._known:
            self._known[key] = self(operation, **arguments)
        return self._known[key]


def compare(whole: Mapping[str, Array], parts: Mapping[str, Array], what: str) -> Verdict:
    """Pass where both have the same outputs, to the bit; `what` names the two."""
    if any(parts[n].shape != a.shape or parts[n].dtype != a.dtype for n, a in whole.items()):
        return Verdict("fail", None, f"{what}: shapes or dtypes differ")
    differ = sum(int((raw(parts[n]) != raw(a)).sum()) for n, a in whole.items())
    if not differ:
        return Verdict("pass", 0.0)
    size = sum(a.size for a in whole.values())
    return Verdict("fail", differ / size, f"{what}: {differ:,} of {size:,} elements differ")
