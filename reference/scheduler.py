"""What the next pass computes: chunked prefill and continuous batching (SPEC 14.2).

A pass has a budget of tokens. Sequences that decode come first, with their drafts; the rest of the
budget goes to prompts, in order of arrival. None of it changes a bit of an exact request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from reference.cache import KVCache, PagePool
from reference.cache.prefix import PrefixIndex, Retained, common
from reference.cache.shift import Chunk, matched_chunks, move
from reference.errors import RequestError
from reference.model import AttentionKind
from reference.rotary import RopeParameters
from reference.speculation import Proposal

FAST_FLOOR = 512
"""A request's prefill is fast if it computes at least so many prompt tokens (SPEC 8.4)."""


def prefill_attention(prompt_n: int, exact_prefill: bool) -> AttentionKind:
    """The attention of a request's prefill, given how many tokens it must compute (SPEC 8.4)."""
    return "exact" if exact_prefill or prompt_n < FAST_FLOOR else "fast"


@dataclass(eq=False)
class Task:
    """A request as the scheduler sees it.

    number: in order of arrival. tokens: prompt and output so far. salt, reuse: whose cached
    prefixes it uses, and whether it does (SPEC 11.3). scored: whether the logits of the whole
    prompt are wanted. cache: None while it waits; while it decodes, it holds all tokens but the
    last. chunks: parts of the prompt that will be moved from `source` (SPEC 11.5). propose: drafts
    what may follow all tokens. proposal: what it drafted. waited: whether the last pass had no room
    for that. attention, prompt_n: decided when it is first admitted.
    """

    number: int
    tokens: list[int]
    prompt_tokens: int
    salt: str = ""
    reuse: bool = True
    exact_prefill: bool = False
    scored: bool = False
    cache: KVCache | None = None
    source: KVCache | None = None
    chunks: list[Chunk] = field(default_factory=list)
    propose: Callable[[], Proposal] = Proposal
    proposal: Proposal | None = None
    waited: bool = False
    attention: AttentionKind = "exact"
    prompt_n: int | None = None

    @property
    def pending(self) -> int:
        """Tokens that are not yet in the cache; 1 in a request that decodes."""
        return len(self.tokens) - (0 if self.cache is None else self.cache.length)

    @property
    def decodes(self) -> bool:
        """Whether everything has been computed but the token chosen last."""
        return len(self.tokens) > self.prompt_tokens and self.pending == 1

    def release(self) -> None:
        """Give up all pages."""
        for cache in (self.cache, self.source):
            if cache is not None:
                cache.free()
        self.cache = self.source = None
        self.chunks = []


@dataclass(frozen=True)
class Share:
    """A task's share of a pass: its next tokens, which go to `cache`.

    last: how many of the last tokens have logits that choose a token; 0 while the prompt is not
    complete. proposal: the draft, if the tokens after the first are one.
    """

    task: Task
    cache: KVCache
    tokens: list[int]
    attention: AttentionKind
    last: int
    kind: Literal["prefill", "decode"]
    proposal: Proposal = field(default_factory=Proposal)

    @property
    def rows(self) -> int:
        """How many of the last tokens need logits."""
        return len(self.tokens) if self.task.scored else self.last


