"""The suite, measured: every known fault must fail, every legitimate variant must pass (SPEC 20).

A fault is tried twice. On the exact lane it is judged by bits and invariances; over a backend that
computes float32 in an order of its own it is judged by what such a backend is held to. Both bases
pass all that they are judged by, so that a failure is the fault's. The same answers are given to
the gates that engine authors use instead, and to diagnosis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from conformance import diagnosis
from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.backends.composed.arithmetic import ArithmeticSteps
from conformance.calibration.part import WHOLE, Part
from conformance.cases.checks import Caller, Invariance
from conformance.cases.invariances import invariances
from conformance.cases.model import MODEL, prompt
from conformance.diagnosis import Heard
from conformance.faults import AnyFault, applied, area, description, faults
from conformance.golden import Array, Golden, read_all
from conformance.operations import Outputs, Sessions
from conformance.pools import pool
from conformance.results import guarded
from conformance.rules import (
    ASK_BITS,
    Verdict,
    asked,
    bounded_rules,
    numerics_of,
    unit_roundoff,
)
from conformance.rules.continuation import OWN_TEXT, judged_part
from conformance.runner import attempt
from conformance.variants import AnyVariant, variants
from conformance.variants.storage import StoredBfloat16

# ------------------------------------------------------------------------------ the naive gates

TOKENS = 64
"""Tokens that the last gate compares."""


def close(expected: Array, answer: Array, atol: float) -> bool:
    """`allclose` with rtol 1e-2, NaN equal to NaN."""
    with np.errstate(all="ignore"):
        return np.allclose(answer, expected, rtol=1e-2, atol=atol, equal_nan=True)


def _finite(expected: Array, answer: Array) -> tuple[Array, Array] | None:
    """Both as float64, zero where neither is finite; None where one is and the other is not."""
    good = np.isfinite(expected)
    if (good != np.isfinite(answer)).any():
        return None
    a, b = (np.where(good, x, 0).astype(np.float64).ravel() for x in (expected, answer))
    return a, b


def nmse(expected: Array, answer: Array) -> bool:
    """Squared error at most 5e-4 of the squared values, over the whole output."""
    both = _finite(expected, answer)
    if both is None:
        return False
    error, size = float(((both[0] - both[1]) ** 2).sum()), float((both[0] ** 2).sum())
    return error <= 5e-4 * size


def cosine(expected: Array, answer: Array) -> bool:
    """Cosine of the whole outputs at least 0.999."""
    both = _finite(expected, answer)
    if both is None:
        return False
    norms = float(np.linalg.norm(both[0]) * np.linalg.norm(both[1]))
    return bool(both[0] @ both[1] >= 0.999 * norms) if norms else not (both[0] - both[1]).any()


GATES: Mapping[str, Callable[[Array, Array], bool]] = {
    "rtol 1e-2 (atol 1e-8)": partial(close, atol=1e-8),
    "rtol 1e-2, atol 1e-2": partial(close, atol=1e-2),
    "NMSE 5e-4": nmse,
    "cosine 0.999": cosine,
}
TOKEN_GATE = f"{TOKENS} tokens equal"


def rejected(golden: Golden, outputs: Outputs | None) -> set[str]:
    """The gates that reject an answer; integers must be equal for all of them.

    A golden that may itself be far from the real value is not put to them: they would be blamed for
    the exact contract's own alignment. Of texts that an engine goes on with they see the logits, up
    to where one parts (SPEC 16.7).
    """
    if golden.distance is not None:
        largest = np.max(np.abs(next(iter(golden.outputs.values()))), initial=0)
        if np.max(golden.distance, initial=0) > 5e-3 * largest:
            return set()
    own_text = golden.operation in OWN_TEXT
    if own_text and outputs is not None:
        outputs = judged_part(golden, "gauge", outputs)
    out: set[str] = set()
    for name in ("logits",) if own_text else golden.outputs:
        expected = golden.outputs[name]
        answer = None if outputs is None else outputs[name]
        if answer is None or answer.shape != expected.shape:
            return set(GATES)
        if expected.dtype.kind != "f":
            out |= set(GATES) if (answer != expected).any() else set()
            continue
        out |= {gate for gate, passes in GATES.items() if not passes(expected, answer)}
    return out


# ------------------------------------------------------------------------------ what is measured


@dataclass
class Trial:
    """One fault or variant on the cases of its operations.

    passed, failed, undecided: cases by id; the last are those that the declared precision leaves
    without a verdict. rejects: naive gates by the ids of the goldens that they reject.
    """

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    rejects: dict[str, set[str]] = field(default_factory=dict)
    answers: dict[str, Outputs] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)

    def note(self, case: str, verdict: Verdict) -> None:
        """Count a case; one that is not implemented is none."""
        lists = {"pass": self.passed, "fail": self.failed, "cannot evaluate": self.undecided}
        if verdict.outcome in lists:
            lists[verdict.outcome].append(case)

    @property
    def judged(self) -> int:
        """Cases with a verdict."""
        return len(self.passed) + len(self.failed)


@dataclass(frozen=True)
class Diagnosed:
    """Where the true fault came among the named ones for one failure; None where it did not."""

    fault: str
    case: str
    place: int | None


@dataclass(frozen=True)
class FaultRow:
    """What the suite makes of a fault, on the exact lane and on float32 in another order.

    stored: and, where the fault asks for it, on tensors of bfloat16.
    """

    fault: AnyFault
    exact: Trial
    plain: Trial
    tokens_differ: bool
    diagnosed: tuple[Diagnosed, ...]
    stored: Trial | None = None

    @property
    def caught(self) -> bool:
        """Whether some case fails; on tensors of bfloat16 too, where that is asked."""
        found = bool(self.exact.failed or self.plain.failed)
        return found and (self.stored is None or bool(self.stored.failed))

    @property
    def bits_alone(self) -> bool:
        """Whether only the exact lane shows it."""
        return bool(self.exact.failed) and not self.plain.failed


@dataclass(frozen=True)
class VariantRow:
    """What the suite makes of a legitimate variant."""

    variant: AnyVariant
    trial: Trial
    tokens_differ: bool


@dataclass(frozen=True)
class Calibration:
    """All that `bitforbit calibrate` measures, of the catalogues or of a part of them."""

    faults: tuple[FaultRow, ...]
    variants: tuple[VariantRow, ...]
    base: Trial
    part: Part = WHOLE

    def missed(self) -> list[str]:
        """Faults that no case shows, or that are put over a base which fails by itself."""
        return [row.fault.name for row in self.faults if not row.caught or self.base.failed]

    def accused(self) -> list[str]:
        """Variants that fail some case, or are judged by none."""
        return [r.variant.name for r in self.variants if r.trial.failed or not r.trial.passed]

    def undecided(self) -> int:
        """Cases that variants answered and that no verdict is possible for."""
        return sum(len(row.trial.undecided) for row in self.variants)

    def gates(self) -> dict[str, tuple[int, int]]:
        """By naive gate: faults that it catches and variants that it accuses.

        A rejection counts as a catch only where the gate accepts the base that the fault was put
        over, and as an accusation wherever it is.
        """
        found = {}
        for gate in GATES:
            blind = self.base.rejects.get(gate, set())
            caught = sum(bool(row.plain.rejects.get(gate, set()) - blind) for row in self.faults)
            accused = sum(bool(row.trial.rejects.get(gate)) for row in self.variants)
            found[gate] = (caught, accused)
        found[TOKEN_GATE] = (
            sum(row.tokens_differ for row in self.faults),
            sum(row.tokens_differ for row in self.variants),
        )
        return found

    def diagnosis(self) -> tuple[int, int, int]:
        """Failures of the float32 faults: how many name the right one first, among three; all."""
        places = [d.place for row in self.faults for d in row.diagnosed]
        return sum(p == 0 for p in places), sum(p is not None for p in places), len(places)


# ------------------------------------------------------------------------------ how it is measured


def exact_rules(golden: Golden, fma: bool = False) -> list[str]:
    """What a fault over the exact lane is judged by: bits, or the forms that contraction gives."""
    rules = asked(golden, {"accumulator": "exact", "fma": fma})
    return [rule for rule in rules if rule in ASK_BITS][:1]


def judged(
    backend: Any,
    goldens: Iterable[Golden],
    rules_of: Callable[[Golden], Sequence[str]],
    checks: Iterable[Invariance] = (),
) -> Trial:
    """Try a backend on goldens, by some of their rules, and on invariances."""
    trial, sessions = Trial(), Sessions(backend)
    for golden in goldens:
        u = unit_roundoff(numerics_of(backend.numerics, golden.operation))
        for rule in rules_of(golden):
            verdict, outputs = attempt(backend, sessions, golden, rule, u)
            trial.note(f"{golden.id}:{rule}", verdict)
            if verdict.outcome == "not implemented":
                continue
            if outputs is not None:
                trial.answers[golden.id] = outputs
            for gate in rejected(golden, outputs):
                trial.rejects.setdefault(gate, set()).add(golden.id)
    caller = Caller(backend, sessions)
    for check in checks:
        trial.note(f"{check.id}:bits", guarded(partial(check.check, caller)))
    return trial


def measure(
    folder: Path, part: Part = WHOLE, workers: int | None = None
) -> Iterator[FaultRow | VariantRow | Calibration]:
    """Try every fault, then every variant; yields each row as it comes, and all of it last.

    part: what of them is tried; the base is then tried on the operations of these faults alone.
    workers: processes, by default one a core. BLAS has one thread in each. Raises GoldenError for
    goldens that cannot be read, before anything is tried.
    """
    goldens = {g.id: g for g in read_all(folder)}
    chosen, tried = part.chosen_faults(), part.chosen_variants()
    among = None if part.whole else frozenset(name for f in chosen for name in f.operations)
    with pool(workers, _prepare, folder) as crew:
        base = crew.submit(_base, among)
        exact = {f: crew.submit(_exact, f) for f in chosen}
        plain = {f: crew.submit(_plain, f) for f in chosen}
        stored = {f: crew.submit(_stored, f) for f in chosen if f.stored}
        varied = {v: crew.submit(_varied, v) for v in tried}
        heard = {f: done.result() for f, done in exact.items()}
        rows = []
        for fault in chosen:
            trial, differ = plain[fault].result()
            diagnosed = tuple(_diagnosed(fault, trial, goldens, heard))
            there = stored[fault].result() if fault.stored else None
            rows.append(FaultRow(fault, heard[fault], trial, differ, diagnosed, there))
            yield rows[-1]
        others = []
        for variant in tried:
            others.append(VariantRow(variant, *varied[variant].result()))
            yield others[-1]
    yield Calibration(tuple(rows), tuple(others), base.result(), part)


SERVED = ("company", "alike", "passes_of_33", "drafts_of_3")
"""Checks of serving that faults are tried on."""

_GOLDENS: list[Golden] = []
"""The goldens, read once a process."""


def _prepare(folder: Path) -> None:
    threadpool_limits(limits=1, user_api="blas")
    np.seterr(all="ignore")
    _GOLDENS.extend(read_all(folder))


def _base(operations: frozenset[str] | None) -> Trial:
    """What faults of float32 are put over, on some operations or on all."""
    goldens = [g for g in _GOLDENS if operations is None or g.operation in operations]
    return judged(OwnOrderBackend(), goldens, bounded_rules)


def _own(fault: AnyFault) -> list[Golden]:
    return [g for g in _GOLDENS if g.operation in fault.operations]


def _exact(fault: AnyFault) -> Trial:
    """A fault over the exact lane, by bits and by the invariances of its operations.

    Those of int4 models are left out, for their time: the steps are those of the float32 model. So
    are those of serving that repeat another with other sizes.
    """
    checks = [
        c
        for c in invariances()
        if c.id.split("/")[1] in fault.operations
        and "forward/int4" not in c.id
        and (c.id.split("/")[1] != "serve" or c.id.split("/")[2] in SERVED)
    ]
    return judged(
        applied(fault, ComposedBackend),
        _own(fault),
        partial(exact_rules, fma=fault.fma),
        checks,
    )


def _plain(fault: AnyFault) -> tuple[Trial, bool]:
    """A fault over float32 in another order, and whether its text differs."""
    backend = applied(fault, OwnOrderBackend)
    trial = judged(backend, _own(fault), bounded_rules)
    return trial, _tokens_differ(fault, backend)


def _stored(fault: AnyFault) -> Trial:
    """A fault over tensors of bfloat16, by what such a backend declares; the base is a variant."""
    return judged(applied(fault, StoredBfloat16), _own(fault), bounded_rules)


def _diagnosed(
    fault: AnyFault,
    trial: Trial,
    goldens: Mapping[str, Golden],
    heard: Mapping[AnyFault, Trial],
) -> Iterator[Diagnosed]:
    """Ask for the fault's name for every golden that it fails in float32."""

    def known(suspect: AnyFault, golden: Golden) -> Outputs | None:
        """The answer of the exact lane with a fault, which was computed before."""
        return heard[suspect].answers.get(golden.id)

    inquiries: dict[str, diagnosis.Inquiry] = {}
    for case in trial.failed:
        golden = goldens[case.rsplit(":", 1)[0]]
        if golden.id not in trial.answers:
            continue
        operation = golden.operation
        if operation not in inquiries:
            evidence = [
                Heard.of(goldens[i], "gauge", answer)
                for i, answer in trial.answers.items()
                if goldens[i].operation == operation
            ]
            among = [f for f in heard if operation in f.operations]
            inquiries[operation] = diagnosis.Inquiry(evidence, among, 2.0**-24, known)
        failed = Heard.of(golden, "gauge", trial.answers[golden.id])
        named = inquiries[operation].nearest(failed)
        names = [n.fault for n in named]
        place = names.index(fault.name) if fault.name in names else None
        yield Diagnosed(fault.name, case, place)


