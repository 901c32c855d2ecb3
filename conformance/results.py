"""What came of a case: its outcome, and what the backend answered (SPEC 18)."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import GoldenError
from conformance.operations import NotImplementedByBackendError, Outputs, WrongAnswerError
from conformance.rules import Outcome, Verdict

Answers = dict[tuple[str, str], Outputs]
"""What a backend answered, by golden id and rule."""


@dataclass(frozen=True)
class Result:
    """One case's outcome, as the JSON report gives it.

    worst: the largest margin (error / bound, 1 is the limit), or the share of differing elements
    under `bits`; None where there is none.
    """

    id: str
    level: str
    section: str
    rule: str
    outcome: Outcome
    worst: float | None
    message: str


def guarded(case: Callable[[], Verdict]) -> Verdict:
    """A case's verdict, whatever the backend raises; SystemExit is no exception, Ctrl-C is."""
    try:
        return case()
    except NotImplementedByBackendError as missing:
        return Verdict("not implemented", None, f"the backend has no {missing}")
    except NotImplementedError as missing:
        said = " ".join(str(missing).split())
        raised = "the backend raised NotImplementedError" + (f": {said}" if said else "")
        return Verdict("not implemented", None, raised)
    except GoldenError as unusable:
        return Verdict("cannot evaluate", None, str(unusable))
    except WrongAnswerError as wrong:
        return Verdict("fail", None, str(wrong))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Verdict("fail", None, f"the backend raised {reason}{_place(error)}")


LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
NOT_THE_BACKENDS = (Path(__file__).parent, *map(Path, LIBRARIES))
"""The suite's own code and installed libraries: an error that shows there was made by a caller."""


def _place(error: BaseException) -> str:
    """Where a backend raised, ` (engine.py:310, in load)`: the innermost line of its own."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)  # `<string>` of code that has no file
        if path.is_file() and not any(path.is_relative_to(folder) for folder in NOT_THE_BACKENDS):
            return f" ({path.name}:{line}, in {frame.f_code.co_name})"
    return ""


def result_of(case_id: str, section: str, rule: str, verdict: Verdict) -> Result:
    """A case and its verdict as a result."""
    level = case_id.split("/")[0]
    return Result(case_id, level, section, rule, verdict.outcome, verdict.worst, verdict.message)


def summary(results: list[Result]) -> dict[str, int]:
    """Cases by outcome, as the JSON report names them."""
    names = {
        "passed": "pass",
        "failed": "fail",
        "not_implemented": "not implemented",
        "not_judged": "not judged",
        "cannot_evaluate": "cannot evaluate",
    }
    return {name: sum(r.outcome == outcome for r in results) for name, outcome in names.items()}
