"""Sessions: feeding a model, and requests on it, alone, in turns, ahead and from a file (SPEC 17).

A request is greedy here. Each is computed by itself; `serve` gives the same whatever the pages and
the passes of an engine would be (14.2), so it takes its requests one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from conformance.backends.torch.attention import Cache
from conformance.backends.torch.kernels import Note
from conformance.backends.torch.model import Model
from conformance.backends.torch.pages import reusable, split
from conformance.backends.torch.speculation import accepted, propose

FAST_FLOOR = 512
PAGE = 16
Array = NDArray[Any]


@dataclass
class Text:
    """Tokens that were fed, and what each layer holds of them; `exact` where no step was fast."""

    model: Model
    tokens: list[int] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    exact: bool = True

    def feed(self, tokens: Sequence[int], mode: str, last: int, note: Note | None = None) -> Tensor:
        """Compute the next tokens; logits (last, V) of the last of them (10.2)."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.model.device)
        hidden = self.model.hidden(ids, self.caches, mode, note)
        self.tokens += tokens
        self.exact &= mode == "exact"
        return self.model.head(hidden[len(tokens) - last :])

    def first(self, count: int) -> Text:
        """The text of the first `count` tokens; this one stays as it is."""
        caches = [cache.first(count) for cache in self.caches] if count else []
        return Text(self.model, self.tokens[:count], caches, self.exact)

    def serves(self, prompt: Sequence[int]) -> int:
        """How long a prefix of a prompt this text serves, when it is kept (11.3).

        Kept, it holds of a layer with a window the whole pages that the window reaches (11.1).
        """
        count = reusable(self.tokens, prompt)
        for window in {w for w in self.model.config.windows if w is not None}:
            held = max(0, len(self.tokens) - window + 1) // PAGE * PAGE
            if max(0, count - window + 1) < held:
                return 0
        return count

    def save(self, path: Path) -> None:
        """Write it to a file: tokens, and keys and values of each layer (11.4)."""
        tensors = {"tokens": torch.tensor(self.tokens, dtype=torch.int64)}
        for i, cache in enumerate(self.caches):
            for name, x in (("k", cache.k), ("v", cache.v)):
                rows = torch.where(cache.finite[..., None], x, torch.nan)
                tensors[f"{name}.{i}"] = rows.transpose(0, 1).cpu().contiguous()
        save_file(tensors, path, {"digest": self.model.digest, "exact": str(self.exact)})

    @staticmethod
    def load(path: Path, model: Model) -> Text:
        """Read what `save` wrote. Raises ValueError where it is another model's (11.4)."""
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name).to(model.device) for name in names}
        if about.get("digest") != model.digest:
            raise ValueError(f"{path} was not written by this model")
        layers = range(len(model.layers))
        caches = [Cache(tensors[f"k.{i}"], tensors[f"v.{i}"]) for i in layers]
        return Text(model, tensors["tokens"].tolist(), caches, about["exact"] == "True")


def greedy(logits: Tensor) -> list[int]:
    """The largest of each row of logits (n, V), of equal ones the lowest id (13.1)."""
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


@dataclass
class Answer:
    """Tokens, the logits (V,) that chose each, and what each pass after the prompt's accepted."""

    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def take(self, tokens: Sequence[int], logits: Tensor, most: int) -> None:
        """Take the tokens of a pass, as long as there are not `most` (13.5)."""
        taken = tokens[: most - len(self.tokens)]
        self.tokens += taken
        self.rows += logits[: len(taken)].cpu()