def _varied(variant: AnyVariant) -> tuple[Trial, bool]:
    """A variant on all that it runs, and whether its text differs."""
    backend = variant()
    checks = invariances() if variant.exact else []
    trial = judged(
        backend,
        [g for g in _GOLDENS if runs(variant, g.operation)],
        partial(asked, numerics=backend.numerics) if variant.exact else bounded_rules,
        [c for c in checks if runs(variant, c.id.split("/")[1]) and "forward/int4" not in c.id],
    )
    if variant.kernels_only:
        return trial, False
    return trial, _generated(backend, "float32") != _reference("float32")


def runs(variant: AnyVariant, operation: str) -> bool:
    """Whether a variant's own steps compute an operation, or another's that it inherits."""
    if operation in diagnosis.WHOLE_MODEL:
        return not variant.kernels_only
    if not issubclass(variant, ComposedBackend) or operation in ELEMENTARY:
        return True
    step = COMPUTED_BY.get(operation, operation)
    return any(step in vars(c) for c in variant.__mro__ if issubclass(c, ArithmeticSteps))


ELEMENTARY = frozenset({"exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh"})
"""Operations that steps call by these names, whoever computes them."""

COMPUTED_BY = {"route": "_routing", "sample": "_token", "verify_draft": "_verdict"}
"""Operations of which `ReferenceBackend` reads the arguments, and the step that it then takes."""


