"""Logarithms of the probabilities of tokens, in the formats of both protocols.

A logprob is the logarithm of the softmax of the model's own logits, before penalties, temperature
and the rest: `l - m - log(sum(exp(l - m)))`, m the largest, all in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.tokenizer import TextStream, Tokenizer

UNLIKELY = -9999.0
"""The logprob that stands for minus infinity, which JSON does not have; OpenAI's figure."""


class Scored(NamedTuple):
    """A token, its logprob, and the likeliest tokens with theirs, likeliest first.

    logprob: None if none was asked for, or the token is the first of all.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def log_softmax(logits: F32) -> NDArray[np.float64]:
    """Logprobs of logits (V,), in float64."""
    z: NDArray[np.float64] = logits.astype(np.float64) - float(logits.max())
    return z - float(np.log(np.exp(z).sum()))


def score(token: int, logits: F32, top: int) -> Scored:
    """A token's logprob by logits (V,), and the `top` likeliest, of equal ones the lower id."""
    logprobs = np.maximum(log_softmax(logits), UNLIKELY)
    ranked = np.argsort(-logits, kind="stable")[:top]
    likeliest = tuple((int(id_), float(logprobs[id_])) for id_ in ranked)
    return Scored(token, float(logprobs[token]), likeliest)


def token_json(tokenizer: Tokenizer, scored: Scored) -> dict[str, Any]:
    """A token in the format of chat logprobs, and of llama-server's, which adds the id."""
    entries = [
        {
            "id": token,
            "token": tokenizer.shown(token),
            "bytes": list(tokenizer.bytes_of(token)),
            "logprob": logprob,
        }
        for token, logprob in ((scored.token, scored.logprob), *scored.top)
    ]
    return {**entries[0], "top_logprobs": entries[1:]}


class LegacyLogprobs:
    """Logprobs as `/v1/completions` gives them: four lists, and where each token begins.

    Offsets count characters from the start of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int) -> None:
        self._tokenizer, self._offset = tokenizer, offset
        self._text = TextStream(tokenizer)

    def take(self, tokens: list[Scored]) -> dict[str, Any]:
        """The lists of the next tokens. A token's `top_logprobs` always has the token itself."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, logprob, top in tokens:
            piece, text = self._text.feed(token), self._tokenizer.shown(token)
            # Some tokens lose their space where a text begins, and so would others in their place.
            lost = text.removesuffix(piece) if piece and text.endswith(piece) else ""
            text, likeliest = text.removeprefix(lost), dict[str, float]()
            for id_, value in top:
                likeliest.setdefault(self._tokenizer.shown(id_).removeprefix(lost), value)
            if logprob is not None:
                likeliest.setdefault(text, logprob)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(logprob)
            lists["top_logprobs"].append(None if logprob is None else likeliest)
            lists["text_offset"].append(self._offset)
            self._offset += len(piece)
        return lists
