"""A record as JUnit XML, for the test views of CI systems.

A suite for each level and operation, a testcase for each case. What the backend has not
implemented, or fails as expected, is `skipped`; what could not be evaluated is an `error`, and so
is an interruption.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from conformance.reports.record import Record
from conformance.reports.terminal import worst_element

TAGS = {
    "fail": "failure",
    "cannot evaluate": "error",
    "not implemented": "skipped",
    "not judged": "skipped",
}
COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def junit(data: Record) -> str:
    """The XML of a record (docs/report.md)."""
    top = Element("testsuites", name=f"bitforbit {data['command']}", time=f"{data['seconds']:.3f}")
    areas: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for case in data["cases"]:
        areas[".".join(case["id"].split("/")[:2])].append(case)
    for area, cases in areas.items():
        _suite(top, area, cases, data)
    if data["interrupted"]:
        suite = SubElement(top, "testsuite", name="run", tests="1", errors="1")
        error = SubElement(SubElement(suite, "testcase", name="run", classname="run"), "error")
        error.set("message", "interrupted: cases are missing")
    for name in ("tests", *COUNTED):
        top.set(name, str(sum(int(suite.get(name, "0")) for suite in top)))
    ElementTree.indent(top, " ")
    return ElementTree.tostring(top, "unicode", xml_declaration=True) + "\n"


def _suite(top: Element, area: str, cases: list[Mapping[str, Any]], data: Record) -> None:
    suite = SubElement(top, "testsuite", name=area, tests=str(len(cases)))
    for name, kind in COUNTED.items():
        suite.set(name, str(sum(_tag(case) == kind for case in cases)))
    suite.set("timestamp", data["started"].removesuffix("+00:00"))
    for case in cases:
        entry = SubElement(suite, "testcase", name=case["id"].split("/", 2)[2], classname=area)
        if "expected" in case:
            SubElement(entry, "skipped", message=f"failed as expected: {case['expected']}")
        elif case["outcome"] in TAGS:
            tag = SubElement(entry, TAGS[case["outcome"]], message=case["message"])
            if tag.tag != "skipped":
                tag.set("type", case["rule"])
                tag.text = _in_full(case, data["again"])


def _tag(case: Mapping[str, Any]) -> str | None:
    """As what a case is counted: a failure that was expected is skipped, as pytest has it."""
    return "skipped" if "expected" in case else TAGS.get(case["outcome"])


def _in_full(case: Mapping[str, Any], words: str) -> str:
    """What the terminal shows of a failure."""
    again = f"bitforbit {words} --case '{case['id']}'"
    lines = [f"{case['id']}  (SPEC {case['section']})", case["message"], worst_element(case)]
    return "\n".join(line for line in [*lines, *case.get("diagnosis", ()), again] if line)