class Session:
    """A model, and the sequence fed to it (17). Arrays are numpy."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.reset()

    def reset(self) -> None:
        """Forget what was fed."""
        self.text = Text(self.model)

    def forward(self, tokens: Array, attention: str = "exact") -> Array:
        """Logits (T, V) of tokens (T,) int64, continuing the sequence."""
        ids = np.asarray(tokens).tolist()
        return self._array(self.text.feed(ids, attention, len(ids)))

    def trace(self, tokens: Array, attention: str = "exact") -> dict[str, Array]:
        """Every step of `forward`, continuing the sequence (19.2)."""
        ids, steps = np.asarray(tokens).tolist(), dict[str, Tensor]()
        steps["logits"] = self.text.feed(ids, attention, len(ids), steps.__setitem__)
        return {name: self._array(x) for name, x in steps.items()}

    def generate(
        self, prompt: Array, max_new_tokens: int, exact_prefill: bool
    ) -> tuple[Array, Array]:
        """Greedy tokens (m,) and the logits (m, V) that they were chosen from (8.4, 14.1)."""
        self.reset()
        answer = self._continue(prompt.tolist(), max_new_tokens, exact_prefill=exact_prefill)
        return self._tokens(answer), self._logits(answer)

    def complete(self, prompt: Array, max_new_tokens: int) -> tuple[Array, Array]:
        """The same, up to an end token of the model's, which is the last (14.1)."""
        self.reset()
        answer = self._continue(prompt.tolist(), max_new_tokens, ends=self.model.ends)
        return self._tokens(answer), self._logits(answer)

    def turns(
        self, tokens: Array, lengths: Array, max_new_tokens: int
    ) -> tuple[Array, Array, Array, Array]:
        """Prompts one after the other, each from the longest prefix of those before (11.3)."""
        kept: list[Text] = []
        answers, reused = [], []
        for prompt in split(tokens.tolist(), lengths.tolist()):
            reused.append(self._start(kept, prompt))
            answers.append(self._continue(list(prompt), max_new_tokens))
            kept.append(self.text)
        cache_n = np.array(reused, dtype=np.int64)
        return *self._stacked(answers), cache_n, lengths - cache_n

    def speculate(
        self, prompt: Array, max_new_tokens: int, draft_tokens: int
    ) -> tuple[Array, Array, Array]:
        """Greedy with drafts by n-gram lookup, checked in one pass each (13.3 to 13.5)."""
        self.reset()
        answer = self._continue(prompt.tolist(), max_new_tokens, draft_tokens)
        accepted = np.array(answer.accepted, dtype=np.int64)
        return self._tokens(answer), self._logits(answer), accepted

    def serve(
        self,
        tokens: Array,
        lengths: Array,
        max_new_tokens: int,
        page_size: int,
        max_batched_tokens: int,
        draft_tokens: int,
    ) -> tuple[Array, Array]:
        """Requests that come at once, computed one after the other (14.2)."""
        answers = []
        for prompt in split(tokens.tolist(), lengths.tolist()):
            self.reset()
            answers.append(self._continue(list(prompt), max_new_tokens, draft_tokens))
        return self._stacked(answers)

    def resume(
        self, prompt: Array, longer: Array, max_new_tokens: int, path: str
    ) -> tuple[Array, Array, Array]:
        """Compute and save `prompt`; go on with `longer` from the file alone (11.4)."""
        self.reset()
        self.text.feed(prompt.tolist(), _prefill(len(prompt)), 1)
        self.text.save(Path(path))
        saved, ids = Text.load(Path(path), self.model), longer.tolist()
        reused = self._start([saved], ids)
        answer = self._continue(ids, max_new_tokens)
        return self._tokens(answer), self._logits(answer), np.array([reused], dtype=np.int64)

    def _start(self, kept: Sequence[Text], prompt: Sequence[int]) -> int:
        """Let `self.text` be the longest prefix of a prompt that a kept text serves; its length.

        What fast attention computed serves where the prompt would be fast without it (11.3).
        """
        reused = 0
        for among in ([text for text in kept if text.exact], kept):
            self.text = Text(self.model)
            found = max(reversed(among), key=lambda text: text.serves(prompt), default=self.text)
            reused = found.serves(prompt)
            self.text = found.first(reused) if reused else self.text
            if _prefill(len(prompt) - reused) == "exact":
                break
        return reused

    def _continue(
        self,
        prompt: list[int],
        count: int,
        draft_tokens: int = 0,
        exact_prefill: bool = False,
        ends: Collection[int] = (),
    ) -> Answer:
        """Compute what `self.text` lacks of a prompt, and then up to `count` tokens (14.1).

        ends: the tokens of which any is the last.
        """
        text, answer, context = self.text, Answer(), self.model.config.positions
        if not 0 < len(prompt) <= context:
            raise ValueError(f"a prompt of {len(prompt)} tokens, where the context has {context}")
        if count == 0:
            return answer
        rest = prompt[len(text.tokens) :]
        logits = text.feed(rest, _prefill(len(rest), exact_prefill), 1)
        answer.take(greedy(logits), logits, count)
        while len(answer.tokens) < count and answer.tokens[-1] not in ends:
            known = prompt + answer.tokens
            if len(known) > context:
                break
            asked = min(draft_tokens, count - len(answer.tokens), context - len(known))
            drafted = propose(known, asked)
            logits = text.feed([known[-1], *drafted], "exact", 1 + len(drafted))
            chosen = greedy(logits)
            answer.accepted.append(accepted(drafted, chosen))
            text = text.first(len(known) + answer.accepted[-1])
            answer.take(chosen[: answer.accepted[-1] + 1], logits, count)
        self.text = text
        return answer

    def _array(self, x: Tensor) -> Array:
        array: Array = x.cpu().numpy()
        return array

    def _tokens(self, answer: Answer) -> Array:
        return np.array(answer.tokens, dtype=np.int64)

    def _logits(self, answer: Answer) -> Array:
        if not answer.rows:
            return np.zeros((0, self.model.config.vocab), np.float32)
        return self._array(torch.stack(answer.rows))

    def _stacked(self, answers: Sequence[Answer]) -> tuple[Array, Array]:
        tokens, logits = (
            [part(answer) for answer in answers] for part in (self._tokens, self._logits)
        )
        return np.stack(tokens), np.stack(logits)


def _prefill(computed: int, exact: bool = False) -> str:
    """Which attention a prompt gets of which so many tokens must be computed (8.4)."""
    return "exact" if exact or computed < FAST_FLOOR else "fast"
