"""Two runs compared: what changed since an earlier one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.reports.record import FAILED, FORMAT, Record, headline, legible
from conformance.rules import ASK_BITS
from reference.errors import RequestError

GREW = 2.0
"""A margin that is more than this many times what it was is told."""

UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a file that is no record may raise."""

TRACKED = {
    "newly_failing": ("newly failing", "bold red"),
    "newly_missing": ("no longer implemented", "yellow"),
    "grown": ("margin grew", "yellow"),
    "gone": ("gone", "yellow"),
    "newly_passing": ("newly passing", "green"),
    "added": ("new", "green"),
}
"""What is told, the worst first: key, words, and the terminal's style."""


def read(target: str) -> Record:
    """The record of an earlier run. Raises RequestError where the file is none."""
    try:
        data = json.loads(Path(target).read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, this reads {FORMAT}")
        for case in data["cases"]:
            if not (isinstance(case["id"], str) and isinstance(case["outcome"], str)):
                raise TypeError("an id or an outcome is no text")
            if case["worst"] is not None:
                case["worst"] = float(case["worst"])
        _before(data)
    except FileNotFoundError as error:
        raise RequestError(
            f"--track: {target}: no such file; a run with --json writes it"
        ) from error
    except UNREADABLE as error:
        reason = legible(f"{type(error).__name__}: {error}")
        raise RequestError(
            f"--track: {target} is no report of an earlier run ({reason}); give one of --json"
        ) from error
    record: Record = data
    return record


def compare(before: Record, now: Record, takes: Callable[[str], bool]) -> dict[str, Any]:
    """What changed, by id.

    takes: whether a case was asked for now; others are not compared. An interrupted run has not
    lost what it did not reach.
    """
    old = {legible(c["id"]): c for c in before["cases"] if takes(c["id"])}
    new = {c["id"]: c for c in now["cases"]}
    both = [name for name in new if name in old]

    def was(name: str, *outcomes: str) -> bool:
        return old[name]["outcome"] in outcomes

    def is_now(name: str, *outcomes: str) -> bool:
        return new[name]["outcome"] in outcomes

    missing = "not implemented"
    failing = [n for n in both if is_now(n, *FAILED) and not was(n, *FAILED)]
    return {
        "before": _before(before),
        "newly_failing": failing,
        "newly_missing": [n for n in both if is_now(n, missing) and not was(n, missing)],
        "grown": [entry for entry in _grown(old, new) if entry["id"] not in failing],
        "gone": [] if now["interrupted"] else [name for name in old if name not in new],
        "newly_passing": [n for n in both if is_now(n, "pass") and not was(n, "pass")],
        "added": [] if before["interrupted"] else [name for name in new if name not in old],
    }


def _grown(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Margins of bounded rules that grew, the largest first."""
    grown = [
        {"id": name, "before": old[name]["worst"], "now": case["worst"]}
        for name, case in new.items()
        if name in old and case["rule"] not in ASK_BITS
        if None not in (old[name]["worst"], case["worst"])
        if case["worst"] > GREW * old[name]["worst"]
    ]
    return sorted(grown, key=lambda entry: -float(entry["now"]))


def _before(data: Record) -> dict[str, Any]:
    """The earlier run in a few words."""
    return {
        "backend": legible(data["backend"]["name"]),
        "numerics": {
            legible(str(k)): legible(str(v)) for k, v in data["backend"]["numerics"].items()
        },
        "machine": legible(data["machine"]),
        "spec": legible(data["spec"]),
        "started": legible(data["started"]),
        "interrupted": bool(data["interrupted"]),
        "headline": legible(headline(data)),
    }
