"""What an HTTP server shows of a model that the reference has too (SPEC 17 and 18).

Its text, its tokens and their logprobs are judged within what rounding at the declared precision
can move, step by step along the server's own text; counts, stops and streams must be equal.
"""

from __future__ import annotations

from conformance.cases.server.book import LEVEL, Book
from conformance.cases.server.checks import CASES, judged, selected

__all__ = ["CASES", "LEVEL", "Book", "judged", "selected"]
