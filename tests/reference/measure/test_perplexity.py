"""Perplexity and divergence against plain loops in float64, and against transformers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from reference.errors import RequestError
from reference.measure.perplexity import (
    QUANTILES,
    Base,
    Evaluation,
    Mean,
    Scores,
    Window,
    by_chunks,
    by_stride,
    comparison,
    divergence,
    perplexity,
    surprises,
    writing,
)
from reference.model import Model, load_model
from tests.oracle.arrays import assert_same
from tests.reference.models import QWEN2_SMALL, small, tokens_of

TINY = Path(__file__).parents[3] / "fixtures" / "tiny-dense"


def evaluation(model: Model | None = None, count: int = 70, **options: Any) -> Evaluation:
    ticks = itertools.count()
    tokens = np.array(tokens_of(count, 32), np.int64)
    told = {"context": 16, "clock": lambda: float(next(ticks)), **options}
    return Evaluation(model or small(QWEN2_SMALL), tokens, **told)


def scores_of(logits: Any, targets: Any) -> Scores:
    rows, ids = np.asarray(logits, np.float32), np.asarray(targets, np.int64)
    window = Window(0, len(ids) + 1, 1)
    return Scores(window, rows, ids, surprises(rows, ids), 1.0)


def plain(row: Any, target: int) -> float:
    """`-ln p`, term by term."""
    values: list[float] = [float(x) for x in row]
    top = max(values)
    return top + math.log(math.fsum(math.exp(x - top) for x in values)) - values[target]


# windows


@given(st.integers(4, 40), st.integers(0, 200))
def test_of_a_chunk_the_tokens_after_its_middle_count(context: int, more: int) -> None:
    count = context + more
    windows = by_chunks(count, context)
    assert len(windows) == count // context
    for index, window in enumerate(windows):
        assert (window.start, window.stop) == (index * context, (index + 1) * context)
        # llama.cpp predicts from the logits at positions context / 2 to context - 2
        assert window.counted == context - 1 - context // 2
        assert window.first == window.start + context // 2 + 1


@given(st.integers(4, 40), st.data())
def test_by_stride_every_token_but_the_first_counts_once(context: int, data: Any) -> None:
    stride = data.draw(st.integers(1, context - 1))
    count = context + data.draw(st.integers(0, 100))
    windows = by_stride(count, context, stride)
    counted = [token for w in windows for token in range(w.first, w.stop)]
    assert counted == list(range(1, count))
    for index, window in enumerate(windows):
        assert window.start == index * stride
        assert window.start < window.first < window.stop <= window.start + context


# perplexity


@pytest.mark.parametrize("options", [{}, {"bos": 3}, {"stride": 5}, {"chunks": 2}])
def test_perplexity_is_that_of_plain_loops(options: dict[str, Any]) -> None:
    measured = evaluation(**options)
    text = measured.tokens.tolist()
    found = perplexity(list(measured.run()))
    losses, each = [], []
    for window in measured.windows:
        given_ = text[window.start : window.stop]
        if "bos" in options:
            given_ = [options["bos"], *given_[1:]]
        logits = measured.model.forward(given_)
        mine = [
            plain(logits[at - window.start - 1], text[at])
            for at in range(window.first, window.stop)
        ]
        losses += mine
        each.append(math.exp(math.fsum(mine) / len(mine)))
    mean = math.fsum(losses) / len(losses)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in losses) / (len(losses) - 1))
    assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
    error = math.exp(mean) * deviation / math.sqrt(len(losses))
    assert found["perplexity_error"] == pytest.approx(error, rel=1e-12)
    assert (found["tokens"], found["repetitions"]) == (len(losses), len(each))
    assert found["window_median"] == pytest.approx(float(np.median(each)), rel=1e-12)
    rates = [window.stop - window.start - 1 for window in measured.windows]
    assert (found["rate_least"], found["rate_most"]) == (min(rates), max(rates))


def test_the_first_token_of_a_strided_window_is_its_own() -> None:
    with_bos = evaluation(stride=7, bos=3)
    mine = with_bos.logits(with_bos.windows[1:2])
    assert_same(next(mine), next(evaluation(stride=7).logits([Window(7, 23, 16)])))


def test_a_token_without_probability_is_refused() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(RequestError, match="not finite"):
            surprises(np.array([[1.0, bad]], np.float32), np.array([1]))


@pytest.mark.parametrize("stride", [0, 100])
def test_perplexity_is_transformers(stride: int) -> None:
    """A token's surprise moves by at most twice the largest change of its logits.

    For the logarithm of a sum of exponentials moves by no more than its largest term does. What
    the logits differ by is measured here, against transformers in float64, and is small itself:
    a few float32 roundings of values up to 30 or so, through 5 layers.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = load_model(TINY)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    assert model.tokenizer is not None
    text = (TINY.parent / "held-out.txt").read_text(encoding="utf-8")
    tokens = np.array(model.tokenizer.encode(text)[:600], np.int64)
    measured = Evaluation(model, tokens, context=256, stride=stride)
    ours = list(measured.run())
    expected, bounds = [], []
    for scored in ours:
        window = scored.window
        ids = torch.tensor(tokens[None, window.start : window.stop])
        labels = ids.clone()
        labels[:, : window.first - window.start] = -100
        with torch.no_grad():
            told = theirs(ids, labels=labels)
        expected.append(float(told.loss) * window.counted)
        rows = told.logits[0, window.first - window.start - 1 : -1].numpy()
        bounds.append(2 * np.abs(rows - scored.logits).max(axis=1).sum())
    count = measured.counted
    bound = sum(bounds) / count
    assert 0 < bound < 1e-4
    mean = math.log(perplexity(ours)["perplexity"])
    assert abs(mean - sum(expected) / count) <= bound


