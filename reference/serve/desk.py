"""Between HTTP and the engine: sequences are admitted, followed, and given up (SPEC 14.1).

The engine computes on a thread of its own and calls back from there; here its calls become chunks
in a queue of the event loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from reference.arithmetic import F32
from reference.chat import ChatTemplate
from reference.engine import Engine
from reference.errors import BitforbitError, RequestError
from reference.request import Request, Result
from reference.sampling import Sampling
from reference.serve.logprobs import Scored, score
from reference.serve.metrics import Metrics
from reference.serve.refusal import RefusalError
from reference.tokenizer import Tokenizer


@dataclass(frozen=True)
class Limits:
    """How much a server takes on.

    body_bytes: of one request. sequences: in the engine at once, waiting or running. seconds: for
    one request, from its first byte to its last.
    """

    body_bytes: int = 4 << 20
    sequences: int = 256
    seconds: float = 600.0


@dataclass(frozen=True)
class Ask:
    """One sequence that is asked for.

    count: how many tokens to choose at most; 0 to evaluate the prompt only. top: how many of the
    likeliest tokens are told with each, None for no logprobs. score_prompt: whether the tokens of
    the prompt have logprobs too. The rest is as in the engine's options.
    """

    prompt: list[int]
    count: int
    sampling: Sampling
    seed: int
    request: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    cache_salt: str = ""
    top: int | None = None
    score_prompt: bool = False


@dataclass(frozen=True)
class Chunk:
    """What sequence `index` gave: final text, and tokens. result: in the last chunk."""

    index: int
    text: str
    tokens: list[Scored]
    result: Result | None = None


@dataclass
class Feed:
    """A sequence in the engine, fed by the thread that computes passes."""

    index: int
    ask: Ask
    send: Callable[[Chunk | int], None]
    pending: list[Scored] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    request: Request | None = None

    def __post_init__(self) -> None:
        self.scores = [Scored(token) for token in self.ask.prompt]

    def on_prompt(self, start: int, logits: F32) -> None:
        """Score the prompt's tokens, each by the logits of the position before it."""
        prompt = self.ask.prompt
        for position, row in enumerate(logits, start + 1):
            if position < len(prompt):
                self.scores[position] = score(prompt[position], row, self.ask.top or 0)

    def on_token(self, token: int, logits: F32) -> None:
        """Keep a chosen token until its text is final."""
        if self.ask.count:
            top = self.ask.top
            self.pending.append(Scored(token) if top is None else score(token, logits, top))

    def on_text(self, piece: str) -> None:
        """Send text that is final, and the tokens since the last chunk."""
        if self.ask.count:
            self.send(Chunk(self.index, piece, self.pending))
            self.pending = []

    def on_done(self) -> None:
        """Send the index, which says that nothing more will come."""
        self.send(self.index)


