"""A badge of a run: an SVG picture, or the JSON that a badge service asks for at an address."""

from __future__ import annotations

import json
from xml.sax.saxutils import escape

from conformance.reports.record import Record

GREEN, YELLOW, RED, GREY = "#2e7d32", "#9a6700", "#c62828", "#57606a"
"""Each has a contrast of at least 4.5 with white."""

SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" \
aria-label="{label}: {message}">
<title>{label}: {message}</title>
<clipPath id="r"><rect width="{width}" height="20" rx="3"/></clipPath>
<g clip-path="url(#r)">
<rect width="{left}" height="20" fill="#3a3f45"/>
<rect x="{left}" width="{right}" height="20" fill="{color}"/>
</g>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{left_middle}" y="14" textLength="{left_text}">{label}</text>
<text x="{right_middle}" y="14" textLength="{right_text}">{message}</text>
</g>
</svg>
"""

LETTER = 6.6
"""Width of a letter, about; `textLength` makes it fit whatever the font."""


def verdict(data: Record) -> tuple[str, str]:
    """A few words and a colour. Green is for a whole run in which all passed."""
    counts = data["summary"]
    failed = counts["failed"] + counts["cannot_evaluate"]
    passed, missing = counts["passed"], counts["not_implemented"]
    if failed:
        return f"{failed:,} of {failed + passed + missing:,} failed", RED
    if data["interrupted"]:
        return "interrupted", GREY
    if passed == 0:
        return "nothing passed", RED
    if missing:
        return f"{passed:,} passed, {missing:,} not implemented", YELLOW
    return f"{passed:,} passed", GREEN


def svg(data: Record) -> str:
    """The badge as a picture."""
    message, color = verdict(data)
    label = "bitforbit"
    left_text, right_text = round(LETTER * len(label)), round(LETTER * len(message))
    left, right = left_text + 12, right_text + 12
    return SVG.format(
        width=left + right,
        left=left,
        right=right,
        color=color,
        label=label,
        message=escape(message),
        left_text=left_text,
        right_text=right_text,
        left_middle=left / 2,
        right_middle=left + right / 2,
    )


def endpoint(data: Record) -> str:
    """The badge as the JSON of a shields.io endpoint."""
    message, color = verdict(data)
    about = {"schemaVersion": 1, "label": "bitforbit", "message": message, "color": color}
    return json.dumps({**about, "isError": color == RED}) + "\n"
