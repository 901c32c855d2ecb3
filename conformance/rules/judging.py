"""How an answer is judged: bits, ulp, or a bound that is computed from the data (SPEC 16)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from conformance.bits import raw, shown
from conformance.errors import GoldenError
from conformance.golden import Array, Golden
from conformance.rules import functions
from conformance.rules.alike import more_roundings
from conformance.rules.codes import moved, weights_of
from conformance.rules.continuation import (
    OWN_TEXT,
    TEXT,
    by_text,
    followed,
    miscounted,
    of_one_length,
    parted,
)
from conformance.rules.error_models import error_model
from conformance.rules.precision import LANE, Precision
from conformance.rules.underflow import losses

F64 = NDArray[np.float64]
Outcome = Literal["pass", "fail", "not implemented", "not judged", "cannot evaluate"]

UNFUSED = "unfused"
"""The form of the exact contract itself, which contracts nothing (SPEC 16.9)."""


OTHER_EXPERTS = "rounding at this precision may choose other experts everywhere"
"""Why a case of a model with experts may have no verdict (SPEC 16.5)."""


@dataclass(frozen=True)
class Verdict:
    """One case's outcome. worst: the largest margin (error / bound); None where there is none."""

    outcome: Outcome
    worst: float | None = None
    message: str = ""


def judge(rule: str, golden: Golden, outputs: Mapping[str, Array], u: float) -> Verdict:
    """Judge a backend's outputs by one of the golden's rules (SPEC 16).

    outputs: all that the golden has, by name. u: `unit_roundoff` of what the backend declares.
    Raises GoldenError for a rule that there is not, or that the golden has no data for.
    """
    own_text = golden.operation in OWN_TEXT and rule in ("gauge", "tokens")
    if rule == "tokens" and not own_text:
        return judge_tokens(golden, outputs["tokens"], u)
    if own_text:
        outputs = of_one_length(golden, outputs)
    unlike = _unlike(golden, outputs, TEXT if own_text else golden.outputs)
    if unlike is not None:
        return unlike
    if rule == "tokens":
        return _own_text(golden, outputs, u)
    if own_text:
        name, outputs = bounded(golden), followed(golden, outputs)
        return _gauge(golden, golden.outputs[name], outputs[name], u)
    if rule == "bits":
        return _bits(golden.outputs, outputs)
    if rule == "either":
        return _either(golden, outputs)
    integers = _bits({n: a for n, a in golden.outputs.items() if a.dtype.kind in "iu"}, outputs)
    if integers.outcome == "fail":
        return integers
    name = bounded(golden)
    expected, answer = golden.outputs[name], outputs[name]
    if rule == "gauge":
        return _gauge(golden, expected, answer, u)
    match = re.fullmatch(r"bias\((\d+)\)", rule)
    if match is not None:
        return _bias(int(match[1]), golden, expected, answer, u)
    match = re.fullmatch(r"ulp\((\d+)\)", rule)
    if match is None:
        raise GoldenError(f"{golden.id}: unknown rule {rule!r}")
    if isinstance(u, Precision) and functions.coarse(u):
        return _ulp_of_stored(int(match[1]), golden, answer, u)
    return _ulp(int(match[1]), expected, answer)


def _unlike(golden: Golden, outputs: Mapping[str, Array], names: Iterable[str]) -> Verdict | None:
    """A failure if one of these outputs has not the shape and dtype of the golden's."""
    for name in names:
        expected, answer = golden.outputs[name], outputs[name]
        if answer.shape != expected.shape or answer.dtype != expected.dtype:
            return Verdict(
                "fail",
                None,
                f"{name}: expected {expected.dtype} {expected.shape}, "
                f"got {answer.dtype} {answer.shape}",
            )
    return None


def judge_tokens(golden: Golden, tokens: Array, u: float) -> Verdict:
    """Greedy tokens, each chosen after the golden's own text, whatever came before (SPEC 16.7).

    golden: one of the operation `forced`. tokens: (last,) integers, one for each of the last
    prefixes of the golden's text. u: `unit_roundoff` of what the engine declares. `worst` is the
    largest share that a differing token's margin has of what rounding at u can move; 0 where none
    differs, infinite for a token that no declared precision can bring to the first place.
    """
    expected = golden.outputs["tokens"]
    if tokens.shape != expected.shape or tokens.dtype.kind not in "iu":
        return Verdict(
            "fail",
            None,
            f"tokens: expected integers {expected.shape}, got {tokens.dtype} {tokens.shape}",
        )
    legal = {
        (int(row), int(token)): (float(margin), float(noise))
        for row, token, margin, noise in zip(
            *(golden.gauges[name] for name in ("row", "token", "margin", "noise")), strict=True
        )
    }
    model = error_model(golden.terms["noise"], u)
    sure = np.ones(len(expected), bool)
    if "steady" in golden.gauges:
        sure = golden.gauges["steady"] > error_model(golden.terms["steady"], u)
        if not sure.any():
            return Verdict("not judged", None, OTHER_EXPERTS)
    worst, message = 0.0, ""
    for row in np.flatnonzero((tokens != expected) & sure):
        margin, noise = legal.get((int(row), int(tokens[row])), (math.inf, 0.0))
        share = margin / (model * noise) if noise else math.inf
        if share > worst:
            worst, moved = share, model * noise
            message = (
                f"after prefix {row}: token {expected[row]} expected, {tokens[row]} got; "
                f"its logit is {margin:.3g} lower, rounding can move {moved:.3g}"
            )
    return Verdict("pass", worst) if worst <= 1 else Verdict("fail", worst, message)


