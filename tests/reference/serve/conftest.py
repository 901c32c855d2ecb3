"""The server that a module's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reference.engine import Engine
from tests.reference.models import tiny
from tests.reference.serve.servers import Server, running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(Engine(tiny())) as server:
        yield server
