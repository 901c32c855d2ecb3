"""Prompts in a file, for goldens of a model of one's own (SPEC 15.4)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from conformance.cases.own import Prompt
from reference.errors import RequestError, reason
from reference.tokenizer import Tokenizer

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
"""Names of prompts become names of files."""


def read_prompts(
    path: Path, tokenizer: Tokenizer | None, vocab_size: int, most_tokens: int
) -> tuple[Prompt, ...]:
    """The prompts of a file, in order.

    A file `*.jsonl` has an object a line, with `prompt` (text) or `tokens`, and perhaps `name`; any
    other is text, a prompt a line. Empty lines are skipped. Raises RequestError, naming the line,
    for what is no prompt, repeats a name, or exceeds `most_tokens`.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"--prompts: cannot read {path} as UTF-8 text ({reason(error)})"
        ) from error
    found: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--prompts: {path}, line {number}"
        about = _object(line, where) if path.suffix == ".jsonl" else {"prompt": line}
        name = about.get("name", f"prompt-{number}")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(f"{where}: name must be up to 80 letters, digits, `.`, `_` and `-`")
        if name in found:
            raise RequestError(f"{where}: the name {name} is there already; give another")
        tokens = _tokens(about, tokenizer, vocab_size, where)
        if not 1 <= len(tokens) <= most_tokens:
            raise RequestError(f"{where}: {len(tokens)} tokens; give 1 to {most_tokens}")
        found[name] = Prompt(name, tokens)
    if not found:
        raise RequestError(f"--prompts: {path} holds no prompt; give one a line")
    return tuple(found.values())


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        about = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON ({error})") from error
    if not isinstance(about, dict) or len({"prompt", "tokens"} & about.keys()) != 1:
        raise RequestError(f"{where}: give an object with either `prompt` or `tokens`")
    unknown = sorted(about.keys() - {"prompt", "tokens", "name"})
    if unknown:
        raise RequestError(f"{where}: the key {unknown[0]!r} is not known; remove it")
    return about


def _tokens(
    about: dict[str, Any], tokenizer: Tokenizer | None, vocab_size: int, where: str
) -> tuple[int, ...]:
    if "prompt" not in about:
        tokens = about["tokens"]
        ids = isinstance(tokens, list) and all(
            type(token) is int and 0 <= token < vocab_size for token in tokens
        )
        if not ids:
            raise RequestError(f"{where}: tokens must be a list of ids, 0 to {vocab_size - 1}")
        return tuple(tokens)
    if not isinstance(about["prompt"], str):
        raise RequestError(f"{where}: prompt must be a text")
    if tokenizer is None:
        raise RequestError(f"{where}: the model has no tokenizer; give `tokens` in a .jsonl file")
    return tuple(tokenizer.encode(about["prompt"]))
