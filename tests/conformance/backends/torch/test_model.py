"""Whole models of every family, bit for bit (SPEC 10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.conformance.backends.torch.models import (
    FAMILIES,
    SIZES,
    SPREAD,
    family_config,
    write_model,
)
from tests.conformance.backends.torch.side_by_side import (
    FIXTURES,
    MODES,
    REFERENCE,
    TOKENS,
    TORCH,
    same,
)


@pytest.fixture(scope="module", params=MODES)
def sessions(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    folder, mode = str(FIXTURES / "tiny-dense"), request.param
    return TORCH.load(folder, mode), REFERENCE.load(folder, mode)


def test_session_equals_the_reference(sessions: tuple[Any, Any]) -> None:
    ours, theirs = sessions
    for session in sessions:
        session.reset()
    for part in (TOKENS[:70], TOKENS[70:71], TOKENS[71:]):
        same(ours.forward(tokens=part, attention="exact"), theirs.forward(part, "exact"))


def test_chunks_change_nothing(sessions: tuple[Any, Any]) -> None:
    session = sessions[0]
    session.reset()
    whole = session.forward(TOKENS, "exact")
    for size in (3, 32, 64):
        session.reset()
        parts = [session.forward(TOKENS[i : i + size], "exact") for i in range(0, 80, size)]
        same(np.concatenate(parts), whole, size)


def test_generation_equals_the_reference(sessions: tuple[Any, Any]) -> None:
    ours, theirs = (
        session.generate(prompt=TOKENS[:20], max_new_tokens=6, exact_prefill=False)
        for session in sessions
    )
    same(ours, theirs)


def test_draft_equals_the_reference() -> None:
    folder = str(FIXTURES / "tiny-draft")
    ours, theirs = (backend.load(folder, "float32") for backend in (TORCH, REFERENCE))
    same(ours.forward(TOKENS, "exact"), theirs.forward(TOKENS, "exact"))


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_the_reference(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, SIZES | FAMILIES[family])
    tokens = TOKENS[:60] % 90
    for mode in MODES:
        ours, theirs = TORCH.load(tmp_path, mode), REFERENCE.load(str(tmp_path), cast(Any, mode))
        for part in (tokens[:45], tokens[45:46], tokens[46:]):
            same(ours.forward(part, "exact"), theirs.forward(part, "exact"), (family, mode))


@pytest.mark.parametrize("name", SPREAD)
def test_every_family_and_switch_equals_the_reference(name: str, tmp_path: Path) -> None:
    """In chunks and in every weight mode: 60 tokens of a model of random weights."""
    write_model(tmp_path, family_config(name))
    tokens = TOKENS[:60] % 48
    for mode in MODES:
        ours, theirs = TORCH.load(tmp_path, mode), REFERENCE.load(str(tmp_path), cast(Any, mode))
        for part in (tokens[:45], tokens[45:46], tokens[46:]):
            same(ours.forward(part, "exact"), theirs.forward(part, "exact"), (name, mode))


@pytest.mark.parametrize("model", ["families/gemma3", "families/gpt-oss", "tiny-moe"])
def test_every_step_equals_the_reference(model: str) -> None:
    folder, tokens = str(FIXTURES / model), TOKENS[:40] % 48
    ours, theirs = (b.load(folder, "float32").trace(tokens, "exact") for b in (TORCH, REFERENCE))
    assert set(ours) == set(theirs)
    for name, step in theirs.items():
        same(ours[name], step, name)


def test_the_floor_decides_the_prefill() -> None:
    """511 prompt tokens are exact, 512 fast unless told otherwise (8.4)."""
    session = TORCH.load(str(FIXTURES / "tiny-draft"), "float32")
    prompt = np.random.default_rng(18).integers(0, 1000, 512)
    session.reset()
    exact = session.forward(prompt, "exact")
    same(session.generate(prompt[:511], 1, False)[1], exact[510:511])
    same(session.generate(prompt, 1, True)[1], exact[511:])
    fast = session.generate(prompt, 1, False)[1]
    assert not np.array_equal(fast, exact[511:])
    np.testing.assert_allclose(fast, exact[511:], rtol=1e-3, atol=1e-3)
