"""From prompts to text: requests arrive, share forward passes, and leave (SPEC 14)."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal, Unpack

import numpy as np

from reference.arguments import flag, whole
from reference.arithmetic import F32
from reference.cache import PAGE_SIZE, KVType, PagePool
from reference.cache.prefix import PrefixIndex, is_salt
from reference.cache.snapshot import restore, save
from reference.config import show
from reference.errors import CacheError, RequestError
from reference.model import Model, Part
from reference.output import OutputText
from reference.request import Options, Request, Result, StopReason
from reference.sampling import Sampling
from reference.scheduler import Scheduler, Share, Task
from reference.speculation import Draft, ModelDraft, NgramDraft, Proposal, verify
from reference.trace import Pass

CACHE_BYTES = 1 << 30
"""The default budget of the cache: 1 GiB, which takes up memory only as it fills."""

MAX_BATCHED_TOKENS = 2048
"""The default for how many tokens a pass computes at most."""

DRAFT_TOKENS = 4
"""The default for how many tokens are drafted for a pass at most."""


class Engine:
    """A model, its pages, and the requests that share them (SPEC 14).

    exact_prefill: whether prompts at or above the floor are exact too (SPEC 8.4). page_size,
    kv_dtype, cache_bytes: of the cache (SPEC 11). max_batched_tokens: the most that a pass computes
    (SPEC 14.2). cache_reuse: the least length of a chunk that is moved after an edit, 0 for never
    (SPEC 11.5). draft: `ngram`, a smaller model, or None. draft_tokens: the most that are drafted
    for a pass (SPEC 13.3); a draft model has a share of cache_bytes. on_pass: is called with the
    record of each pass. Raises RequestError for a bad argument, and CacheError for a cache that the
    machine cannot give.

    All methods but `stream` and `start` may be called from any thread; a request's callbacks may
    call `submit` and `cancel` only.
    """

    def __init__(
        self,
        model: Model,
        exact_prefill: bool = False,
        *,
        page_size: int = PAGE_SIZE,
        kv_dtype: KVType = "float32",
        cache_bytes: int = CACHE_BYTES,
        max_batched_tokens: int = MAX_BATCHED_TOKENS,
        cache_reuse: int = 0,
        draft: Literal["ngram"] | Model | None = None,
        draft_tokens: int = DRAFT_TOKENS,
    ) -> None:
        cache_bytes = whole("cache_bytes", cache_bytes, 1)
        max_batched_tokens = whole("max_batched_tokens", max_batched_tokens, 1)
        cache_reuse = whole("cache_reuse", cache_reuse)
        self.model, self.exact_prefill = model, flag("exact_prefill", exact_prefill)
        self.draft, self.draft_tokens = draft, whole("draft_tokens", draft_tokens, 1)
        fits = (lambda tokens, logits: True) if model.memory is None else model.memory.holds
        self._check_draft(max_batched_tokens, fits)
        if cache_reuse and not model.config.rotates_alike:
            raise RequestError(
                "cache_reuse: this model rotates keys by layer or by length, so that they cannot "
                "be moved; leave cache_reuse at 0"
            )
        new_pool = partial(
            model.new_pool, page_size=page_size, kv_dtype=kv_dtype, originals=cache_reuse > 0
        )
        self._draft: ModelDraft | NgramDraft | None = NgramDraft() if draft == "ngram" else None
        if isinstance(draft, Model):
            share = draft_share(cache_bytes, new_pool(), draft.new_pool())
            self._draft = ModelDraft(draft, model, share, page_size)
            cache_bytes -= share
        self.pool = new_pool(cache_bytes)
        self.prefixes = PrefixIndex(self.pool, model.digest)
        self.scheduler = Scheduler(
            self.pool, self.prefixes, model.config.rope, max_batched_tokens, cache_reuse, fits
        )
        self.on_pass: Callable[[Pass], object] | None = None
        self._requests: dict[int, Request] = {}
        self._arriving: deque[Request] = deque()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._interrupt: BaseException | None = None
        self._pump: asyncio.Task[None] | None = None
        # One thread: each that computes passes keeps memory for the next one (reference.reuse).
        self._worker = ThreadPoolExecutor(1, "bitforbit-passes")
        self._born = perf_counter()

    def _check_draft(self, max_batched_tokens: int, fits: Callable[[int, int], bool]) -> None:
        """Raise RequestError for what is no draft, or for drafts that no pass has room for."""
        draft, count = self.draft, self.draft_tokens
        if draft is None:
            return
        if draft != "ngram" and not isinstance(draft, Model):
            raise RequestError(f"draft: {draft!r} is none of `ngram`, a model, or None")
        if count >= max_batched_tokens:
            raise RequestError(
                f"draft_tokens: {count} and the token before them exceed a pass of "
                f"{max_batched_tokens}; raise max_batched_tokens, or draft less"
            )
        if not fits(count + 1, count + 1):
            raise RequestError(
                f"draft_tokens: {count} and the token before them exceed a pass within the "
                "model's memory; give that more, or draft less"
            )

    # ----------------------------------------------------------------------------------- requests

    def submit(
        self, prompt: str | Sequence[int], max_new_tokens: int = 128, **options: Unpack[Options]
    ) -> Request:
        """Ask for up to max_new_tokens tokens after a prompt of text or token ids (SPEC 14.1).

        Calls of `step` then compute them. Raises RequestError for what cannot be computed.
        """
        started = perf_counter()
        _check_options(options, self.model)
        ids, count = self._encode(prompt), whole("max_new_tokens", max_new_tokens, 1)
        self.demand_room(len(ids), count)
        request = self._request(ids, count, options, started)
        self._arriving.append(request)
        return request

    def _request(
        self, ids: list[int], max_new_tokens: int, options: Options, started: float
    ) -> Request:
        """The request that checked options ask for. RequestError for numbers out of range."""
        stop, stop_tokens = options.get("stop", ()), options.get("stop_tokens")
        on_prompt = options.get("on_prompt")
        task = Task(
            next(self._numbers),
            ids,
            len(ids),
            options.get("cache_salt", ""),
            options.get("cache_prompt", True) and on_prompt is None,
            options.get("exact_prefill", self.exact_prefill),
            on_prompt is not None,
        )
        request = Request(
            task,
            max_new_tokens,
            options.get("sampling", Sampling()),
            whole("seed", options.get("seed", 0), 0, 2**64),
            whole("request", options.get("request", 0), 0, 2**32),
            _ids(self.model.eos_tokens if stop_tokens is None else stop_tokens),
            OutputText(
                self.model.tokenizer,
                (stop,) if isinstance(stop, str) else stop,
                options.get("on_text", lambda piece: None),
            ),
            options.get("on_token", lambda token, logits: None),
            on_prompt,
            options.get("on_done", lambda: None),
            self._new_draft(),
            started=started,
        )
        task.propose = partial(self._propose, request)
        return request

    def demand_room(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise RequestError where the cache, or a draft model's share, never has room for one."""
        positions = self.positions(prompt_tokens, max_new_tokens)
        if not isinstance(self._draft, ModelDraft):
            self.scheduler.check(positions)
            return
        self.scheduler.check(positions, self._draft.pool.budget)
        self._draft.check(positions)

    def positions(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Positions that a request takes in the cache at most.

        The last token chosen takes one only where a draft of it was tested (SPEC 13.5).
        """
        positions = prompt_tokens + max_new_tokens - (self.draft is None)
        return min(positions, self.model.config.max_positions)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt, checked. Raises RequestError."""
        if not isinstance(prompt, str):
            return [int(token) for token in self.model.token_ids(prompt)]
        if self.model.tokenizer is None:
            raise RequestError("prompt: the model has no tokenizer.json; give token ids")
        ids = self.model.tokenizer.encode(prompt)
        if not ids:
            raise RequestError("prompt: the text gives no token; at least one is needed")
        return [int(token) for token in self.model.token_ids(ids)]

    def _new_draft(self) -> Draft | None:
        """The draft of a new request."""
        return self._draft.fresh() if isinstance(self._draft, ModelDraft) else self._draft

    def cancel(self, request: Request) -> None:
        """Give a request up; its pages are free before the next pass."""
        if not request.done:
            request.cancelled = True

    @property
    def busy(self) -> bool:
        """Whether a call of `step` would do anything."""
        return bool(self._arriving or self._requests)

    def generate(
        self, prompt: str | Sequence[int], max_new_tokens: int = 128, **options: Unpack[Options]
    ) -> Result:
        """Submit a request and step until it is done (SPEC 14.1). Raises what went wrong."""
        request = self.submit(prompt, max_new_tokens, **options)
        try:
            while not request.done:
                self.step()
        finally:
            self.cancel(request)
            with self._uninterrupted():
                self._receive()
        return request.result()

    async def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int = 128, **options: Unpack[Options]
    ) -> AsyncIterator[str]:
        """The text of a request, piece by piece; any number may run at once (SPEC 14.1).

        Passes are computed on the engine's thread. A consumer that goes away cancels its request.
        Raises what went wrong.
        """
        for name in ("on_text", "on_done"):
            if name in options:
                raise RequestError(f"{name}: `stream` has its own; use `submit` with it")
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def send(piece: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        options["on_text"], options["on_done"] = send, lambda: send(None)
        request = self.submit(prompt, max_new_tokens, **options)
        self.start()
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            request.result()
        finally:
            self.cancel(request)

    # -------------------------------------------------------------------------------------- passes

    def step(self) -> None:
        """Compute one pass for the requests that are due, within the budget of tokens (SPEC 14.2).

        If the pass fails, the requests that share it fail; if it cannot be planned, all do. What a
        callback raises fails its request alone. An interrupt (KeyboardInterrupt, SystemExit) that a
        callback raises is raised here too, once all others have what the pass gave them.
        """
        with self._uninterrupted():
            self._receive()
            tasks = [*self.scheduler.running, *self.scheduler.waiting]
            try:
                shares = self.scheduler.plan()
                if not shares:
                    return
                tasks, started = [share.task for share in shares], perf_counter()
                logits = self.model.forward_batch(
                    [Part(s.tokens, s.cache, s.attention, s.rows) for s in shares]
                )
            except Exception as error:
                for task in tasks:
                    self._fail(self._requests[task.number], error)
                return
            before = {share.task.number: len(share.task.tokens) for share in shares}
            for share, rows in zip(shares, logits, strict=True):
                self._advance(self._requests[share.task.number], share, rows)
            if self.on_pass is not None:
                self.on_pass(
                    Pass(
                        started - self._born,
                        perf_counter() - self._born,
                        tuple((s.task.number, s.kind, len(s.tokens)) for s in shares),
                        {s.task.number: len(s.task.tokens) - before[s.task.number] for s in shares},
                    )
                )

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Hold the lock; an interrupt that a callback raised meanwhile is raised at the end."""
        with self._lock:
            yield
            interrupt, self._interrupt = self._interrupt, None
            if interrupt is not None:
                raise interrupt

    def _receive(self) -> None:
        """Take in the requests that were submitted, and let go of those that were cancelled."""
        while self._arriving:
            request = self._arriving.popleft()
            self._requests[request.task.number] = request
            self.scheduler.add(request.task)
        for request in list(self._requests.values()):
            if request.done:
                self._let_go(request)

    def _propose(self, request: Request) -> Proposal:
        """Draft for a request, no more tokens than it may still use (SPEC 13.5)."""
        if request.draft is None:
            return Proposal()
        context = np.array(request.task.tokens, np.int64)
        room = self.model.config.max_positions - len(context)
        count = min(self.draft_tokens, request.max_new_tokens - len(request.chosen), room)
        try:
            return request.draft.propose(
                context, count, request.sampling, request.seed, request.request
            )
        except Exception as error:  # what fails a draft fails its request alone
            request.outcome = error
            return Proposal()

    def _advance(self, request: Request, share: Share, logits: F32) -> None:
        """Choose a request's next tokens from the logits of its share, and end it if they do."""
        task = request.task
        try:
            first = share.cache.length - len(share.tokens)
            if request.on_prompt is not None and first < task.prompt_tokens:
                request.on_prompt(first, logits)
            if share.last and not request.done:
                reason = self._choose(request, share, logits[len(logits) - share.last :])
                if reason is not None:
                    request.finish(reason)
        except BaseException as error:  # the caller's callbacks may raise anything
            self._fails(request, error)
        if share.last:
            share.cache.truncate(len(task.tokens) - 1)
        share.cache.trim()
        if request.done:
            if isinstance(request.outcome, Result) and task.reuse:
                task.cache = None
                self.prefixes.keep(task.tokens, task.salt, share.cache)
            self._let_go(request)

    def _choose(self, request: Request, share: Share, logits: F32) -> StopReason | None:
        """Append the tokens that a share's logits give; returns why the request ends, or None."""
        task = request.task
        task.proposal = None
        verdict = verify(
            logits,
            share.proposal,
            request.sampling,
            np.array(task.tokens, np.int64),
            request.seed,
            request.request,
            len(task.tokens),
        )
        if share.kind == "decode":
            request.tally.add(share.proposal, verdict)
        for token, row in zip(verdict.tokens, logits, strict=False):
            reason = request.take(token, row, self.model.config.max_positions)
            if reason is not None or request.done:
                return reason
        return None

    def _fails(self, request: Request, error: BaseException) -> None:
        """Fail a request by what its callback raised; an interrupt is raised by `step` as well."""
        request.outcome = error
        if not isinstance(error, Exception):
            self._interrupt = error

    def _fail(self, request: Request, error: BaseException) -> None:
        """Fail a request by what its pass raised."""
        request.outcome = error
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Free what a request that is done still holds, and tell whoever waits for it."""
        if isinstance(request.draft, ModelDraft):
            request.draft.end()
        request.draft = None
        self.scheduler.remove(request.task)
        self._requests.pop(request.task.number, None)
        try:
            request.on_done()
        except BaseException as error:
            self._fails(request, error)

    def start(self) -> None:
        """Have a running event loop compute passes, on the engine's thread, until none is due."""
        # Another loop's pump cannot be relied on: that loop may be closed, or about to end.
        loop = asyncio.get_running_loop()
        if self._pump is None or self._pump.done() or self._pump.get_loop() is not loop:
            self._pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Step on the engine's thread while there is anything to do."""
        loop = asyncio.get_running_loop()
        try:
            while self.busy:
                await loop.run_in_executor(self._worker, self.step)
        except Exception as error:  # of `on_pass`: nobody steps any more, so nobody may wait
            with self._lock:
                for request in [*self._requests.values(), *self._arriving]:
                    self._fail(request, error)
                self._arriving.clear()

    # --------------------------------------------------------------------------------- cache files

    def save_cache(self, path: str | Path, salt: str = "") -> None:
        """Write the most recently used sequence under a salt to a file (SPEC 11.4).

        Raises CacheError where there is none, or the file cannot be written.
        """
        with self._lock:
            kept = self.prefixes.latest(salt)
            if kept is None:
                raise CacheError(
                    f"{path}: there is no computed prompt to save; compute one under this salt"
                )
            save(Path(path), kept.cache, kept.tokens.tolist(), self.model.digest, salt)

    def restore_cache(self, path: str | Path) -> None:
        """Take in a sequence that `save_cache` wrote, for prompts that start with it (SPEC 11.4).

        Raises CacheError where the file is not whole or not of this model, or there is no room;
        nothing has changed then.
        """
        with self._lock:
            tokens, salt, cache = restore(Path(path), self.pool, self.model.digest)
            self.prefixes.keep(tokens, salt, cache)


def draft_share(cache_bytes: int, target: PagePool, draft: PagePool) -> int:
    """Bytes of the cache for a draft model, so that both hold as many positions (SPEC 13.3)."""
    both = target.position_bytes + draft.position_bytes
    return cache_bytes * draft.position_bytes // both


def _check_options(options: Options, model: Model) -> None:
    """Raise RequestError for options that would only fail later, or be ignored."""
    for name in options.keys() - Options.__annotations__.keys():
        raise RequestError(
            f"{name}: there is no such option; there are {', '.join(Options.__annotations__)}"
        )
    stop = options.get("stop", ())
    if not isinstance(stop, str | list | tuple) or not all(isinstance(s, str) for s in stop):
        raise RequestError("stop: give a text, or a list of texts")
    if "" in ([stop] if isinstance(stop, str) else stop):
        raise RequestError("stop: an empty text would end every text at once; leave it out")
    if stop and model.tokenizer is None:
        raise RequestError("stop: the model has no tokenizer.json, so there is no text to stop at")
    if not is_salt(options.get("cache_salt", "")):
        raise RequestError(f"cache_salt: {show(options['cache_salt'])} is no Unicode text")
    if not isinstance(options.get("sampling", Sampling()), Sampling):
        raise RequestError(f"sampling: {show(options['sampling'])} is no `Sampling`; give one")
    named: Mapping[str, object] = options
    for name in ("exact_prefill", "cache_prompt"):
        flag(name, named.get(name, True))
    for name in ("on_text", "on_token", "on_prompt", "on_done"):
        if not callable(named.get(name, print)) and not (
            name == "on_prompt" and named[name] is None
        ):
            raise RequestError(f"{name}: {show(named[name])} cannot be called; leave it out")


def _ids(stop_tokens: Iterable[int]) -> frozenset[int]:
    """Token ids as a set of int. Raises RequestError for what is no whole number."""
    if not isinstance(stop_tokens, Iterable):
        raise RequestError(f"stop_tokens: {show(stop_tokens)} is no list of token ids; give one")
    return frozenset(whole("stop_tokens", token) for token in stop_tokens)