def _own_text(golden: Golden, outputs: Mapping[str, Array], u: float) -> Verdict:
    """Greedy tokens of texts that go on from them, up to the first that differs (SPEC 16.7).

    Where no text parts, the counts of what was reused and accepted are judged, too.
    """
    allowed = bound(golden, u)
    if np.isinf(allowed).all():
        return Verdict("not judged", None, OTHER_EXPERTS)
    tokens = outputs["tokens"]
    places = parted(golden, tokens)
    if not places:
        wrong = miscounted(golden, outputs)
        return Verdict("fail", None, wrong) if wrong else Verdict("pass", 0.0)
    sides = (golden.outputs["tokens"], tokens, golden.outputs["logits"], allowed)
    expected, answer, logits, reach = (by_text(golden, x) for x in sides)
    verdicts = [
        _parted(at, int(expected[at]), int(answer[at]), logits[at], reach[at]) for at in places
    ]
    return max(verdicts, key=lambda verdict: verdict.worst or 0.0)


def _parted(at: tuple[int, int], wanted: int, got: int, logits: Array, allowed: F64) -> Verdict:
    """Whether a near tie explains one token of a text.

    at: text and place. logits, allowed: (V,), the exact ones there, and the bound of each. Two that
    may each stray by their bound change places only where they lie no farther apart than both.
    """
    where = f"token {at[1]}" if at[0] == 0 else f"text {at[0]}, token {at[1]}"
    if not 0 <= got < len(logits):
        return Verdict("fail", math.inf, f"{where}: {got} is none of {len(logits)} tokens")
    margin = float(logits[wanted]) - float(logits[got])
    reach = float(allowed[[wanted, got]].sum())
    share = margin / reach if reach else math.inf
    apart = f"{where}: {wanted} expected, {got} got; its logit is {margin:.3g} lower, "
    if share > 1:
        return Verdict("fail", share, f"{apart}rounding can move {reach:.3g}")
    why = "other experts may compute it" if math.isinf(reach) else "a near tie"
    return Verdict("pass", share, f"{apart}{why}; what follows is not judged")


def bounded(golden: Golden) -> str:
    """The name of the output that a bound is for, the first of floats (SPEC 16.3).

    Raises GoldenError where all are integers, which have no bound.
    """
    for name, array in golden.outputs.items():
        if array.dtype.kind == "f":
            return name
    raise GoldenError(f"{golden.id}: no output is a float, so no bound can judge it")


def same_bits(outputs: Mapping[str, Array], others: Mapping[str, Array]) -> bool:
    """Whether two answers are the same to the bit."""
    return _bits(others, outputs).outcome == "pass"


def _at(index: Any, shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(int(i)) for i in np.unravel_index(int(index), shape)) + "]"


def _bits(expected: Mapping[str, Array], outputs: Mapping[str, Array]) -> Verdict:
    """SPEC 16.1. `worst` is the share of elements that differ."""
    for name, wanted in expected.items():
        different = raw(wanted) != raw(outputs[name])
        if different.any():
            where = np.flatnonzero(different)[0]
            return Verdict(
                "fail",
                float(different.mean()),
                f"{name}: {int(different.sum())} of {different.size} elements differ, first at "
                f"{_at(where, wanted.shape)}: {shown(wanted, where)} expected, "
                f"{shown(outputs[name], where)} got",
            )
    return Verdict("pass", 0.0)


def _either(golden: Golden, outputs: Mapping[str, Array]) -> Verdict:
    """SPEC 16.9. `worst` is the share of elements that differ from the nearest form."""
    if not golden.forms:
        raise GoldenError(f"{golden.id}: no other form is stored for the rule either")
    forms = {UNFUSED: golden.outputs, **golden.forms}
    verdicts = {form: _bits(expected, outputs) for form, expected in forms.items()}
    form = min(verdicts, key=lambda name: verdicts[name].worst or 0.0)
    if verdicts[form].outcome == "pass":
        return Verdict("pass", 0.0, f"equals the form {form!r} in all bits")
    message = f"none of {len(forms)} forms; nearest is {form!r}: {verdicts[form].message}"
    return Verdict("fail", verdicts[form].worst, message)


