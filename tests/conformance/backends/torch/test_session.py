"""Turns, speculation, serving and resuming, bit for bit (SPEC 11.3, 11.4, 13.5, 14.2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conformance.backends.torch.session import Text
from tests.conformance.backends.torch.models import (
    FAMILIES,
    SIZES,
    write_model,
)
from tests.conformance.backends.torch.side_by_side import (
    FIXTURES,
    REFERENCE,
    TOKENS,
    TORCH,
    Array,
    packed,
    same,
)


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both sessions of a random model; mistral's window is 9, and the context 128."""
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, SIZES | FAMILIES[request.param])
    return [backend.load(str(folder), "float32") for backend in (TORCH, REFERENCE)]


def session_both(sessions: Any, method: str, **arguments: Any) -> tuple[Array, ...]:
    ours, theirs = (getattr(session, method)(**arguments) for session in sessions)
    same(ours, theirs, (method, arguments))
    return cast(tuple[Array, ...], ours)


class Watched:
    """How many tokens each pass of a session's model computes, and in which attention."""

    def __init__(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []
        hidden = session.model.hidden

        def watch(tokens: Any, caches: Any, mode: str, note: Any) -> Any:
            self.passes.append(len(tokens))
            return hidden(tokens, caches, mode, note)

        monkeypatch.setattr(session.model, "hidden", watch)


def test_turns(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(26)
    a, b = (rng.integers(0, 90, 60).tolist() for _ in range(2))
    prompts = [a[:20], a[:40], a[:25] + b[:9], b[:50], a[:40], a, a[:1]]
    watched = Watched(small[0], monkeypatch)
    arguments = {**packed(prompts), "max_new_tokens": 3}
    answer, theirs = (session.turns(**arguments) for session in small)
    same(answer, theirs)
    *_, cache_n, prompt_n = answer
    if set(small[0].model.config.windows) == {None}:  # else what is behind them is forgotten
        assert cache_n.tolist() == [0, 20, 25, 0, 39, 40, 0]
    assert (cache_n + prompt_n).tolist() == [len(p) for p in prompts]
    assert watched.passes == [n for computed in prompt_n for n in (computed, 1, 1)]


def test_turns_reuse_answers_but_their_last_token(small: Any) -> None:
    prompt = TOKENS[:12] % 90
    answer = small[0].generate(prompt, 5, False)[0]
    again = [prompt.tolist(), [*prompt.tolist(), *answer.tolist(), 7]]
    assert session_both(small, "turns", **packed(again), max_new_tokens=5)[2].tolist() == [0, 16]


@pytest.mark.parametrize("draft_tokens", [0, 1, 4, 9])
def test_speculate(small: Any, draft_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.tile(TOKENS[:9] % 90, 4)
    plain = small[0].generate(prompt, 14, False)
    watched = Watched(small[0], monkeypatch)
    arguments = {"prompt": prompt, "max_new_tokens": 14, "draft_tokens": draft_tokens}
    tokens, logits, accepted = session_both(small, "speculate", **arguments)
    same((tokens, logits), plain)
    assert len(watched.passes) == 1 + len(accepted)
    assert max(watched.passes[1:]) == 1 + draft_tokens
    assert (accepted < watched.passes[1:]).all()


def test_a_right_draft_saves_passes() -> None:
    session = TORCH.load(str(FIXTURES / "tiny-dense"), "float32")
    prompt = np.tile(session.generate(TOKENS[:5], 40, False)[0], 2)
    assert session.speculate(prompt, 12, 4)[2].sum() > 0


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_serve(small: Any, draft_tokens: int) -> None:
    prompts = [(TOKENS[i : i + n] % 90).tolist() for i, n in ((0, 3), (9, 40), (30, 17))]
    about = {"page_size": 4, "max_batched_tokens": 16, "draft_tokens": draft_tokens}
    answer = session_both(small, "serve", **packed(prompts), max_new_tokens=5, **about)
    alone = small[0].generate(np.array(prompts[1]), 5, False)
    same(tuple(part[1] for part in answer), alone)


def test_resume(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = TOKENS[:60] % 90
    watched = Watched(small[0], monkeypatch)
    for count in (1, 33, 59, 60):
        path = tmp_path / f"{count}.cache"
        arguments = {"longer": longer, "max_new_tokens": 4, "path": str(path)}
        watched.passes.clear()
        answer = session_both(small, "resume", prompt=longer[:count], **arguments)
        assert answer[2].tolist() == [min(count, 59)]
        assert watched.passes == [count, max(1, 60 - count), 1, 1, 1]


def test_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the file decides; another model's is refused."""
    target, draft = (TORCH.load(str(FIXTURES / f"tiny-{n}"), "float32") for n in ("dense", "draft"))
    path = tmp_path / "a.cache"
    first = target.resume(TOKENS[:30], TOKENS[:40], 2, str(path))
    text = Text.load(path, target.model)
    assert text.tokens == TOKENS[:30].tolist()
    with pytest.raises(ValueError, match="not written by this model"):
        Text.load(path, draft.model)
    other = TORCH.load(str(FIXTURES / "tiny-dense"), "int4")
    with pytest.raises(ValueError, match="not written by this model"):
        Text.load(path, other.model)
    load = Text.load

    def changed(path: Path, model: Any) -> Text:
        text = load(path, model)
        text.caches[0].v[0, 3, 0] += 1
        text.caches[0].fractions[0, 3, 0] *= 2
        return text

    monkeypatch.setattr(Text, "load", changed)
    second = target.resume(TOKENS[:30], TOKENS[:40], 2, str(path))
    assert not np.array_equal(first[1], second[1])


def test_values_that_are_not_finite_survive_the_file(tmp_path: Path) -> None:
    session = TORCH.load(str(FIXTURES / "tiny-draft"), "float32")
    text = Text(session.model)
    text.feed(TOKENS[:9].tolist(), "exact", 1)
    cache = text.caches[0]
    k, v = (x.transpose(0, 1).clone() for x in (cache.k, cache.v))
    v[4, 0, 0] = torch.inf
    text.caches[0] = type(cache)(k, v)
    text.save(tmp_path / "a.cache")
    again = Text.load(tmp_path / "a.cache", session.model).caches[0]
    assert torch.equal(again.finite, text.caches[0].finite)
    assert not bool(again.finite.all())
    for name, tensor in vars(text.caches[0]).items():
        assert torch.equal(getattr(again, name), tensor), name


def test_what_is_fast_is_not_reused() -> None:
    """A prompt of 512 tokens or more to be computed has other bits (8.4)."""
    session = TORCH.load(str(FIXTURES / "tiny-draft"), "float32")
    prompt = np.random.default_rng(27).integers(0, 1000, 530).tolist()
    prompts = [prompt, prompt[:40], [*prompt[:500], 5]]
    answer = session.turns(**packed(prompts), max_new_tokens=1)
    assert answer[2].tolist() == [0, 0, 40]
    same(answer[1][2], session.generate(np.array(prompts[2]), 1, False)[1])


def test_the_end_of_the_context(small: Any) -> None:
    prompt = np.tile(TOKENS, 2)[:120] % 90
    tokens = session_both(small, "generate", prompt=prompt, max_new_tokens=20, exact_prefill=False)
    assert len(tokens[0]) == 128 - 120 + 1
    for count in (1, 9):
        arguments = {"prompt": prompt, "max_new_tokens": 20, "draft_tokens": count}
        same(session_both(small, "speculate", **arguments)[:2], tokens)
    for length in (0, 129):
        with pytest.raises(ValueError, match=f"prompt of {length} tokens"):
            small[0].generate(np.zeros(length, np.int64), 1, False)