class Work:
    """The sequences of one HTTP request, in the engine. To be closed in the end."""

    def __init__(self, desk: Desk, asks: Sequence[Ask]) -> None:
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + desk.limits.seconds
        self._queue: asyncio.Queue[Chunk | int] = asyncio.Queue()
        self.sequences = [Feed(i, ask, self._send) for i, ask in enumerate(asks)]

    def _send(self, item: Chunk | int) -> None:
        self._loop.call_soon_threadsafe(self._receive, item)

    def _receive(self, item: Chunk | int) -> None:
        if isinstance(item, int):
            self._desk.left()
        self._queue.put_nowait(item)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The chunks of all sequences, as they come.

        Raises RefusalError if a sequence fails or the time is up.
        """
        undone = len(self.sequences)
        while undone:
            try:
                async with asyncio.timeout_at(self._deadline):
                    item = await self._queue.get()
            except TimeoutError:
                raise out_of_time(self._desk.limits.seconds) from None
            if isinstance(item, int):
                undone -= 1
                item = self._ended(self.sequences[item])
            yield item

    def _ended(self, sequence: Feed) -> Chunk:
        """The last chunk of a sequence: its result, and tokens that gave no text any more."""
        assert sequence.request is not None
        try:
            result = sequence.request.result()
        except Exception as error:
            message = str(error) if isinstance(error, BitforbitError) else type(error).__name__
            message = " ".join(message.split())
            param = message.partition(":")[0]
            if isinstance(error, RequestError) and param in Sampling.__annotations__:
                raise RefusalError(400, message, param) from error
            raise RefusalError(500, f"the engine failed: {message}") from error
        self._desk.metrics.ended(result, sequence.ask.count)
        return Chunk(sequence.index, "", sequence.pending, result)

    def close(self) -> None:
        """Cancel what is not done; its pages are free before the next pass."""
        for sequence in self.sequences:
            if sequence.request is not None and not sequence.request.done:
                self._desk.metrics.cancelled.inc()
                self._desk.engine.cancel(sequence.request)


class Desk:
    """What all requests of a server share.

    name: the model's. context: tokens that a prompt may have: the model's, or what the cache, and a
    draft model's share of it, has room for if one more is chosen.
    """

    def __init__(
        self, engine: Engine, name: str, template: ChatTemplate | None, limits: Limits
    ) -> None:
        if engine.model.tokenizer is None:
            raise RequestError("serve: the model has no tokenizer.json; a server needs it")
        self.engine, self.name, self.template, self.limits = engine, name, template, limits
        self.tokenizer: Tokenizer = engine.model.tokenizer
        sizes = range(1, engine.model.config.max_positions + 1)
        self.context = bisect_left(sizes, True, key=self._exceeds)
        self._inside = 0
        self.metrics = Metrics(engine, lambda: self._inside)

    def _exceeds(self, size: int) -> bool:
        """Whether the cache has no room for a prompt of so many tokens and one more."""
        try:
            self.engine.demand_room(size, 1)
        except RequestError:
            return True
        return False

    def left(self) -> None:
        """One sequence has left the engine, its pages with it."""
        self._inside -= 1

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, computed on a thread. Raises RequestError."""
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    def room(self, prompt: list[int], param: str) -> int:
        """How many tokens may follow a prompt. Raises RefusalError where it is none."""
        try:
            self.engine.model.token_ids(prompt[: self.context])
        except RequestError as error:
            raise RefusalError(400, f"{param}: {error}", param) from None
        if len(prompt) > self.context:
            raise RefusalError(
                400,
                f"{param}: {len(prompt)} tokens are more than the context of {self.context}; "
                "shorten it",
                param,
                "context_length_exceeded",
            )
        return self.context - len(prompt) + 1  # the last token chosen takes no position

    def admit(self, asks: Sequence[Ask]) -> Work:
        """Submit sequences, all or none, to be closed in the end. RefusalError, RequestError."""
        most = self.limits.sequences
        if self._inside + len(asks) > most:
            raise RefusalError(
                503,
                f"the queue is full: {self._inside} of {most} sequences are in it; try again",
                code="queue_full",
            )
        work = Work(self, asks)
        try:
            for sequence in work.sequences:
                sequence.request = self._submit(sequence)
                self._inside += 1
        except BaseException:
            work.close()
            raise
        finally:
            self.engine.start()  # it also lets go of what was closed
        return work

    def _submit(self, sequence: Feed) -> Request:
        ask = sequence.ask
        return self.engine.submit(
            ask.prompt,
            max(ask.count, 1),
            sampling=ask.sampling,
            seed=ask.seed,
            request=ask.request,
            stop=ask.stop,
            stop_tokens=() if ask.ignore_eos else None,
            cache_prompt=ask.cache_prompt,
            cache_salt=ask.cache_salt,
            on_text=sequence.on_text,
            on_token=sequence.on_token,
            on_prompt=sequence.on_prompt if ask.score_prompt else None,
            on_done=sequence.on_done,
        )

    async def finish(self) -> None:
        """Wait until the engine has nothing left."""
        while self.engine.busy:
            await asyncio.sleep(0.01)


def out_of_time(seconds: float) -> RefusalError:
    """The answer to a request that takes too long."""
    return RefusalError(504, f"the request took more than {seconds:g} seconds", code="time_limit")