class Scheduler:
    """Tasks that wait and tasks that run, both in order of arrival (SPEC 14.2).

    max_batched_tokens: the budget of a pass. cache_reuse: the least length of a chunk that is
    moved, 0 to move none (SPEC 11.5). fits: whether there is memory for a pass of so many tokens
    and logits (SPEC 12.3).
    """

    def __init__(
        self,
        pool: PagePool,
        prefixes: PrefixIndex,
        rope: RopeParameters,
        max_batched_tokens: int,
        cache_reuse: int = 0,
        fits: Callable[[int, int], bool] = lambda tokens, logits: True,
    ) -> None:
        self.pool, self.prefixes, self._rope, self._fits = pool, prefixes, rope, fits
        self.max_batched_tokens, self.cache_reuse = max_batched_tokens, cache_reuse
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []

    def most_bytes(self, positions: int) -> int:
        """Bytes that a sequence of so many positions holds at most, its windows trimmed."""
        size = self.pool.shape.page_size
        counts = []
        for group in self.pool.groups:
            held = positions
            if group.window is not None:
                held = min(positions, group.window + self.max_batched_tokens + size)
            counts.append(-(-held // size) + 1)  # one more, to be copied
        return self.pool.bytes_for(counts)

    def add(self, task: Task) -> None:
        """Queue a task."""
        self.waiting.append(task)

    def check(self, positions: int, drafts: int | None = None) -> None:
        """Raise RequestError where a sequence of so many positions exceeds the whole pool.

        drafts: bytes of the cache that are a draft model's, and not of the pool (SPEC 13.3).
        """
        needed, budget = self.most_bytes(positions), self.pool.budget
        if budget is None or needed <= budget:
            return
        there, without = f"the whole cache has {budget}", ""
        if drafts is not None:
            there = f"{budget} of the cache's {budget + drafts} are not the draft model's"
            without = "draft without a model, "
        raise RequestError(
            f"cache: {positions} positions take {needed} bytes of pages, and {there}; "
            f"raise cache_bytes, {without}or ask for fewer tokens"
        )

    def remove(self, task: Task) -> None:
        """Forget a task and give up its pages."""
        if task in self.running:
            self.running.remove(task)
        if task in self.waiting:
            self.waiting.remove(task)
        task.release()

    def plan(self) -> list[Share]:
        """The shares of the next pass, for whose pages there is room; empty if there is no task."""
        shares, count = list[Share](), len(self.running)
        for task in sorted(self.running, key=lambda task: (not task.decodes, not task.waited)):
            self._give(task, shares)
        # Once a task had to wait again, nobody is admitted in its stead.
        while len(self.running) == count and self.waiting:
            task = self.waiting[0]
            if self._left(task, shares) == 0 or not self._admit(task, shares):
                break
            self.waiting.popleft()
            self.running.append(task)
            self.running.sort(key=lambda task: task.number)
            count += 1
            self._give(task, shares)
        return shares

    def _left(self, task: Task, shares: Sequence[Share]) -> int:
        """How many tokens of a task the pass still has room for."""
        tokens, logits = sum(len(s.tokens) for s in shares), sum(s.rows for s in shares)
        every = task.scored or task.decodes
        return bisect_left(
            range(1, self.max_batched_tokens - tokens + 1),
            True,
            key=lambda n: not self._fits(tokens + n, logits + (n if every else 1)),
        )

    def _bytes(self, shares: Sequence[Share]) -> int:
        """Bytes that the shares will take from the pool."""
        return sum(self.pool.bytes_for(share.cache.needed(len(share.tokens))) for share in shares)

    def _give(self, task: Task, shares: list[Share]) -> None:
        """Give a task its share of the budget; if pages run out, the last to come wait again."""
        left, task.waited = self._left(task, shares), task.decodes
        while left > 0 and task.cache is not None:
            if self._moved(task, task.cache, shares):
                share = _share(task, task.cache, left)
                if len(share.tokens) > left:
                    return
                if self.pool.make_room(self._bytes([*shares, share])):
                    shares.append(share)
                    task.waited = False
                    return
            self._preempt(shares)

    def _preempt(self, shares: list[Share]) -> None:
        """Make the running task that arrived last wait again; it will recompute all its tokens."""
        task = self.running.pop()
        shares[:] = [share for share in shares if share.task is not task]
        task.release()
        self.waiting.appendleft(task)

    def _admit(self, task: Task, shares: Sequence[Share]) -> bool:
        """Give a waiting task a cache, if there is room for all its tokens beside this pass."""
        cache, source = KVCache(self.pool), None
        if task.reuse:
            cache, source = self._reused(task)
        needed = max(0, self.most_bytes(len(task.tokens)) - cache.bytes)
        if not self.pool.make_room(self._bytes(shares) + needed):
            cache.free()
            return False
        task.cache = cache
        if task.prompt_n is None:
            self._decide(task, cache, source)
        return True

    def _reused(self, task: Task) -> tuple[KVCache, Retained | None]:
        """The longest known prefix; one that is not exact only for a task that need not be."""
        cache, source = self.prefixes.match(task.tokens, task.salt)
        attention = task.attention
        if task.prompt_n is None:
            computed = task.prompt_tokens - cache.length
            attention = prefill_attention(computed, task.exact_prefill)
        if attention == "fast":
            cache.free()
            cache, source = self.prefixes.match(task.tokens, task.salt, exact=False)
        return cache, source

    def _decide(self, task: Task, cache: KVCache, source: Retained | None) -> None:
        """Decide, once for each request, which chunks are moved, and how the rest is computed."""
        source = source or self.prefixes.latest(task.salt)
        if self.cache_reuse > 0 and task.reuse and not task.exact_prefill and source is not None:
            start = common(source.tokens, np.array(task.tokens))
            # A window, or the room just made for this task, may have cost the source its pages.
            task.chunks = [
                chunk
                for chunk in matched_chunks(source.tokens, task.tokens, start, self.cache_reuse)
                if source.cache.holds(chunk.old_start, chunk.old_start + chunk.length)
            ]
            task.source = source.cache.fork()
        moved = sum(chunk.length for chunk in task.chunks)
        task.prompt_n = task.prompt_tokens - cache.length - moved
        task.attention = prefill_attention(task.prompt_n, task.exact_prefill)

    def _moved(self, task: Task, cache: KVCache, shares: Sequence[Share]) -> bool:
        """Move the chunks whose turn has come; False where there is no room for one."""
        while task.chunks and task.chunks[0].new_start == cache.length:
            chunk = task.chunks[0]
            needed = self.pool.bytes_for(cache.needed(chunk.length))
            if not self.pool.make_room(self._bytes(shares) + needed):
                return False
            assert task.source is not None
            stop = chunk.old_start + chunk.length
            move(task.source, chunk.old_start, stop, cache, self._rope)
            task.chunks.pop(0)
        if not task.chunks and task.source is not None:
            task.source.free()
            task.source = None
        return True


def _share(task: Task, cache: KVCache, left: int) -> Share:
    """A task's next tokens: at most `left` of a prompt, or the last token and its whole draft.

    A draft is not cut: sampled tokens depend on its length, which must not depend on other requests
    (SPEC 13.5).
    """
    start, end = cache.length, len(task.tokens)
    if task.decodes:
        if task.proposal is None:
            task.proposal = task.propose()
        tokens = [task.tokens[-1], *task.proposal.tokens]
        return Share(task, cache, tokens, "exact", len(tokens), "decode", task.proposal)
    stop = min(start + left, task.chunks[0].new_start if task.chunks else end)
    attention = task.attention
    if start < task.prompt_tokens:
        stop = min(stop, task.prompt_tokens)
    else:  # output that is computed again; the last of it is decoded, with its draft, as ever
        stop, attention = min(stop, end - 1), "exact"
    return Share(task, cache, task.tokens[start:stop], attention, int(stop == end), "prefill")