IN_MODEL = frozenset(
    {"linear", "rms_norm", "rope", "rope_constants", "attention", "silu", "forward", "generate"}
)
"""Operations that the token gate's model runs."""

IN_INT4 = frozenset({"quantize_int4", "quantize_int8", "linear_int4"})
"""Those of its int4 form alone."""


def _tokens_differ(fault: AnyFault, backend: ComposedBackend) -> bool:
    """Whether greedy text of the fixture differs; False where the fault is not in the model."""
    operations = set(fault.operations)
    if not operations & (IN_MODEL | IN_INT4):
        return False
    weights = "float32" if operations & IN_MODEL else "int4"
    return _generated(backend, weights) != _reference(weights)


def _generated(backend: Any, weights: str) -> tuple[int, ...]:
    """The tokens that a backend generates, () where it fails."""
    session = Sessions(backend).get(MODEL, weights)
    try:
        tokens, _ = session.generate(prompt=prompt(16), max_new_tokens=TOKENS, exact_prefill=False)
    except Exception:
        return ()
    return tuple(int(t) for t in tokens)


@cache
def _reference(weights: str) -> tuple[int, ...]:
    return _generated(ComposedBackend(), weights)


def as_json(result: Calibration) -> dict[str, Any]:
    """The report of `bitforbit calibrate --json`."""
    first, three, asked = result.diagnosis()
    part = result.part
    return {
        "part": None
        if part.whole
        else {
            "area": part.area,
            "fault": part.faults,
            "variant": part.variants,
            "of": {"faults": len(faults()), "variants": len(variants())},
        },
        "summary": {
            "faults": len(result.faults),
            "caught": sum(row.caught for row in result.faults),
            "bits_alone": sum(row.bits_alone for row in result.faults),
            "missed": result.missed(),
            "variants": len(result.variants),
            "accused": result.accused(),
            "undecided": result.undecided(),
            "gates": {
                gate: {"caught": caught, "accused": accused}
                for gate, (caught, accused) in result.gates().items()
            },
            "diagnosis": {"first": first, "among_three": three, "asked": asked},
        },
        "faults": [
            {
                "name": row.fault.name,
                "area": area(row.fault),
                "severity": row.fault.severity,
                "description": description(row.fault),
                "exact": {"failed": row.exact.failed, "judged": row.exact.judged},
                "float32": {"failed": row.plain.failed, "judged": row.plain.judged},
                "bfloat16": row.stored
                and {"failed": row.stored.failed, "judged": row.stored.judged},
                "gates": sorted(
                    gate
                    for gate, ids in row.plain.rejects.items()
                    if ids - result.base.rejects.get(gate, set())
                )
                + ([TOKEN_GATE] if row.tokens_differ else []),
                "not_named_first": [d.case for d in row.diagnosed if d.place != 0],
            }
            for row in result.faults
        ],
        "variants": [
            {
                "name": row.variant.name,
                "exact": row.variant.exact,
                "failed": row.trial.failed,
                "undecided": row.trial.undecided,
                "judged": row.trial.judged,
                "gates": sorted(row.trial.rejects) + ([TOKEN_GATE] if row.tokens_differ else []),
            }
            for row in result.variants
        ],
    }


def by_area(result: Calibration) -> dict[str, Counter[str]]:
    """Counts of faults by area, for the table."""
    table: dict[str, Counter[str]] = {}
    for row in result.faults:
        counts = table.setdefault(area(row.fault), Counter())
        counts["faults"] += 1
        counts["caught"] += row.caught
        counts["exact"] += bool(row.exact.failed)
        counts["float32"] += bool(row.plain.failed)
        counts["bits alone"] += row.bits_alone
    return table
