"""What a check without a golden is made of: it calls a backend and gives a verdict (SPEC 18)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.golden import Array
from conformance.operations import Outputs, Sessions, call
from conformance.rules import Verdict, same_bits


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
    if all(whole[n].shape == parts[n].shape and whole[n].dtype == parts[n].dtype for n in whole):
        if same_bits(parts, whole):
            return Verdict("pass", 0.0)
        share = np.mean([np.mean(whole[n] != parts[n]) for n in whole])
        return Verdict("fail", float(share), f"{what}: {share:.1%} of the elements differ")
    return Verdict("fail", None, f"{what}: shapes or dtypes differ")
