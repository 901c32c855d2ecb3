"""Which of the two is the problem: shares by hand, and what cannot be told."""

from __future__ import annotations

from typing import Any

import pytest

from reference.errors import RequestError
from reference.measure.problem import ARM, HELPS, problems


def row(prompt: int, output: int, **changes: Any) -> dict[str, Any]:
    """A row of a bench; the first token comes after a second, and then 10 tokens a second."""
    labels = dict.fromkeys(ARM) | {"n_depth": 0, "attention": "fast", "role": ""}
    figures = dict.fromkeys(("ttft_median", "ttft_least", "ttft_most"), 1.0)
    figures |= dict.fromkeys(("rate_median", "rate_least", "rate_most"), 10.0)
    counts = {"n_prompt": prompt, "n_output": output, "cache_n": 0, "prompt_n": max(prompt, 1)}
    return {**labels, **figures, **counts, "test": "it", "repetitions": 5, **changes}


def one(*rows: dict[str, Any], output: int | None = None) -> Any:
    (found,) = problems(rows, output)
    return found


def test_the_larger_one_is_the_problem() -> None:
    rows = (row(512, 0), row(0, 30))
    assert one(*rows).problem == "decode"
    assert one(*rows).share == (0.75, 0.75, 0.75)
    assert (one(*rows).prefill, one(*rows).decode) == (1.0, 3.0)
    short = one(*rows, output=5)
    assert (short.problem, short.share[0]) == ("prefill", pytest.approx(1 / 3))
    assert short.sentence == (
        "Prefill is the problem: of a prompt of 512 and an output of 5 tokens, prefill takes "
        "67% (67% to 67% over 5 runs) of 1.5 s."
    )


def test_where_runs_do_not_agree_neither_is() -> None:
    found = one(row(512, 0, ttft_least=0.5, ttft_most=2.0), row(0, 12))
    assert found.share == (1.2 / 2.2, 1.2 / 3.2, 1.2 / 1.7)
    assert found.problem == "both"
    assert found.sentence.startswith("Neither alone: of a prompt of 512")
    noisy = one(row(512, 0), row(0, 12, rate_least=5.0, rate_most=20.0))
    assert noisy.share == (1.2 / 2.2, 0.6 / 1.6, 2.4 / 3.4)


def test_rows_are_paired_by_arm_and_depth() -> None:
    rows = [
        row(512, 0),
        row(512, 0, weights="int4"),
        row(512, 0, n_depth=100),
        row(0, 20),
        row(0, 40, weights="int4"),
        row(0, 80, n_depth=100),
        row(512, 128),
        row(512, 0, role="do nothing"),
    ]
    assert [found.n_output for found in problems(rows)] == [20, 40, 80]


def test_what_cannot_be_told_is_refused() -> None:
    for rows in ([row(512, 0)], [row(0, 5)], [row(512, 0), row(0, 5, threads=2)]):
        with pytest.raises(RequestError, match=r"no prompt .* and output .* of the same arm"):
            list(problems(rows))
    warm = row(512, 0, cache_n=500, prompt_n=12)
    with pytest.raises(RequestError, match=r"500 of its tokens came from a cache.*--cold"):
        list(problems([warm, row(0, 5)]))


def test_an_answer_says_what_helps_and_what_does_not() -> None:
    told = one(row(512, 0), row(0, 30)).figures()
    assert (told["helps"], told["helps_not"]) == HELPS["decode"]
    assert told["problem"] == "decode"
    # what helps one is what does not help the other
    assert "reuse of prompt prefixes" in HELPS["prefill"][0]
    assert "reuse of prompt prefixes" in HELPS["decode"][1]
    assert "speculation" in HELPS["decode"][0]
    assert "speculation" in HELPS["prefill"][1]
