"""Text by `async for`: streams side by side, and event loops that end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from reference.engine import Engine
from reference.errors import RequestError
from reference.model import Model, Part
from reference.trace import Pass
from tests.oracle.arrays import Float32
from tests.reference.engine.script import scripted, spelled
from tests.reference.models import tiny
from tests.reference.traffic import check_empty, drain

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


async def listen(engine: Engine, prompt: Any, count: int, **options: Any) -> str:
    return "".join([piece async for piece in engine.stream(prompt, count, **options)])


def test_a_stream_has_its_own_callbacks() -> None:
    async def first() -> None:
        async for _ in Engine(tiny()).stream("And", 3, on_text=print):
            pass

    with pytest.raises(RequestError, match="on_text"):
        asyncio.run(first())


def test_streams_side_by_side() -> None:
    """Each is the text of its request alone, in pieces; their passes are shared."""
    engine, passes = Engine(tiny(), page_size=4), list[Pass]()
    engine.on_pass = passes.append
    prompts = ["And God said", "And it came", "In the beginning"]

    async def together() -> list[str]:
        return await asyncio.gather(*(listen(engine, prompt, 12) for prompt in prompts))

    for _ in range(2):  # an engine serves one event loop after another
        texts = asyncio.run(together())
        assert texts == [Engine(tiny()).generate(prompt, 12).text for prompt in prompts]
    assert max(len(done.shares) for done in passes) == 3
    check_empty(engine)


def test_all_passes_are_computed_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the event loop has done on threads: each keeps memory for the next pass."""
    engine, original, threads = Engine(tiny()), Model.forward_batch, set[int]()

    def noting(self: Model, parts: Sequence[Part], *more: Any) -> list[Float32]:
        threads.add(threading.get_ident())
        return original(self, parts, *more)

    monkeypatch.setattr(Model, "forward_batch", noting)

    async def other_work() -> None:
        for _ in range(100):
            await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.001) for _ in range(3)))

    async def both() -> None:
        await asyncio.gather(other_work(), listen(engine, "And God said", 40, stop_tokens=()))

    for _ in range(2):
        asyncio.run(both())
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_an_engine_that_is_gone_leaves_no_thread() -> None:
    """The loop ends while a pass is computed, so that the pump is cancelled."""
    before = set(threading.enumerate())
    engine = Engine(tiny())

    async def hasty(engine: Engine) -> None:
        await anext(engine.stream("And God said", 4000, stop_tokens=()))

    asyncio.run(hasty(engine))
    del engine
    for _ in range(200):
        gc.collect()
        if set(threading.enumerate()) <= before:
            return
        time.sleep(0.01)
    pytest.fail(f"{set(threading.enumerate()) - before} are left")


def test_a_stream_comes_as_it_is_computed() -> None:
    engine = Engine(scripted(spelled("abcdef")))

    async def first() -> tuple[str, int]:
        stream = engine.stream([65], 6, stop_tokens=())
        piece = await anext(stream)
        chosen = max(len(request.chosen) for request in engine._requests.values())
        rest = [piece async for piece in stream]
        return piece + "".join(rest), chosen

    text, chosen = asyncio.run(first())
    assert text == "abcdef"
    assert 1 <= chosen <= 6


def test_a_consumer_that_goes_away_cancels_its_request() -> None:
    engine = Engine(tiny(), page_size=4)
    alone = Engine(tiny()).generate("And God said", 20).text

    async def leaving() -> str:
        async def leave() -> None:
            async for _ in engine.stream("And God", 4000, stop_tokens=()):
                break

        async def waiting() -> None:
            await listen(engine, "And it", 4000, stop_tokens=())

        impatient = asyncio.create_task(waiting())
        staying = asyncio.create_task(listen(engine, "And God said", 20))
        await leave()
        await asyncio.sleep(0.05)
        impatient.cancel()
        text = await staying
        while engine.busy:  # the engine learns of it with its next pass
            await asyncio.sleep(0.01)
        return text

    assert asyncio.run(asyncio.wait_for(leaving(), 60)) == alone
    check_empty(engine)


def test_an_event_loop_that_ends_leaves_nothing() -> None:
    """`asyncio.run` returns while a request is in the middle of its output."""
    engine = Engine(tiny(), page_size=4)

    async def hasty() -> None:
        pending = asyncio.create_task(listen(engine, "And God", 4000, stop_tokens=()))
        while not any(request.chosen for request in engine._requests.values()):
            await asyncio.sleep(0.001)
        del pending

    asyncio.run(hasty())
    drain(engine)
    check_empty(engine)
    assert engine.generate("And God", 5).tokens == Engine(tiny()).generate("And God", 5).tokens


def test_an_error_in_the_middle_reaches_every_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails is the pass itself; the next stream starts afresh."""
    engine, original, count = Engine(tiny(), page_size=4), Model.forward_batch, 0

    def failing(self: Model, parts: Sequence[Part], *more: Any) -> list[Float32]:
        nonlocal count
        count += 1
        if count == 4:
            raise MemoryError("no more")
        return original(self, parts, *more)

    monkeypatch.setattr(Model, "forward_batch", failing)

    async def both() -> list[Any]:
        streams = [listen(engine, prompt, 12) for prompt in ("And God", "And it")]
        failed = await asyncio.gather(*streams, return_exceptions=True)
        return [*failed, await listen(engine, "And God said", 6)]

    first, second, third = asyncio.run(both())
    assert isinstance(first, MemoryError)
    assert isinstance(second, MemoryError)
    assert third == Engine(tiny()).generate("And God said", 6).text
    assert not caplog.records, "no exception was left unheard"
    check_empty(engine)


def test_an_event_loop_that_was_closed_is_not_waited_for() -> None:
    """Its pump never ends; the next loop has its own."""
    engine = Engine(tiny(), page_size=4)
    loop = asyncio.new_event_loop()

    async def left() -> None:
        await anext(engine.stream("And God", 400, stop_tokens=()))
        loop.stop()
        await asyncio.sleep(60)

    task = loop.create_task(left())
    loop.run_forever()
    loop.close()
    pump = engine._pump
    assert pump is not None
    assert not pump.done()
    text = asyncio.run(asyncio.wait_for(listen(engine, "And God said", 6), 60))
    assert text == Engine(tiny()).generate("And God said", 6).text
    drain(engine)
    check_empty(engine)
    for abandoned in (task, pump):
        abandoned._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_pump_that_is_collected_takes_no_lock() -> None:
    """It may be closed by the collector at any time, on a thread that computes a pass."""
    engine = Engine(scripted(spelled("abcdef")))
    engine.submit([65], 6)

    async def collected() -> None:
        with engine._lock:
            pump = engine._run()
            pump.send(None)
            pump.close()

    thread = threading.Thread(target=lambda: asyncio.run(collected()), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_stream_that_is_refused() -> None:
    engine = Engine(tiny())
    for prompt, count, options in (("", 5, {}), ("And", 0, {}), ("And", 5, {"stops": "x"})):
        with pytest.raises(RequestError):
            asyncio.run(listen(engine, prompt, count, **options))
    assert not engine.busy
