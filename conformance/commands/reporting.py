"""The reports that `check` and `judge` are asked for, as options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.commands.common import add_json, standard_output
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.reports.record import Record


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("reports", "docs/report.md describes them")
    add_json(group, "the whole record")
    group.add_argument(
        "--html", metavar="FILE", help="one page to look at, with charts and filters"
    )
    group.add_argument("--junit", metavar="FILE", help="JUnit XML, for a CI")
    group.add_argument(
        "--badge", metavar="FILE", help="a picture (.svg), or JSON for a badge service"
    )
    group.add_argument(
        "--track", metavar="OLD.json", help="tell what changed since an earlier run's --json"
    )
    group.add_argument(
        "--no-diagnosis", action="store_true", help="do not compare failures with known faults"
    )


class Reports:
    """Where the record of a run goes. Whether it can go there is checked before the run."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Read what to compare with, and look at every target. Raises RequestError."""
        from conformance.reports import track
        from conformance.reports.files import text_writer

        self._before = None if options.track is None else track.read(options.track)
        asked = list(_texts(options))
        to_stdout = [option for option, target, _ in asked if target == "-"]
        if len(to_stdout) > 1:
            raise RequestError(f"{to_stdout[1]}: {to_stdout[0]} goes to standard output already")
        self._shown = not to_stdout
        self._writers = [(text_writer(target, option), text) for option, target, text in asked]

    def give(self, data: Record, takes: Callable[[str], bool]) -> None:
        """Write the record everywhere, and show it, unless standard output is a report's.

        takes: whether a case was asked for. Of an interrupted run nothing is shown.
        """
        from conformance.reports import terminal, track

        if self._before is not None:
            data = {**data, "track": track.compare(self._before, data, takes)}
        if self._shown and not data["interrupted"]:
            terminal.show(standard_output(), data)
        for write, text in self._writers:
            write(text(data))


def _texts(options: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[Record], str]]]:
    """Option, target and maker of each report that is asked for."""
    from conformance.reports import badge, junit, record

    if options.json is not None:
        yield "--json", options.json, record.as_text
    if options.html is not None:
        yield "--html", options.html, _html()
    if options.junit is not None:
        yield "--junit", options.junit, junit.junit
    if options.badge is not None:
        kinds = {".svg": badge.svg, ".json": badge.endpoint}
        kind = Path(options.badge).suffix
        if kind not in kinds:
            raise RequestError(f"--badge: {options.badge} must end in {' or '.join(kinds)}")
        yield "--badge", options.badge, kinds[kind]


def _html() -> Callable[[Record], str]:
    try:
        from conformance.reports.html import page
    except ImportError as error:
        raise RequestError(f"--html: {error}; pip install 'bitforbit[html]'") from error
    return page