def _special(expected: Array, answer: Array) -> Verdict | None:
    """NaN where NaN, whatever its bits, and the same infinity where infinite."""
    nan = np.isnan(expected)
    infinite = np.isinf(expected)
    wrong = (np.isnan(answer) != nan) | (infinite & (answer != expected))
    wrong |= np.isinf(answer) & ~infinite
    if not wrong.any():
        return None
    where = np.flatnonzero(wrong)[0]
    return Verdict(
        "fail",
        math.inf,
        f"at {_at(where, expected.shape)}: {shown(expected, where)} expected, "
        f"{shown(answer, where)} got",
    )


def _ordered(x: Array) -> NDArray[np.int64]:
    """float32 as integers in the order of the reals, neighbours one apart, both zeros 0."""
    raw = x.view(np.int32).astype(np.int64)
    return np.where(raw < 0, -(raw & 0x7FFFFFFF), raw)


def _ulp(limit: int, expected: Array, answer: Array) -> Verdict:
    """SPEC 16.2."""
    special = _special(expected, answer)
    if special:
        return special
    finite = np.isfinite(expected)
    apart = np.where(finite, np.abs(_ordered(expected) - _ordered(answer)), 0)
    worst = int(apart.max(initial=0))
    if worst <= limit:
        return Verdict("pass", worst / limit)
    where = int(apart.argmax())
    return Verdict(
        "fail",
        worst / limit,
        f"{worst} ulp at {_at(where, expected.shape)}, {limit} allowed: "
        f"{shown(expected, where)} expected, {shown(answer, where)} got",
    )


def _ulp_of_stored(limit: int, golden: Golden, answer: Array, u: Precision) -> Verdict:
    """SPEC 16.2, of a type that holds less than float32."""
    expected = golden.outputs["y"]
    share = functions.margins(golden, limit, u, answer)
    free = np.isnan(share)
    if free.all():
        return Verdict("not judged", None, f"all operands are beyond {u.largest:.6g}")
    worst, where = float(np.nanmax(share)), int(np.nanargmax(share))
    if worst > 1:
        low, high = (end.flat[where] for end in functions.legal(golden, limit, u))
        return Verdict(
            "fail",
            worst,
            f"at {_at(where, expected.shape)}: {shown(expected, where)} expected, {low:.6g} "
            f"to {high:.6g} allowed as declared, {shown(answer, where)} got",
        )
    note = f"judged in {int((~free).sum())} of {free.size} elements" if free.any() else ""
    return Verdict("pass", worst, note)


def bound(golden: Golden, u: float) -> F64:
    """How far each element of the bounded output may lie from the golden's (SPEC 16.3).

    float64 of that output's shape, infinite where no bound holds. Raises GoldenError where no
    output is a float, or for an unknown error model.
    """
    expected = golden.outputs[bounded(golden)]
    total = np.abs(np.where(np.isfinite(expected), expected, 0)).astype(np.float64) * 2.0**-24
    more = more_roundings(golden, float(u))
    for term, gauge in golden.gauges.items():
        model = error_model(golden.terms[term], u)
        if golden.terms[term].startswith("steady"):
            total[gauge <= model] = np.inf
        else:
            total += (model + float(u) * more.get(term, 0.0)) * gauge.astype(np.float64)
    if golden.distance is not None:
        total += golden.distance
    if isinstance(u, Precision):
        total += (u.underflow + LANE) * losses(golden)
        total += moved(golden, u.stored)
    if golden.operation == "softmax":
        return _exponential(total, np.abs(expected).astype(np.float64))
    return total


def _exponential(total: F64, size: F64) -> F64:
    """A relative error r of first order in an exponent is e^r - 1 of the whole."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return np.where((size > 0) & (total > 0), size * np.expm1(total / size), total)


def _gauge(golden: Golden, expected: Array, answer: Array, u: float) -> Verdict:
    """SPEC 16.3."""
    largest = u.largest if isinstance(u, Precision) else math.inf
    if _beyond(golden, largest):
        return Verdict("not judged", None, f"an operand is beyond {largest:.6g}")
    allowed = bound(golden, u)
    over = np.isinf(answer) & (np.copysign(1, answer) * expected + allowed > largest)
    special = _special(np.where(over, answer, expected), answer)
    if special:
        return special
    finite = np.isfinite(expected) & ~over
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(answer.astype(np.float64) - expected), 0.0)
    if allowed.size and np.isinf(allowed).all():
        return Verdict("not judged", None, OTHER_EXPERTS)
    with np.errstate(over="ignore"):
        margin = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
    worst = float(margin.max(initial=0.0))
    if worst <= 1:
        notes = (_left_out(allowed), _own_distance(golden, margin, allowed))
        return Verdict("pass", worst, "; ".join(note for note in notes if note))
    where = int(margin.argmax())
    return Verdict(
        "fail",
        worst,
        f"at {_at(where, expected.shape)}: {shown(expected, where)} expected, "
        f"{shown(answer, where)} got; error {error.flat[where]:.3g}, "
        f"bound {allowed.flat[where]:.3g}",
    )


OWN_DISTANCE = "of the bound there is the exact lane's own distance from the real value (SPEC 2)"
"""Of a margin that hardly grows with a backend's errors, for its bound is of something else."""