# divergence


def test_a_divergence_is_that_of_plain_loops() -> None:
    rng = np.random.default_rng(1)
    base = (3 * rng.standard_normal((50, 9))).astype(np.float32)
    base[3, 2] = -np.inf  # a token that the base excludes
    other = (base + 0.3 * rng.standard_normal(base.shape)).astype(np.float32)
    other[3, 2] = 1.0
    targets = rng.integers(3, 9, 50)
    nats, shift, surprise, same = [], [], [], []
    for b, o, t in zip(base, other, targets.tolist(), strict=True):
        terms = [
            math.exp(-plain(b, i)) * (plain(o, i) - plain(b, i)) for i in range(9) if b[i] > -np.inf
        ]
        nats.append(math.fsum(terms))
        shift.append(math.exp(-plain(o, t)) - math.exp(-plain(b, t)))
        surprise.append(plain(o, t) - plain(b, t))
        same.append(b.argmax() == o.argmax())
    found = comparison([divergence(base, scores_of(other, targets))])
    expected = {
        "kl_mean": np.mean(nats),
        "kl_error": np.std(nats, ddof=1) / np.sqrt(50),
        "kl_largest": max(nats),
        "kl_least": min(nats),
        **{f"kl_q{q * 100:g}": np.quantile(nats, q) for q in QUANTILES},
        "same_top": np.mean(same),
        "same_top_error": np.std(same, ddof=1) / np.sqrt(50),
        "shift_mean": np.mean(shift),
        "shift_rms": np.sqrt(np.mean(np.square(shift))),
        "ratio": np.exp(np.mean(surprise)),
        "ratio_error": np.exp(np.mean(surprise)) * np.std(surprise, ddof=1) / np.sqrt(50),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-11, abs=1e-15), name


def test_a_model_does_not_diverge_from_what_was_stored_of_it(tmp_path: Path) -> None:
    path = tmp_path / "base.safetensors"
    measured = evaluation()
    with writing(path, measured) as save:
        for done in measured.run():
            save(done)
    stored = load_file(path)["logits"]
    assert_same(stored, np.concatenate([done.logits for done in measured.run()]))
    base = Base(path, measured)
    assert base.digest == measured.model.digest
    parts = [divergence(base.next(done.window.counted), done) for done in measured.run()]
    figures = comparison(parts)
    assert {figures[k] for k in figures if k.startswith("kl_")} == {0.0}
    assert (figures["same_top"], figures["ratio"], figures["shift_rms"]) == (1.0, 1.0, 0.0)
    other = evaluation(small(QWEN2_SMALL, "int4"))
    base = Base(path, other)
    parts = [divergence(base.next(done.window.counted), done) for done in other.run()]
    assert comparison(parts)["kl_mean"] > 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 12}, "context is 16, and here it is 12"),
        ({"stride": 4}, "stride is 0, and here it is 4"),
        ({"chunks": 3}, "text is "),
        ({"bos": 1}, "text is "),
        ({"count": 80}, "text is "),
    ],
)
def test_a_base_of_something_else_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "base"
    measured = evaluation()
    with writing(path, measured) as save:
        for done in measured.run():
            save(done)
    with pytest.raises(RequestError, match=message):
        Base(path, evaluation(**options))


def test_a_file_that_is_no_base_is_refused(tmp_path: Path) -> None:
    measured, path = evaluation(), tmp_path / "base"
    with writing(path, measured) as save:
        for done in measured.run():
            save(done)
    whole = path.read_bytes()
    for wrong in (b"", whole[:100], whole[:-4], whole + b"\0" * 4, b"\xff" * 64):
        path.write_bytes(wrong)
        with pytest.raises(RequestError, match="it is no file of logits"):
            Base(path, measured)
    path.write_bytes(whole.replace(b'"version": "1"', b'"version": "2"'))
    with pytest.raises(RequestError, match="version is 2, and here it is 1"):
        Base(path, measured)
    path.write_bytes(whole.replace(b'"dtype": "F32"', b'"dtype": "I32"'))
    with pytest.raises(RequestError, match="its logits are I32"):
        Base(path, measured)
    with pytest.raises(RequestError, match="it is no file of logits"):
        Base(tmp_path / "missing", measured)


def test_a_base_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    measured, path = evaluation(), tmp_path / "base"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), writing(path, measured) as save:  # noqa: PT012
        save(next(measured.run()))
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["base"]
    assert path.read_text() == "before"
    with pytest.raises(RequestError, match="cannot write it"), writing(path / "x", measured):
        pytest.fail("it was opened")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 3}, "^context: 3 is out of range"),
        ({"context": 257}, "^context: 257 is out of range; the model's has 4 to 256"),
        ({"context": 71}, "^text: its 70 tokens do not fill a window of 71"),
        ({"stride": 16}, "^stride: 16 is out of range"),
        ({"stride": -1}, "^stride: -1 is out of range"),
        ({"chunks": 0}, "^chunks: 0 is out of range"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        evaluation(**options)
    assert "\n" not in str(error.value)


def test_a_single_value_has_no_error() -> None:
    assert Mean.of(np.array([2.0])) == Mean(2.0, 0.0)
    assert Mean(0.0, 0.5).exp() == Mean(1.0, 0.5)
