"""`generate`: text and times, its forms, options, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from conformance.commands.generate import _rate
from reference.engine import Engine
from tests.conformance.command_line import MODEL, ROOT, Run


def generate(run: Run, *arguments: str) -> tuple[int, str, str]:
    return run("generate", "--model", MODEL, "--prompt", "In the beginning", *arguments)


def test_generate_prints_text_and_then_times(run: Run) -> None:
    code, out, err = generate(run, "-n", "5")
    assert code == 0
    assert out.endswith("\n")
    assert out.strip()
    assert err.count("\n") == 1
    assert "prompt tokens, first token after" in err
    told = json.loads(generate(run, "-n", "5", "--json")[1])
    assert out == told["text"] + "\n"


def test_an_interrupt_stands_on_a_line_of_its_own(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Engine, prompt: str, count: int, **wanted: Any) -> None:
        wanted["on_text"]("And God")
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    assert generate(run) == (2, "And God\n", "bitforbit: interrupted\n")


def test_generate_takes_token_ids(run: Run) -> None:
    """A model without a tokenizer is spoken to, and speaks, in ids."""
    said = json.loads(generate(run, "-n", "5", "--json")[1])
    ids = tokenizers.Tokenizer.from_file(f"{MODEL}/tokenizer.json").encode("In the beginning").ids
    command = ("generate", "--model", MODEL, "-n", "5", "--prompt-ids", ",".join(map(str, ids)))
    code, out, _ = run(*command)
    assert (code, out) == (0, said["text"] + "\n")
    assert json.loads(run(*command, "--json")[1])["tokens"] == said["tokens"]
    bare = ("generate", "--model", "fixtures/random-llama", "-n", "4", "--prompt-ids", "1,2")
    code, out, _ = run(*bare)
    tokens = json.loads(run(*bare, "--json")[1])["tokens"]
    assert (code, list(map(int, out.split()))) == (0, tokens)
    assert "outside the vocabulary" in run.refused(*bare[:-1], "123456789")


def test_generate_says_what_ended_it(run: Run) -> None:
    assert "ended" not in generate(run, "-n", "5")[2]
    assert "ended by a stop text" in generate(run, "-n", "99", "--stop", " ")[2]
    bare = ("generate", "--model", "fixtures/random-llama", "-n", "99999", "--prompt-ids", "1")
    assert "ended where the model's context does" in run(*bare)[2]


def test_generate_json(run: Run) -> None:
    code, out, err = generate(run, "-n", "6", "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    told = json.loads(out)
    assert list(told) == ["text", "tokens", "stop", "prompt_n", "cache_n", "draft", "timings"]
    assert told["draft"]["drafted"] == 0
    assert list(told["timings"]) == [
        *("time_to_first_token", "decode", "prefill_rate", "decode_rate"),
    ]
    assert len(told["tokens"]) == 6
    assert told["stop"] == "length"
    assert told["cache_n"] == 0
    assert told["prompt_n"] > 0


@pytest.mark.parametrize(
    ("rate", "told"),
    [(0.0, "0"), (0.0421, "0.0421"), (7.25, "7.25"), (99.96, "100"), (1234.5, "1234")],
)
def test_a_slow_model_has_a_rate(rate: float, told: str) -> None:
    assert _rate(rate) == f"{told} tokens/s"


def test_generate_says_its_text_and_writes_json_to_a_file(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "said.json"
    code, out, err = generate(run, "-n", "6", "--json", str(target))
    told = json.loads(target.read_text())
    assert (code, out) == (0, told["text"] + "\n")
    assert "prompt tokens, first token after" in err
    alone = json.loads(generate(run, "--json", "-", "-n", "6")[1])
    assert alone["tokens"] == told["tokens"]
    refused = ("--model", MODEL, "--prompt", "a", "--json", "no/such/said.json")
    assert "--json: cannot write no/such/said.json" in run.refused("generate", *refused)


def test_generate_gives_the_same_tokens_from_any_pages_drafts_and_files(
    run: Run, tmp_path: Path
) -> None:
    def told(*arguments: str) -> Any:
        code, out, err = generate(run, "-n", "10", "--json", *arguments)
        assert (code, err) == (0, "")
        return json.loads(out)

    plain = told()
    assert told("--page-size", "2")["tokens"] == plain["tokens"]
    drafted = told("--draft", "tiny-draft", "--draft-tokens", "3")
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["draft"]["drafted"] > 0
    assert told("--draft", "ngram")["tokens"] == plain["tokens"]
    file = tmp_path / "prompt.cache"
    assert told("--prompt-cache", str(file))["cache_n"] == 0
    again = told("--prompt-cache", str(file))
    assert again["tokens"] == plain["tokens"]
    assert (again["prompt_n"], again["cache_n"]) == (1, plain["prompt_n"] - 1)
    assert told("--kv-dtype", "int8")["tokens"]
    kept = file.read_bytes()
    code, _, err = generate(run, "--prompt-cache", str(file), "--kv-dtype", "int8")
    assert code == 2
    assert err.startswith(f"bitforbit: {file}: kv_dtype")
    assert file.read_bytes() == kept


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--page-size", "3"), "page_size"),
        (("--draft-tokens", "0"), "draft_tokens"),
        (("--draft", "random-llama"), "draft model"),
        (("--draft", "nowhere"), "nowhere"),
    ],
)
def test_generate_refuses_what_cannot_be(run: Run, options: tuple[str, ...], named: str) -> None:
    code, out, err = generate(run, *options)
    assert (code, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1


def test_generate_is_repeatable_and_follows_its_options(run: Run) -> None:
    def tokens(*arguments: str) -> Any:
        return json.loads(generate(run, "-n", "8", "--json", *arguments)[1])["tokens"]

    hot = ("--temperature", "1.5", "--seed", "7")
    assert tokens() == tokens()
    assert tokens(*hot) == tokens(*hot)
    assert tokens(*hot) != tokens("--temperature", "1.5", "--seed", "8")
    assert tokens(*hot, "--top-k", "1") == tokens()
    assert len(tokens("--weights", "int4")) == 8
    assert len(tokens("--arithmetic", "float32", "--exact-prefill")) == 8


def test_generate_reads_a_prompt_from_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("In the beginning", encoding="utf-8")
    there = run("generate", "--model", MODEL, "--prompt", f"@{path}", "-n", "4")[1]
    assert there == generate(run, "-n", "4")[1]
    path.write_bytes(b"\xff\xfe\xfd")
    assert "cannot read" in run.refused("generate", "--model", MODEL, "--prompt", f"@{path}")
    assert "cannot read" in run.refused("generate", "--model", MODEL, "--prompt", "@/nowhere")
    assert "cannot read" in run.refused("generate", "--model", MODEL, "--prompt", f"@{tmp_path}")


def test_generate_stops_before_a_stop_text(run: Run) -> None:
    whole = json.loads(generate(run, "-n", "12", "--json")[1])["text"]
    stop = whole[3:6]
    told = json.loads(generate(run, "-n", "12", "--json", "--stop", stop)[1])
    assert told["stop"] == "string"
    assert told["text"] == whole[: whole.index(stop)]
    assert generate(run, "-n", "12", "--stop", stop)[1] == told["text"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-n", "0"), "max_new_tokens: 0 is out of range"),
        (("-n", "-3"), "max_new_tokens"),
        (("--temperature", "-1"), "temperature: -1.0 is out of range"),
        (("--temperature", "nan"), "temperature"),
        (("--temperature", "inf"), "temperature"),
        (("--top-k", "-1"), "top_k"),
        (("--top-p", "0"), "top_p"),
        (("--top-p", "1.5"), "top_p"),
        (("--min-p", "-0.1"), "min_p"),
        (("--repetition-penalty", "0"), "repetition_penalty"),
        (("--prompt", ""), "token"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--model", str(ROOT / "tests")), "config.json"),
    ],
)
def test_generate_refuses_bad_values(run: Run, arguments: tuple[str, ...], part: str) -> None:
    code, out, err = generate(run, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("bitforbit: ")
    assert err.count("\n") == 1
    assert part in err


def test_generate_streams_its_text() -> None:
    """The text comes in several writes, before the end."""
    arguments = ("generate", "--model", MODEL, "--prompt", "In the beginning", "-n", "200")
    child = subprocess.Popen(
        [sys.executable, "-m", "conformance.cli", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    first = os.read(child.stdout.fileno(), 1 << 16)
    pieces = [first]
    while piece := os.read(child.stdout.fileno(), 1 << 16):
        pieces.append(piece)
    errors = child.stderr.read()
    child.stdout.close()
    child.stderr.close()
    assert child.wait() == 0
    assert len(pieces) > 5
    assert b"Traceback" not in errors
    b"".join(pieces).decode()
