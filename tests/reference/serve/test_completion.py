"""`/completion`: the engine's bits, logprobs, timings and why a text ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.engine import Engine
from reference.sampling import Sampling
from reference.serve.logprobs import Scored
from tests.reference.models import tiny
from tests.reference.serve.asking import GREEDY, PROMPT, encode, refusal
from tests.reference.serve.servers import Server, alone, running, words

WARM = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


def listed(entry: dict[str, Any]) -> Scored:
    top = tuple((t["id"], t["logprob"]) for t in entry["top_logprobs"])
    return Scored(entry["id"], entry["logprob"], top)


def test_completion_gives_the_engines_bits(server: Server) -> None:
    result, scored = alone(tiny(), encode(PROMPT), 12, top=3)
    answer = server.ask(
        "/completion", prompt=PROMPT, n_predict=12, n_probs=3, return_tokens=True, **GREEDY
    )
    assert answer["tokens"] == result.tokens
    assert answer["content"] == result.text
    assert [listed(entry) for entry in answer["completion_probabilities"]] == scored


def test_logprobs_are_a_float64_log_softmax_of_the_exact_logits(server: Server) -> None:
    answer = server.ask("/completion", prompt=PROMPT, n_predict=1, n_probs=1024, **GREEDY)
    logits = tiny().forward(encode(PROMPT))[-1].astype(np.float64)
    expected = logits - np.logaddexp.reduce(logits)
    (entry,) = answer["completion_probabilities"]
    given = {top["id"]: top["logprob"] for top in entry["top_logprobs"]}
    np.testing.assert_allclose([given[i] for i in range(1024)], expected, rtol=0, atol=1e-12)
    values = [top["logprob"] for top in entry["top_logprobs"]]
    assert values == sorted(values, reverse=True)
    assert entry["id"] == int(logits.argmax())


def test_a_seed_gives_the_engines_draws(server: Server) -> None:
    result, _ = alone(tiny(), encode(PROMPT), 20, sampling=WARM, seed=7)
    fields: dict[str, Any] = {"prompt": PROMPT, "n_predict": 20, "return_tokens": True}
    assert server.ask("/completion", seed=7, **fields)["tokens"] == result.tokens
    drawn = server.ask("/completion", **fields)
    seed = drawn["generation_settings"]["seed"]
    assert server.ask("/completion", seed=seed, **fields)["tokens"] == drawn["tokens"]
    again = [server.ask("/completion", **fields)["tokens"] for _ in range(4)]
    assert any(tokens != drawn["tokens"] for tokens in again), "each draws a seed of its own"


def test_a_prompt_may_be_token_ids(server: Server) -> None:
    ids = server.ask("/completion", prompt=encode(PROMPT), n_predict=5, **GREEDY)
    text = server.ask("/completion", prompt=PROMPT, n_predict=5, **GREEDY)
    assert ids["content"] == text["content"]
    assert ids["prompt"] == text["prompt"] == PROMPT


def test_timings_tell_what_was_reused(server: Server) -> None:
    prompt = "And the evening and the morning were the first day"
    count = len(encode(prompt))
    fields: dict[str, Any] = {"prompt": prompt, "n_predict": 3, **GREEDY}
    first = server.ask("/completion", **fields)
    again = server.ask("/completion", **fields)
    never = server.ask("/completion", cache_prompt=False, **fields)
    kept = [(a["timings"]["cache_n"], a["timings"]["prompt_n"]) for a in (first, again, never)]
    assert kept == [(0, count), (count - 1, 1), (0, count)]
    assert again["tokens_cached"] == count - 1
    assert again["tokens_evaluated"] == count
    assert first["content"] == again["content"] == never["content"]
    times = again["timings"]
    assert times["prompt_per_second"] == pytest.approx(1000 / times["prompt_ms"])
    assert times["predicted_n"] == 3 == again["tokens_predicted"]
    assert times["predicted_per_second"] == pytest.approx(2000 / times["predicted_ms"])


def test_drafted_tokens_are_told() -> None:
    with running(Engine(tiny(), draft="ngram")) as server:
        answer = server.ask("/completion", prompt=PROMPT + " " + PROMPT, n_predict=24, **GREEDY)
    assert answer["content"] == alone(tiny(), encode(PROMPT + " " + PROMPT), 24)[0].text
    assert 0 <= answer["timings"]["draft_n_accepted"] <= answer["timings"]["draft_n"]


@pytest.mark.parametrize(
    ("more", "stop_type", "word"),
    [
        ({"n_predict": 4}, "limit", ""),
        ({"n_predict": 0}, "limit", ""),
        ({"n_predict": 40, "stop": ["zzz", "be"]}, "word", "be"),
    ],
)
def test_why_a_completion_ended(
    server: Server, more: dict[str, Any], stop_type: str, word: str
) -> None:
    answer = server.ask("/completion", prompt=PROMPT, **more, **GREEDY)
    assert (answer["stop_type"], answer["stopping_word"]) == (stop_type, word)
    assert not answer["truncated"]
    whole = alone(tiny(), encode(PROMPT), 40)[0].text
    assert whole.startswith(answer["content"])
    if word:
        assert answer["content"] == whole[: whole.index("be")]
    else:
        assert answer["tokens_predicted"] == more["n_predict"]
        assert bool(answer["content"]) == bool(more["n_predict"])


def test_a_stop_token_and_the_end_of_the_context() -> None:
    model = words()
    with running(Engine(model)) as server:
        for seed in range(8):
            result, _ = alone(
                model, [5, 9], 400, sampling=Sampling(temperature=1), seed=seed, stop_tokens=[2]
            )
            fields: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
            answer = server.ask(
                "/completion", prompt=[5, 9], seed=seed, return_tokens=True, **fields
            )
            assert answer["tokens"] == result.tokens
            assert answer["stop_type"] == {"token": "eos", "context": "limit"}[result.stop]
            assert answer["truncated"] == (result.stop == "context")
        ignoring = server.ask(
            "/completion", prompt=[5, 9], ignore_eos=True, return_tokens=True, **GREEDY
        )
        assert len(ignoring["tokens"]) == model.config.max_positions - 1
        assert ignoring["truncated"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_minus_one_alone_is_a_seed_at_random(path: str) -> None:
    count = "n_predict" if path == "/completion" else "max_tokens"
    with running(Engine(words())) as server:

        def ask(seed: int) -> str:
            of = {"prompt": "w1", "seed": seed, "ignore_eos": True, count: 24}
            answer = server.ask(path, **of)
            text: str = answer["content"] if path == "/completion" else answer["choices"][0]["text"]
            return text

        assert ask(-5) == ask(-5) == ask(2**64 - 5)
        assert len({ask(-1) for _ in range(3)}) > 1


def test_no_word_stops_what_chooses_nothing(server: Server) -> None:
    of = {"prompt": [1, 2, 3], "temperature": 0}
    word = server.ask("/completion", n_predict=1, **of)["content"].split()[0]
    for count, stopping in ((0, ""), (1, word)):
        answer = server.ask("/completion", n_predict=count, stop=[word], **of)
        assert answer["stopping_word"] == stopping


@pytest.mark.parametrize("count", [-1, 2000])
def test_likeliest_tokens_are_bounded_for_the_whole_answer(server: Server, count: int) -> None:
    """As many as OpenAI's endpoints give go with any length; more, with few tokens only."""
    many: dict[str, Any] = {"prompt": PROMPT, "n_probs": 1024, "n_predict": count, **GREEDY}
    error = refusal(server.post("/completion", **many))
    assert error["param"] == "n_probs"
    assert "1024 likeliest tokens with each of up to" in error["message"]
    few = many | {"n_probs": 20, "stop": [" "]}
    assert server.ask("/completion", **few)["stop_type"] == "word"
