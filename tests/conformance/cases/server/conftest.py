"""The reference's answers, and this project's own server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.cases.server import Book
from reference.engine import Engine
from tests.conformance.cases.server.judging import MODEL
from tests.reference.serve.servers import running


@pytest.fixture(scope="module")
def book() -> Book:
    return Book.load(MODEL)


@pytest.fixture(scope="module")
def ours(book: Book) -> Iterator[str]:
    """This project's own server."""
    with running(Engine(book.model, exact_prefill=True), None) as server:
        yield server.url
