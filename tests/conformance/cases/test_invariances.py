"""Invariances fail for each way in which rows may not stand alone (SPEC 18).

That the reference passes them all is in tests/conformance/test_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backends.composed import ComposedBackend
from conformance.backends.paging import split
from conformance.backends.reference import ReferenceBackend, ReferenceSession
from conformance.cases.checks import Caller, compare
from conformance.cases.invariances import invariances
from conformance.faults import applied, fault
from conformance.operations import (
    NotImplementedByBackendError,
    Outputs,
    Sessions,
    WrongAnswerError,
    output_names,
)
from conformance.paths import model_folder
from conformance.rules import Verdict

Array = NDArray[Any]
CHECKS = {i.id.removeprefix("invariance/"): i for i in invariances()}


def verdict(backend: object, name: str) -> Verdict:
    return CHECKS[name].check(Caller(backend, Sessions(backend)))


def failing(backend: object, prefix: str) -> set[str]:
    return {n for n in CHECKS if n.startswith(prefix) and verdict(backend, n).outcome == "fail"}


def test_ids_and_sections() -> None:
    assert len(CHECKS) == len(invariances())
    assert all(i.id == f"invariance/{name}" for name, i in CHECKS.items())
    operations = {name.split("/")[0] for name in CHECKS}
    assert operations == {
        *("linear", "linear_int4", "linear_q4_0", "linear_q8_0", "rms_norm", "softmax"),
        "linear_w4a16",
        *("gated_mlp", "attention", "forward"),
        *("route", "moe", "sample", "serve", "turns", "resume"),
    }


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_missing_is_not_implemented(name: str) -> None:
    with pytest.raises(NotImplementedByBackendError):
        verdict(object(), name)


class Batched(ReferenceBackend):
    """Rows of a batch differ from rows alone in one bit, as when a GEMM picks another kernel."""

    @staticmethod
    def off(y: Array, rows: int) -> Array:
        return np.nextafter(y, np.float32(9)) if rows > 1 else y

    def linear(self, x: Array, w: Array, bias: Any = None) -> Array:
        return self.off(super().linear(x, w, bias), len(x))

    def linear_int4(self, x: Array, packed: Array, scales: Array, group: int) -> Array:
        return self.off(super().linear_int4(x, packed, scales, group), len(x))

    def linear_w4a16(self, x: Array, *weights: Any, **more: Any) -> Array:
        return self.off(super().linear_w4a16(x, *weights, **more), len(x))

    def linear_q4_0(self, x: Array, blocks: Array) -> Array:
        return self.off(ReferenceBackend.linear_q4_0(x, blocks), len(x))

    def linear_q8_0(self, x: Array, blocks: Array) -> Array:
        return self.off(ReferenceBackend.linear_q8_0(x, blocks), len(x))

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return self.off(ReferenceBackend.rms_norm(x, weight, eps), len(x))

    def softmax(self, x: Array) -> Array:
        return self.off(ReferenceBackend.softmax(x), len(x))

    def gated_mlp(self, x: Array, gate: Array, up: Array, down: Array, activation: str) -> Array:
        return self.off(super().gated_mlp(x, gate, up, down, activation), len(x))

    def route(self, *args: Any, **router: Any) -> tuple[Array, Array]:
        experts, gates = super().route(*args, **router)
        return experts, self.off(gates, len(gates))

    def moe(self, *args: Any, **weights: Any) -> Array:
        y = super().moe(*args, **weights)
        return self.off(y, len(y))

    def attention(self, q: Array, k: Array, v: Array, mode: str, **options: Any) -> Array:
        return self.off(super().attention(q, k, v, mode, **options), len(q))


def test_a_batch_that_is_not_its_rows() -> None:
    parts = ("linear", "rms", "soft", "gated", "route", "moe")
    failed = {n for p in parts for n in failing(Batched(), p)}
    assert failed == {
        *("linear/rows_alone", "linear_int4/rows_alone", "rms_norm/rows_alone"),
        *("linear_q4_0/rows_alone", "linear_q8_0/rows_alone", "linear_w4a16/rows_alone"),
        *("softmax/rows_alone", "gated_mlp/rows_alone", "route/rows_alone", "moe/rows_alone"),
    }
    assert "attention/chunks_decode" in failing(Batched(), "attention/chunks")
    found = verdict(Batched(), "linear/rows_alone")
    assert found.worst == 1
    assert found.message == ("a row alone against the row in a batch: 360 of 360 elements differ")


def test_a_zero_of_the_other_sign_differs_and_is_counted() -> None:
    zeros = np.zeros((10, 100), np.float32)
    other = zeros.copy()
    other[3, 7] = -0.0
    assert compare({"y": zeros}, {"y": zeros.copy()}, "x") == Verdict("pass", 0.0)
    found = compare({"y": zeros}, {"y": other}, "x")
    assert found == Verdict("fail", 0.001, "x: 1 of 1,000 elements differ")


class Fickle(ReferenceBackend):
    """The second call differs, as atomic additions make it."""

    calls = 0

    def linear(self, x: Array, w: Array, bias: Any = None) -> Array:
        self.calls += 1
        y = super().linear(x, w, bias)
        y[0, 0] += self.calls
        return y

    def attention(self, q: Array, k: Array, v: Array, mode: str, **options: Any) -> Array:
        self.calls += 1
        y = super().attention(q, k, v, mode, **options)
        y[-1, -1, -1] += self.calls
        return y


def test_a_call_that_is_not_repeatable() -> None:
    assert "linear/repeated" in failing(Fickle(), "linear/")
    assert "attention/repeated" in failing(Fickle(), "attention/")


class Reusing(Fickle):
    """The same, answering into one array: the first answer must not become the second."""

    out: Array = np.zeros((9, 40), np.float32)

    def linear(self, x: Array, w: Array, bias: Any = None) -> Array:
        y = super().linear(x, w, bias)
        self.out[: len(y)] = y
        return self.out[: len(y)]


def test_one_array_for_all_answers_hides_nothing() -> None:
    assert verdict(Reusing(), "linear/repeated").outcome == "fail"


class Leaking(ReferenceBackend):
    """Masked by adding: 0 times what is behind the window is NaN."""

    def attention(self, q: Array, k: Array, v: Array, mode: str, **options: Any) -> Array:
        y = super().attention(q, k, v, mode, **options)
        if not (np.isfinite(k).all() and np.isfinite(v).all()):
            y[:] = np.nan
        return y


def test_what_is_behind_the_window_is_read() -> None:
    assert failing(Leaking(), "attention/") == {"attention/poison_behind_window"}


class Chunky(ReferenceBackend):
    """Positions begin anew with each call."""

    def attention(self, q: Array, k: Array, v: Array, mode: str, **options: Any) -> Array:
        return super().attention(q, k[: len(q)], v[: len(q)], mode, **options)


def test_a_chunk_that_forgets_the_cache() -> None:
    failed = failing(Chunky(), "attention/")
    assert {n for n in CHECKS if n.startswith("attention/chunks")} <= failed


class Forgetful(ReferenceSession):
    """A session that starts anew with every call."""

    def forward(self, tokens: Any, attention: Any) -> Array:
        self.reset()
        return super().forward(tokens, attention)


def test_a_session_that_forgets() -> None:
    class Backend(ReferenceBackend):
        def load(self, model: str, weights: Any) -> ReferenceSession:
            return Forgetful(super().load(model, weights).model)

    assert verdict(Backend(), "forward/float32_chunks_of_32").outcome == "fail"


def test_shapes_that_depend_on_the_call() -> None:
    class Backend(ReferenceBackend):
        def linear(self, x: Array, w: Array, bias: Any = None) -> Array:
            return super().linear(x, w, bias).astype(np.float64 if len(x) > 1 else np.float32)

    found = verdict(Backend(), "linear/rows_alone")
    assert (found.outcome, found.worst) == ("fail", None)
    assert found.message.endswith("shapes or dtypes differ")


# Serving: a session that changes an answer of the reference's.

SERVING = ("serve/", "turns/", "resume/")
KNOWN: dict[str, Outputs] = {}


@cache
def reference_session() -> ReferenceSession:
    return ReferenceBackend().load(str(model_folder("tiny-dense")), "float32")


def answer(operation: str, **arguments: Any) -> Outputs:
    """What the reference answers, each call computed once, and the file that it leaves."""
    path = arguments.get("path")
    plain = {n: np.asarray(a).tolist() for n, a in arguments.items() if n != "path"}
    key = repr((operation, plain))
    if key not in KNOWN:
        values = getattr(reference_session(), operation)(**arguments)
        KNOWN[key] = dict(zip(output_names(operation), values, strict=True))
    if path is not None:
        Path(path).write_bytes(b"a file")
    return {name: array.copy() for name, array in KNOWN[key].items()}


Change = Callable[[Outputs, dict[str, Any]], None]


class Changed:
    """A session whose answers to one operation are changed in place."""

    def __init__(self, operation: str, change: Change) -> None:
        self.operation, self.change = operation, change

    def reset(self) -> None:
        pass

    def _call(self, operation: str, **arguments: Any) -> tuple[Array, ...]:
        found = answer(operation, **arguments)
        if operation == self.operation:
            self.change(found, arguments)
        return tuple(found.values())

    def __getattr__(self, operation: str) -> Callable[..., tuple[Array, ...]]:
        return lambda **arguments: self._call(operation, **arguments)


class Serving(ReferenceBackend):
    def __init__(self, session: Any) -> None:
        self.session = session

    def load(self, model: str, weights: Any) -> Any:
        return self.session


def off(found: Outputs, *at: int) -> None:
    """One bit of the logits."""
    found["logits"][at] = np.nextafter(found["logits"][at], np.float32(np.inf))


def off_where(wanted: Callable[[dict[str, Any]], bool]) -> Change:
    def change(found: Outputs, arguments: dict[str, Any]) -> None:
        if wanted(arguments):
            off(found, 0, -1, 5)

    return change


def spoil_reused(found: Outputs, arguments: dict[str, Any]) -> None:
    off(found, int(np.flatnonzero(found["cache_n"])[0]), 0, 0)


def spoil_last_of_520(found: Outputs, arguments: dict[str, Any]) -> None:
    if arguments["lengths"][-1] == 520:
        off(found, -1, 0, 0)


def fast_reused(found: Outputs, arguments: dict[str, Any]) -> None:
    after_fast = arguments["lengths"] == 511
    found["cache_n"][after_fast] = 510


def another_token(found: Outputs, arguments: dict[str, Any]) -> None:
    if arguments["draft_tokens"] > 1:
        found["tokens"][-1, -1] += 1


def nothing_reused(found: Outputs, arguments: dict[str, Any]) -> None:
    found["cache_n"][:] = 0


def no_file(found: Outputs, arguments: dict[str, Any]) -> None:
    Path(arguments["path"]).unlink()


ALL_SERVE = {n for n in CHECKS if n.startswith("serve/")}

CHANGES: dict[str, tuple[str, Change, set[str]]] = {
    "whoever has company": ("serve", off_where(lambda a: len(a["lengths"]) > 1), ALL_SERVE),
    "company of one": (
        "serve",
        off_where(lambda a: len(a["lengths"]) == 2),
        {"serve/company"},
    ),
    "a long prompt that comes first": (
        "serve",
        off_where(lambda a: len(a["lengths"]) > 2 and a["lengths"][0] > 5),
        {"serve/order", "serve/alike"},
    ),
    "pages of one position": (
        "serve",
        off_where(lambda a: a["page_size"] == 1),
        {"serve/pages_of_1"},
    ),
    "pages longer than a block": (
        "serve",
        off_where(lambda a: a["page_size"] > 32),
        {"serve/pages_of_256"},
    ),
    "a chunk that ends in the middle": (
        "serve",
        off_where(lambda a: a["max_batched_tokens"] < 64),
        {"serve/passes_of_4", "serve/passes_of_33"},
    ),
    "one pass for all": (
        "serve",
        off_where(lambda a: a["max_batched_tokens"] > 64),
        {"serve/passes_of_4096"},
    ),
    "a draft that is believed": (
        "serve",
        another_token,
        {"serve/drafts_of_3", "serve/drafts_of_9"},
    ),
    "a prefix that is not the same": ("turns", spoil_reused, {"turns/alone"}),
    "nothing is reused": ("turns", nothing_reused, {"turns/alone", "turns/floor"}),
    "what is fast serves what is exact": ("turns", fast_reused, {"turns/floor"}),
    "what is exact lies behind what is fast": ("turns", spoil_last_of_520, {"turns/floor"}),
    "a file that loses a bit": ("resume", lambda found, _: off(found, 0, 0), {"resume/alone"}),
    "nothing is restored": ("resume", nothing_reused, {"resume/alone"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_with_where_the_bits_come_from(name: str) -> None:
    operation, change, caught = CHANGES[name]
    backend = Serving(Changed(operation, change))
    assert {n for prefix in SERVING for n in failing(backend, prefix)} == caught


def test_serving_that_is_unchanged_passes() -> None:
    backend = Serving(Changed("", lambda found, arguments: None))
    assert [failing(backend, prefix) for prefix in SERVING] == [set(), set(), set()]


def test_what_is_said_of_nothing_reused_and_no_file() -> None:
    def message(operation: str, change: Change) -> str:
        return verdict(Serving(Changed(operation, change)), f"{operation}/alone").message

    assert message("turns", nothing_reused).startswith("nothing was reused")
    assert message("resume", nothing_reused) == "75 tokens were saved, and 0 reused"
    with pytest.raises(WrongAnswerError, match="resume must write a file at `path`, and did not"):
        message("resume", no_file)


class OneTooMany(ReferenceSession):
    """Reuses a position more than the prefix that two prompts have in common."""

    surplus = 1

    def turns(
        self, tokens: Array, lengths: Array, max_new_tokens: int
    ) -> tuple[Array, Array, Array, Array]:
        before: list[int] = []
        reused, answers, rows = [], [], []
        for prompt in (part.tolist() for part in split(tokens, lengths)):
            same = [a == b for a, b in zip(before, prompt, strict=False)]
            common = same.index(False) if False in same else len(same)
            reused.append(min(common + self.surplus, len(before), len(prompt) - 1))
            self.cache.truncate(reused[-1])
            logits = self.forward(prompt[reused[-1] :], "exact")[-1]
            rows.append([logits])
            answers.append([int(logits.argmax())])
            while len(answers[-1]) < max_new_tokens:
                rows[-1].append(self.forward(answers[-1][-1:], "exact")[-1])
                answers[-1].append(int(rows[-1][-1].argmax()))
            before = prompt
        cache_n = np.array(reused)
        return np.array(answers), np.array(rows), cache_n, lengths - cache_n


def test_a_position_too_many_is_seen() -> None:
    class Right(OneTooMany):
        surplus = 0

    model = reference_session().model
    assert verdict(Serving(OneTooMany(model)), "turns/alone").outcome == "fail"
    assert verdict(Serving(Right(model)), "turns/alone").outcome == "pass"


class OtherExponential(ReferenceBackend):
    """Its `exp` is an ulp more than the specification's, and its sampler has that of 4.1."""

    def exp(self, x: Array) -> Array:
        return np.asarray(np.nextafter(super().exp(x), np.float32(2)))


def test_a_token_is_drawn_by_the_exponential_that_the_backend_has() -> None:
    assert failing(ReferenceBackend(), "sample/") == set()
    found = verdict(OtherExponential(), "sample/exponential")
    assert found.outcome == "fail"
    assert "by the backend's own exp it would be" in found.message
    faulty = applied(fault("sampling-weights-by-exp2"), ComposedBackend)
    assert failing(faulty, "sample/") == {"sample/exponential"}
