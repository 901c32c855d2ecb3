"""What a calibration finds: of each fault and each variant, and of all of them (SPEC 20)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from conformance.calibration.naive import GATES, TOKEN_GATE
from conformance.calibration.part import WHOLE, Part
from conformance.faults import AnyFault, area, description, faults
from conformance.operations import Outputs
from conformance.rules import Verdict
from conformance.variants import AnyVariant, variants


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
        lists = {"pass": self.passed, "fail": self.failed, "not judged": self.undecided}
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
