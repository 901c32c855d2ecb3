"""Serving in steps: turns, drafts, requests side by side, and files (SPEC 11.3, 11.4, 13.5, 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from conformance.backends.composed import ComposedSession
from conformance.backends.paging import split
from conformance.backends.reference import Ints
from reference.arithmetic import F32
from reference.cache import PAGE_SIZE
from reference.cache.sequence import first_seen
from reference.sampling import Sampling
from reference.speculation import NgramDraft

State = tuple[int, list[list[F32]], list[list[F32]]]
"""Length, and keys and values of each layer."""


@dataclass
class Kept:
    """A sequence that is kept, the tokens that filled it, and whether no step of it was fast."""

    tokens: Ints
    state: State
    exact: bool = True


@dataclass(eq=False)
class Run:
    """A request that runs beside others: its tokens so far, its cache, and what it gave."""

    prompt: Ints
    tokens: list[int]
    state: State
    rows: list[F32] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self.state[0]

    @property
    def decodes(self) -> bool:
        """Whether its prompt is computed."""
        return bool(self.chosen)


@dataclass
class Part:
    """A run's tokens in a pass, and those of them that were drafted."""

    run: Run
    tokens: list[int]
    drafted: list[int] = field(default_factory=list)


class ServingSession(ComposedSession):
    """A composed session that also serves; every step changes nothing but speed."""

    # ------------------------------------------------------------------ the cache as a value

    def state(self) -> State:
        """What is in the cache."""
        return self.length, [list(k) for k in self.keys], [list(v) for v in self.values]

    def enter(self, state: State) -> None:
        """Go on from a state."""
        self.length = state[0]
        self.keys, self.values = ([list(x) for x in part] for part in state[1:])

    def cut(self, length: int) -> None:
        """Forget every position from `length` on."""
        self.length = length
        for store in (self.keys, self.values):
            store[:] = [[np.concatenate(parts)[:length]] if parts else [] for parts in store]

    # ------------------------------------------------------------------ prefixes (SPEC 11.3)

    def turns(
        self, tokens: Ints, lengths: Ints, max_new_tokens: int
    ) -> tuple[Ints, F32, Ints, Ints]:
        """SPEC 17."""
        self.kept: list[Kept] = []
        answers = [self.turn(prompt, max_new_tokens) for prompt in split(tokens, lengths)]
        chosen, rows, reused = (np.array(part) for part in zip(*answers, strict=True))
        return chosen, rows, reused, lengths - reused

    def turn(self, prompt: Ints, max_new_tokens: int) -> tuple[Ints, F32, int]:
        """One prompt after others: tokens, the logits that chose them, and what was reused."""
        reused = self.reuse(prompt)
        attention = self.prefill(len(prompt) - reused, False)
        self.exact &= attention == "exact"
        rows = [self.forward(self.uncomputed(prompt, reused), attention)[-1]]
        tokens = [self.choose(rows[0])]
        while len(tokens) < max_new_tokens:
            rows.append(self.forward(tokens[-1:])[-1])
            tokens.append(self.choose(rows[-1]))
        self.retain(prompt, tokens)
        return np.array(tokens), np.stack(rows), reused

    def reuse(self, prompt: Ints) -> int:
        """Go on from the longest prefix that is kept; its length."""
        self.reset()
        self.exact = True
        length, best = self.longest(prompt, self.exact_ones())
        if self.prefill(len(prompt) - length, False) == "fast":
            length, best = self.longest(prompt, self.kept)
        if length > 0:
            self.enter(best.state)
            self.cut(length)
            self.exact = best.exact
        return length

    def exact_ones(self) -> list[Kept]:
        """The kept sequences that a prompt may start from which is computed exactly (SPEC 8.4)."""
        return [kept for kept in self.kept if kept.exact]

    def longest(self, prompt: Ints, among: Sequence[Kept]) -> tuple[int, Kept]:
        """The longest usable prefix of a prompt, and of equal ones the latest sequence."""
        found = [(self.usable(kept, self.common(kept.tokens, prompt)), kept) for kept in among]
        nothing = (0, Kept(np.zeros(0, np.int64), self.state()))
        return max(reversed(found), key=lambda pair: pair[0], default=nothing)

    def usable(self, kept: Kept, shared: int) -> int:
        """All of a common prefix, or nothing where its end sees what is no longer held."""
        windows = set(self.config.windows)
        held = all(self.dropped(kept.state[0], w) <= first_seen(shared, w) for w in windows)
        return shared if held else 0

    def dropped(self, length: int, window: int | None) -> int:
        """How many positions a layer of a kept sequence has dropped, whole pages (SPEC 11.1)."""
        return first_seen(length, window) // PAGE_SIZE * PAGE_SIZE

    def common(self, kept: Ints, prompt: Ints) -> int:
        """How much of a prompt a kept sequence holds, its last token left out."""
        shared = min(len(kept), len(prompt) - 1)
        differs = np.flatnonzero(kept[:shared] != prompt[:shared])
        return int(differs[0]) if len(differs) else shared

    def uncomputed(self, prompt: Ints, reused: int) -> Ints:
        """The tokens of a prompt that are still to be computed."""
        return prompt[reused:]

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Keep the sequence for the prompts to come; its last token was not computed."""
        filled = np.append(prompt, tokens)[:-1].astype(np.int64)
        self.kept.append(Kept(filled, self.state(), self.exact))

    # ------------------------------------------------------------------ files (SPEC 11.4)

    def resume(
        self, prompt: Ints, longer: Ints, max_new_tokens: int, path: str
    ) -> tuple[Ints, F32, Ints]:
        """SPEC 17."""
        self.kept = []
        self.turn(prompt, 1)
        self.save(Path(path), self.kept[-1])
        self.kept = [self.restored(Path(path))]
        tokens, rows, reused = self.turn(longer, max_new_tokens)
        return tokens, rows, np.array([reused])

    def save(self, path: Path, kept: Kept) -> None:
        """Write a sequence."""
        length, keys, values = kept.state
        with path.open("wb") as file:
            np.savez(
                file,
                tokens=kept.tokens,
                length=np.array(length),
                keys=np.stack([np.concatenate(k) for k in keys]),
                values=np.stack([np.concatenate(v) for v in values]),
            )

    def restored(self, path: Path) -> Kept:
        """Read a sequence."""
        with np.load(path) as file:
            keys, values = ([[x] for x in file[name]] for name in ("keys", "values"))
            return Kept(file["tokens"], (int(file["length"]), keys, values))

    # ------------------------------------------------------------------ drafts (SPEC 13.5)

    def speculate(
        self, prompt: Ints, max_new_tokens: int, draft_tokens: int
    ) -> tuple[Ints, F32, Ints]:
        """SPEC 17."""
        self.reset()
        run = Run(prompt, prompt.tolist(), self.state())
        self.take(run, self.forward(prompt)[-1:], [], max_new_tokens)
        accepted = []
        while len(run.chosen) < max_new_tokens:
            drafted = self.drafted(run, max_new_tokens, draft_tokens)
            logits = self.forward([run.tokens[-1], *drafted])
            taken = self.take(run, logits, drafted, max_new_tokens)
            self.rewind(len(drafted), taken)
            accepted.append(taken)
        return np.array(run.chosen), np.array(run.rows), np.array(accepted, np.int64)

    def drafted(self, run: Run, max_new_tokens: int, draft_tokens: int) -> list[int]:
        """What may follow, by n-gram lookup."""
        room = self.config.max_positions - len(run.tokens)
        wanted = min(draft_tokens, max_new_tokens - len(run.chosen), room)
        return list(self.lookup().propose(np.array(run.tokens), wanted, Sampling()).tokens)

    def lookup(self) -> NgramDraft:
        """Which sizes of n-grams are looked up (SPEC 13.3)."""
        return NgramDraft()

    def take(self, run: Run, logits: F32, drafted: Sequence[int], max_new_tokens: int) -> int:
        """Append what the rows of a pass give; how many drafted tokens were accepted."""
        taken = self.agreed(logits, drafted)
        tokens = self.given(logits, drafted, taken)
        for token, row in list(zip(tokens, logits, strict=False))[
            : max_new_tokens - len(run.chosen)
        ]:
            run.tokens.append(token)
            run.chosen.append(token)
            run.rows.append(row)
        return taken

    def agreed(self, logits: F32, drafted: Sequence[int]) -> int:
        """How many drafted tokens are the target's own choice, before one is not."""
        same = [self.choose(row) == token for row, token in zip(logits, drafted, strict=False)]
        return same.index(False) if False in same else len(same)

    def given(self, logits: F32, drafted: Sequence[int], taken: int) -> list[int]:
        """The accepted tokens, and the target's own after them."""
        return [*drafted[:taken], self.choose(logits[taken])]

    def rewind(self, drafted: int, taken: int) -> None:
        """Forget the rejected tokens."""
        self.cut(self.length - (drafted - taken))

    # ------------------------------------------------------------------ many requests (SPEC 14.2)

    def serve(
        self,
        tokens: Ints,
        lengths: Ints,
        max_new_tokens: int,
        page_size: int,
        max_batched_tokens: int,
        draft_tokens: int,
    ) -> tuple[Ints, F32]:
        """SPEC 17."""
        self.reset()
        runs = [Run(p, p.tolist(), self.state()) for p in split(tokens, lengths)]
        while active := [run for run in runs if len(run.chosen) < max_new_tokens]:
            parts = self.plan(active, max_batched_tokens, draft_tokens, max_new_tokens)
            computed = self.handed([self.computed(part, parts) for part in parts])
            for part, logits in zip(parts, computed, strict=True):
                self.finish(part, logits, max_new_tokens)
        return np.array([run.chosen for run in runs]), np.array([run.rows for run in runs])

    def plan(
        self, runs: Sequence[Run], budget: int, draft_tokens: int, max_new_tokens: int
    ) -> list[Part]:
        """The next pass: what decodes first, then chunks of prompts."""
        parts = []
        for run in [r for r in runs if r.decodes] + [r for r in runs if not r.decodes]:
            drafted = self.drafted(run, max_new_tokens, draft_tokens) if run.decodes else []
            wanted = [run.tokens[-1], *drafted] if run.decodes else self.chunk(run, budget)
            if wanted and len(wanted) <= budget:
                parts.append(Part(run, wanted, drafted))
                budget -= len(wanted)
        return parts

    def chunk(self, run: Run, budget: int) -> list[int]:
        """The next tokens of a prompt."""
        return run.tokens[run.length : run.length + budget]

    def computed(self, part: Part, parts: Sequence[Part]) -> F32:
        """Logits of a part's tokens, (T, V); they are then in its run's cache."""
        self.part, self.parts = part, parts
        self.enter(part.run.state)
        logits = self.forward(part.tokens)
        part.run.state = self.state()
        return logits

    def handed(self, computed: list[F32]) -> list[F32]:
        """Each part's logits."""
        return computed

    def finish(self, part: Part, logits: F32, max_new_tokens: int) -> None:
        """Choose a run's next tokens, if all that it has is computed."""
        run = part.run
        if not self.prompt_done(run):
            return
        taken = self.take(run, self.last_rows(part, logits), part.drafted, max_new_tokens)
        self.enter(run.state)
        self.rewind_of(part, len(part.drafted), taken)
        run.state = self.state()

    def prompt_done(self, run: Run) -> bool:
        """Whether the prompt is computed to its end."""
        return run.length >= len(run.tokens)

    def last_rows(self, part: Part, logits: F32) -> F32:
        """The rows that tokens are chosen by."""
        return logits[-1 - len(part.drafted) :]

    def rewind_of(self, part: Part, drafted: int, taken: int) -> None:
        """Forget a run's rejected tokens."""
        self.rewind(drafted, taken)
