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
<rect width="{width}" height="20" rx="3" fill="#3a3f45"/>
<path fill="{color}" d="M{left} 0h{straight}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{straight}z"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{left_middle}" y="14" textLength="{left_text}">{label}</text>
<text x="{right_middle}" y="14" textLength="{right_text}">{message}</text>
</g>
</svg>
"""

NARROW = "fijlrt ,.:"


def _width(text: str) -> int:
    """About how wide a text is, in pixels; `textLength` makes it fit whatever the font."""
    return round(sum(4.4 if letter in NARROW else 7.0 for letter in text))


def verdict(data: Record) -> tuple[str, str]:
    """A few words and a colour. Green is for a whole run in which all passed."""
    counts = data["summary"]
    failed = counts["failed"] + counts["cannot_evaluate"]
    passed, missing, known = counts["passed"], counts["not_implemented"], counts["expected"]
    if failed:
        return f"{failed:,} of {failed + passed + missing:,} failed", RED
    if data["interrupted"]:
        return "interrupted", GREY
    if passed == known == 0:
        return "nothing passed", RED
    if missing or known:
        rest = [f"{known:,} known failure{'s' * (known > 1)}"] * bool(known)
        rest += [f"{missing:,} not implemented"] * bool(missing)
        return ", ".join([f"{passed:,} passed", *rest]), YELLOW
    return f"{passed:,} passed", GREEN


def svg(data: Record) -> str:
    """The badge as a picture."""
    message, color = verdict(data)
    label = "bitforbit"
    left_text, right_text = _width(label), _width(message)
    left, right = left_text + 12, right_text + 12
    return SVG.format(
        width=left + right,
        left=left,
        straight=right - 3,
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
