"""The suite, measured: every known fault must fail, every legitimate variant must pass (SPEC 20).

A fault is tried twice. On the exact lane it is judged by bits and invariances; over a backend that
computes float32 in an order of its own it is judged by what such a backend is held to. Both bases
pass all that they are judged by, so that a failure is the fault's. The same answers are given to
the gates that engine authors use instead, and to diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from conformance import diagnosis
from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.backends.composed.arithmetic import ArithmeticSteps
from conformance.calibration.findings import (
    Calibration,
    Diagnosed,
    FaultRow,
    Trial,
    VariantRow,
)
from conformance.calibration.naive import TOKENS, rejected
from conformance.calibration.part import WHOLE, Part
from conformance.cases.checks import Caller, Invariance
from conformance.cases.invariances import invariances
from conformance.cases.model import MODEL, prompt
from conformance.diagnosis import Heard
from conformance.faults import AnyFault, applied
from conformance.golden import Golden, read_all
from conformance.operations import Outputs, Sessions
from conformance.pools import pool
from conformance.results import guarded
from conformance.rules import (
    ASK_BITS,
    asked,
    bounded_rules,
    numerics_of,
    unit_roundoff,
)
from conformance.runner import attempt
from conformance.variants import AnyVariant
from conformance.variants.storage import StoredBfloat16


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
