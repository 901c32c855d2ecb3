"""Which known fault a backend has: its answers beside those of the catalogue (SPEC 19.3).

A fault is a hypothesis: its answers are computed on the exact lane and compared, case by case, with
the backend's. Where it changes nothing it says nothing; where it explains the backend's error it is
named. All cases of an operation are heard, those that pass too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from conformance import rules
from conformance.backends.composed import ComposedBackend
from conformance.bits import raw
from conformance.diagnosis import places
from conformance.diagnosis.divergence import TRACED, TraceError, divergence
from conformance.diagnosis.stored import stored_as
from conformance.faults import AnyFault, SessionFault, applied, description, faults
from conformance.golden import Array, Golden, read_all
from conformance.operations import NotImplementedByBackendError, Outputs, Sessions, call
from conformance.results import Answers, Result
from conformance.rules import ASK_BITS, contract_of, mode_of, numerics_of, unit_roundoff
from conformance.rules.continuation import also_the_goldens, judged_part
from conformance.rules.precision import Precision
from reference.arithmetic import F64

NAMED = 3
"""Faults that are named for one failure."""

SERVING = frozenset({"complete", "turns", "serve", "resume", "speculate"})
"""Operations of a session that have faults of their own; only these are looked for there."""

WHOLE_MODEL = frozenset({"forward", "generate", "forced"}) | SERVING
"""Operations of a session, which a fault of any operation may spoil."""

OUTSIDE = frozenset(
    {"route", "moe", "verify_draft", "paged_attention", "store_kv"}
    | {"paging", "page_hashes", "prefix_reuse"}
)
"""Operations that a session in steps does not run, so that their faults change none of it."""

HEARD, HEARD_MODELS = 24, 3
"""Cases of one operation that are compared, failed ones first, then small ones; whole models."""

U32 = 2.0**-24
"""Unit roundoff of float32: what bits are measured in."""


@dataclass(frozen=True)
class Gap:
    """How far two answers to a golden are apart, in the golden's bounds.

    worst: of any element; 0 where all bits are the same. typical: the root mean square, which a
    few elements that rounded the other way do not decide. outside: elements beyond the bound.
    """

    worst: float
    typical: float
    outside: int


SAME = Gap(0.0, 0.0, 0)
LARGEST = 1e9
"""The gap of an element that is finite in one answer alone, and of answers that do not compare."""


@dataclass(frozen=True)
class Nearest:
    """A fault that may explain a failure.

    gap: from the backend's answer to the fault's. error: to the golden's. misfit: how badly the
    fault explains all that was heard.
    """

    fault: str
    about: str
    gap: Gap
    error: Gap
    elements: int
    misfit: float

    def __str__(self) -> str:
        """Give the line of the report."""
        return _line([self])


def _told(found: Sequence[Nearest]) -> list[str]:
    """The lines of the report: candidates that cannot be told apart share one.

    These explain all values of the case, equally well, and either all or none of them explain the
    other cases too.
    """
    groups: dict[object, list[Nearest]] = defaultdict(list)
    for one in found:
        groups[one.fault if one.gap.outside else (one.gap, one.misfit > 0)].append(one)
    told = accumulate(map(len, groups.values()), initial=0)
    return [
        _line(alike) for alike, before in zip(groups.values(), told, strict=False) if before < NAMED
    ]


def _line(alike: Sequence[Nearest]) -> str:
    """One candidate, or several that cannot be told apart, in a line."""
    one, named = alike[0], alike[:NAMED]
    faults = ", ".join(f"`{other.fault}`" for other in named)
    abouts = "; ".join(_within_a_line(other.about) for other in named)
    if len(alike) > 1:
        more = f" and {len(alike) - NAMED} more" if len(alike) > NAMED else ""
        faults = f"any of {faults}{more}"
    values = f"{one.elements:,} value{'s' if one.elements != 1 else ''}"
    if one.gap.worst == 0:
        how = f"equals the reference with {faults}, all {values}"
    elif one.gap.outside == 0:
        how = f"within the bound of the reference with {faults}, all {values}"
    else:
        inside = one.elements - one.gap.outside
        how = (
            f"nearest to the reference with {faults}: {inside:,} of {values} within its "
            f"bound, {one.elements - one.error.outside:,} without the fault"
        )
    apart = ": they cannot be told apart here" if len(alike) > 1 else ""
    if apart and one.misfit > 0:
        apart += ", and none explains all other cases"
    return f"{how}{apart} ({abouts})"


def _within_a_line(sentence: str) -> str:
    """A sentence without its full stop, begun small unless its first word has capitals inside."""
    first = sentence.split(maxsplit=1)[0]
    start = first if first[1:] != first[1:].lower() else first.lower()
    return f"{start}{sentence[len(first) :]}".rstrip(".")


@dataclass(frozen=True)
class Heard:
    """One case in evidence: a golden, a rule, and what that looks at of the backend's answer."""

    golden: Golden
    outputs: Mapping[str, Array]
    rule: str = "bits"

    @classmethod
    def of(cls, golden: Golden, rule: str, answer: Mapping[str, Array]) -> Heard:
        """Of a whole answer."""
        return cls(golden, judged_part(golden, rule, answer), rule)


