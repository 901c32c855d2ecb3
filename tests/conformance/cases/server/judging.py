"""A server judged by its cases, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.backends.server import Server
from conformance.cases.server import Book, judged
from conformance.results import Result
from conformance.selection import Selection

Json = dict[str, Any]

MODEL = "tiny-draft"
CANNOT = {
    "llama": {"server/logits/any:bits"},
    "openai": {"server/logits/any:bits", "server/tokenize/texts:equal"},
}
"""What no server shows, and what a protocol has no endpoint for."""


def judge(
    url: str,
    book: Book,
    case: str = "*",
    api: str = "llama",
    precision: str = "float32",
    seconds: float = 60,
) -> dict[str, Result]:
    server = Server(url, api, book.vocabulary, precision, seconds)
    try:
        return {r.id: r for r in judged(server, book, Selection((), (case,)))}
    finally:
        server.close()


def outcomes(results: Mapping[str, Result]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for case, result in results.items():
        found.setdefault(result.outcome, set()).add(case)
    return found