def _own_distance(golden: Golden, margin: F64, allowed: F64) -> str:
    """What a margin does not say: that half its bound or more is not the backend's to use up."""
    if golden.distance is None or not margin.any():
        return ""
    where = int(margin.argmax())
    share = float(golden.distance.flat[where] / allowed.flat[where])
    return f"worst margin {margin.flat[where]:.3g}: {share:.0%} {OWN_DISTANCE}" * (share >= 0.5)


def _beyond(golden: Golden, largest: float) -> bool:
    """Whether a finite operand is no number of the declared type (SPEC 16.3)."""
    if largest == math.inf:
        return False
    operands = [x.astype(np.float64) for x in golden.inputs.values() if x.dtype.kind == "f"]
    if golden.operation == "linear_w4a16":
        operands.append(weights_of(golden).astype(np.float64))
    return any(bool((np.isfinite(x) & (np.abs(x) > largest)).any()) for x in operands)


def _left_out(allowed: F64) -> str:
    """What a pass does not say: in which rows no bound holds (SPEC 16.5)."""
    if not np.isinf(allowed).any():
        return ""
    rows = np.asarray(np.isfinite(allowed.reshape(len(allowed), -1)).all(axis=1))
    return (
        f"judged in {int(rows.sum())} of {len(rows)} rows; "
        "in the others rounding at this precision may choose other experts"
    )


def _typical(golden: Golden, expected: Array, u: float) -> F64:
    """The root mean square of each element's error (SPEC 16.8)."""
    at = u if isinstance(u, Precision) else Precision(u)
    operands = at.operands if _rounds_operands(golden, u) else 0.0
    size = np.abs(expected).astype(np.float64)
    squares = ((max(at.operands, 2.0**-24) + 2.0**-24) * size) ** 2 / 3
    for term, gauge in golden.gauges.items():
        name, count = golden.terms[term].rstrip(")").split("(")
        if name == "dot":
            unit = float(at) * math.sqrt(int(count) / 9 + 1) + operands
        elif name == "ops":
            unit = max(float(at), at.operands) * math.sqrt(int(count) / 3)
        else:
            raise GoldenError(f"{golden.id}: the rule bias knows no error model {name}")
        squares += (unit * gauge.astype(np.float64)) ** 2
    return np.asarray(np.sqrt(squares))


def _rounds_operands(golden: Golden, u: float) -> bool:
    """Whether the declared type of operands holds not all of the golden's inputs."""
    if not isinstance(u, Precision) or u.operands <= 2.0**-24:
        return False
    digits = [np.frexp(x.astype(np.float64))[0] / u.operands for x in golden.inputs.values()]
    return any((part != np.rint(part)).any() for part in digits)


def _bias(run: int, golden: Golden, expected: Array, answer: Array, u: float) -> Verdict:
    """SPEC 16.8. run: how many elements that follow each other share roundings."""
    special = _special(expected, answer)
    if special:
        return special
    typical = _typical(golden, expected, u).ravel()
    if _rounds_operands(golden, u):
        run = max(1, typical.size)  # an operand's rounding is shared by all that read it
    error = (answer.astype(np.float64) - expected).ravel()
    share = np.divide(error, typical, out=np.zeros_like(error), where=typical > 0)
    allowed = 7 * math.sqrt(math.ceil(share.size / run)) * run
    sums = {
        "away from zero": float((share * np.sign(expected.ravel())).sum()),
        "upwards": float(share.sum()),
    }
    way, total = max(sums.items(), key=lambda item: abs(item[1]))
    worst = abs(total) / allowed
    if worst <= 1:
        return Verdict("pass", worst)
    opposite = {"away from zero": "towards zero", "upwards": "downwards"}
    return Verdict(
        "fail",
        worst,
        f"{share.size} results err {way if total > 0 else opposite[way]} by {abs(total):.4g} "
        f"typical errors in sum, rounding to nearest by at most {allowed:.4g}: one-sided rounding",
    )