def gap(
    golden: Golden,
    mine: Mapping[str, Array],
    other: Mapping[str, Array],
    u: float,
    generous: bool = True,
) -> Gap:
    """Compare two answers; an integer that differs counts 1,000 bounds, another zero nearly 0.

    generous: allow `other` roundings of its own, 4 u of each value, beside the golden's bound.
    """
    if not _alike(mine, other):
        return Gap(LARGEST, LARGEST, sum(a.size for a in other.values()))
    if rules.same_bits(mine, other):
        return SAME
    if not _alike(golden.outputs, other):  # there are no bounds for another shape
        count = also_the_goldens(golden, mine, other)
        if not count:
            return Gap(LARGEST, LARGEST, sum(a.size for a in other.values()))
        own_text, mine, other = (_first(x, count) for x in (golden.outputs, mine, other))
        golden = replace(golden, outputs=own_text, gauges=_first(golden.gauges, count))
    own = 4 * u if generous else 0.0
    parts = [_apart(golden, name, mine[name], theirs, u, own) for name, theirs in other.items()]
    apart = np.concatenate([part.ravel() for part in parts])
    typical = float(np.sqrt(np.mean(apart**2)))
    return Gap(max(float(apart.max()), 1e-9), typical, int((apart > 1).sum()))


def _first(arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
    return {name: array[:count] for name, array in arrays.items()}


def _alike(mine: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return all(
        n in mine and mine[n].shape == a.shape and mine[n].dtype == a.dtype
        for n, a in other.items()
    )


def _apart(
    golden: Golden, name: str, ours: Array, theirs: Array, u: float, own: float = 0.0
) -> F64:
    """The distance of each element, in bounds."""
    if ours.dtype.kind != "f":
        return np.where(ours == theirs, 0.0, 1000.0)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(all="ignore"):
        unit = unit_of(golden, name, u) + own * np.abs(np.where(np.isfinite(b), b, 0))
        apart = np.abs(a - b) / unit
    apart = np.where(np.isfinite(a) & np.isfinite(b), apart, LARGEST)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(np.where(same, 0.0, np.minimum(apart, LARGEST)))


def unit_of(golden: Golden, name: str, u: float) -> F64:
    """The bound of each element of an output, of its shape: by its gauge, or else 8 u |y*|."""
    expected = golden.outputs[name]
    gauged = next((n for n, a in golden.outputs.items() if a.dtype.kind == "f"), None)
    if golden.gauges and name == gauged:
        return rules.bound(golden, u) + 2.0**-149
    size = np.abs(np.where(np.isfinite(expected), expected, 0)).astype(np.float64)
    return np.asarray(8 * max(u, 2.0**-24) * size + 2.0**-147)


Answer = Callable[[AnyFault, Golden], Outputs | None]
"""The answer of the reference with a fault, None where it raises."""


_FAULTY: dict[AnyFault, tuple[ComposedBackend, Sessions]] = {}


def _faulty(fault: AnyFault) -> tuple[ComposedBackend, Sessions]:
    """The exact lane with a fault, made once."""
    if fault not in _FAULTY:
        backend = applied(fault, ComposedBackend)
        _FAULTY[fault] = backend, Sessions(backend)
    return _FAULTY[fault]


def answer(fault: AnyFault, golden: Golden) -> Outputs | None:
    """What the exact lane with a fault answers to a golden."""
    backend, sessions = _faulty(fault)
    arguments = {**golden.parameters, **golden.inputs, **mode_of(golden.operation, "bits")}
    copies = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
    try:
        return call(backend, sessions, golden.operation, copies)
    except Exception:
        return None


def suspects(operation: str) -> list[AnyFault]:
    """The faults that may spoil an operation: its own, and nearly all for a whole model."""
    own = [f for f in faults() if operation in f.operations]
    if operation in SERVING or operation not in WHOLE_MODEL:
        return own
    return own + [
        f for f in faults() if not issubclass(f, SessionFault) and set(f.operations) - OUTSIDE
    ]


class Inquiry:
    """All that a backend answered to one operation, and the faults that may explain it.

    of: the answer of the reference with a fault; None where it raises.
    """

    def __init__(
        self, heard: Sequence[Heard], among: Iterable[AnyFault], u: float, of: Answer = answer
    ) -> None:
        self._heard, self._among, self._u, self._of = list(heard), list(among), u, of
        self._fits: dict[AnyFault, float] = {}

    def nearest(self, failed: Heard) -> list[Nearest]:
        """The faults that may explain one failure, the likeliest first, at most three."""
        return self._ranked(failed)[:NAMED]

    def told(self, failed: Heard) -> list[str]:
        """The lines of the report on one failure."""
        return _told(self._ranked(failed))

    def _ranked(self, failed: Heard) -> list[Nearest]:
        """All faults that may explain one failure, the likeliest first.

        First by how near a fault comes on the failed case itself, as far as it lies beyond the
        bound; then by all that was heard, for a fault must also be silent where the backend is
        right. A fault that changes nothing on the case, or comes no nearer than a quarter of the
        error, is not named; nor is one for an answer within the bound, unless all bits agree.
        """
        golden, elements = failed.golden, sum(a.size for a in failed.golden.outputs.values())
        error = gap(golden, failed.outputs, golden.outputs, self._u)
        found = list[Nearest]()
        for fault in self._among:
            theirs = self._answer(fault, failed)
            if theirs is None or gap(golden, theirs, golden.outputs, self._u) == SAME:
                continue
            here = gap(golden, failed.outputs, theirs, self._u)
            if not self._explains(failed, theirs, here, error):
                continue
            if here.outside >= max(error.outside, 1):  # it explains no value that was not right
                continue
            about, misfit = description(fault), self._fit(fault)
            found.append(Nearest(fault.name, about, here, error, elements, misfit))

        def rank(one: Nearest) -> tuple[float, float, float]:
            return round(_orders(one.gap.typical), 1), one.misfit, one.gap.typical

        return sorted(found, key=rank)

    def _answer(self, fault: AnyFault, heard: Heard) -> Outputs | None:
        """What the rule of a case looks at of a fault's answer to it."""
        theirs = self._of(fault, heard.golden)
        return None if theirs is None else judged_part(heard.golden, heard.rule, theirs)

    def _explains(self, failed: Heard, theirs: Outputs, here: Gap, error: Gap) -> bool:
        """Whether most of the error is gone, in the golden's own bounds."""
        if error.worst <= 1 or here == SAME:
            return here == SAME
        plain = gap(failed.golden, failed.outputs, theirs, self._u, generous=False)
        return plain.typical <= error.typical / 4

    def _fit(self, fault: AnyFault) -> float:
        """How badly a fault explains all that was heard: orders of magnitude, summed."""
        if fault not in self._fits:
            self._fits[fault] = sum(self._misfit(fault, heard) for heard in self._heard)
        return self._fits[fault]

    def _misfit(self, fault: AnyFault, heard: Heard) -> float:
        theirs = self._answer(fault, heard)
        if theirs is None:
            return _orders(LARGEST)
        return _orders(gap(heard.golden, heard.outputs, theirs, self._u).typical)


def _orders(gap: float) -> float:
    """Orders of magnitude beyond the bound, 0 within it."""
    return float(np.log10(max(gap, 1.0)))


# ------------------------------------------------------------------------------ for a whole run


@dataclass(frozen=True)
class Explanation:
    """What the report says of a failure beside its message.

    nearest: the faults that may explain it, a line each; or that none is needed. where: which part
    of the answer is wrong. stored: the narrower type that its values are numbers of. trace: where
    the model first leaves the reference; "" where the backend offers none.
    """

    nearest: tuple[str, ...]
    where: str = ""
    stored: str = ""
    trace: str = ""

    def lines(self) -> tuple[str, ...]:
        """What there is to say, in the order of reading."""
        about = (self.where, self.stored, self.trace)
        return tuple(line for line in about if line) + self.nearest


def explain(
    results: Sequence[Result],
    answers: Answers,
    folder: Path,
    numerics: Mapping[str, Any],
    backend: object = None,
    compare: bool = True,
) -> dict[str, Explanation]:
    """Explanations by case id of the failures in a run's results.

    numerics: what the backend declares. backend: is asked for traces; None is not. compare: with
    known faults, which run on the fixtures alone. Only an answer can be explained: a case in which
    the backend raised, or an invariance, is not. What goes wrong where a text is continued goes
    wrong in its logits, too, so that `forward` and not `generate` is compared with faults.
    """
    failures = {r.id: r for r in results if r.outcome == "fail"}
    failed = {key for key in answers if f"{key[0]}:{key[1]}" in failures}
    goldens = {g.id: g for g in read_all(folder, {golden for golden, _ in answers})}
    found: dict[str, Explanation] = {}
    sessions = Sessions(backend)
    for operation, exact in sorted({_group(goldens[g], rule) for g, rule in failed}):
        own = numerics_of(numerics, operation)
        u, claims_bits = unit_roundoff(own), contract_of(own) == "exact"
        group = [k for k in answers if _group(goldens[k[0]], k[1]) == (operation, exact)]
        group.sort(key=lambda k: (k not in failed, *_work(goldens[k[0]])))
        heard = {k: Heard.of(goldens[k[0]], k[1], answers[k]) for k in group}
        most = HEARD_MODELS if operation in WHOLE_MODEL else HEARD
        unit = U32 if exact else u
        inquiry = Inquiry([heard[k] for k in group[:most]], suspects(operation), unit)
        possible = operation not in ("generate", "forced")
        for key in [k for k in group if k in failed]:
            ask = compare and possible and key in group[:most]
            fair = exact and not claims_bits
            explanation = _explained(heard[key], inquiry if ask else None, unit, exact, fair)
            bound = None if exact and claims_bits else u
            few = group[: most if bound is None else 1]  # noise is computed from many runs
            traced = backend is not None and operation in TRACED and key in few
            if traced and FAIR not in explanation.nearest:
                line = _trace(sessions, goldens[key[0]], key[1], bound)
                explanation = replace(explanation, trace=line)
            found[f"{key[0]}:{key[1]}"] = explanation
    return found


UNTRACED = "a session that offers `trace` (SPEC 19.2) would be told where it first goes wrong"


def _trace(sessions: Sessions, golden: Golden, rule: str, u: float | None) -> str:
    """Where the backend's trace of a case leaves the reference's, whatever the backend does."""
    attention = mode_of(golden.operation, rule).get("attention", "exact")
    try:
        return divergence(sessions, golden, attention, u) or UNTRACED
    except NotImplementedByBackendError:
        return ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind = "" if isinstance(error, TraceError) else f"{type(error).__name__}: "
        return " ".join(f"trace: cannot be compared: {kind}{error}".split())


def _group(golden: Golden, rule: str) -> tuple[str, bool]:
    return golden.operation, rule in ASK_BITS


def _work(golden: Golden) -> tuple[bool, int]:
    """About how long a case takes: int4 models first of all, then the size of what goes in."""
    quantized = golden.parameters.get("weights", "float32") != "float32"
    return quantized, max((a.size for a in golden.inputs.values()), default=0)


def _explained(
    failed: Heard, inquiry: Inquiry | None, u: float, bits: bool, fair: bool
) -> Explanation:
    """The explanation of one failure.

    inquiry: None where no fault is asked for. bits: whether they were asked; fair: of a backend
    that does not claim them, so that an answer within the bound needs no fault to explain it.
    """
    golden = failed.golden
    within = bits and bool(golden.gauges)
    within = within and gap(golden, failed.outputs, golden.outputs, u).worst <= 1
    if fair and within:
        return Explanation((FAIR,))
    nearest = [] if inquiry is None else inquiry.told(failed)
    if within and not nearest:
        nearest = [CLAIMED]
    where = wrong_part(golden, failed.outputs, u, bits and not fair)
    stored = ""
    if not bits and _alike(failed.outputs, golden.outputs):
        declared = max(u, u.operands) if isinstance(u, Precision) else u
        stored = stored_as(failed.outputs, golden.outputs, declared)
    return Explanation(tuple(nearest), where, stored)


FAIR = "within the bound of float32: another order or precision, not a mistake"

CLAIMED = "within the bound of float32: you claim exact; this looks like float32 accumulation"


def wrong_part(golden: Golden, outputs: Mapping[str, Array], u: float, bits: bool) -> str:
    """Which part of an answer is wrong, and its first element, in the words of its axes.

    bits: whether every other bit is wrong, or what lies beyond the bound at u (SPEC 19.1).
    """
    if not _alike(outputs, golden.outputs):
        return ""
    for name, wanted in golden.outputs.items():
        apart = _apart(golden, name, outputs[name], wanted, u)
        wrong = raw(wanted) != raw(outputs[name]) if bits else apart > 1
        if wrong.ndim == 0 or not wrong.any():
            continue
        first, worst = int(np.flatnonzero(wrong)[0]), int(np.where(wrong, apart, -1).argmax())
        axes = places.axes_of(golden.operation, name, wanted)
        parts = [
            f"wrong in {name}: {places.spread(wrong, axes)} ({int(wrong.sum()):,} of "
            f"{wrong.size:,} values)",
            f"first at {places.named(golden, name, first)}",
        ]
        if worst != first:
            parts.append(f"worst at {places.named(golden, name, worst)}")
        return "; ".join(parts)
    return ""
