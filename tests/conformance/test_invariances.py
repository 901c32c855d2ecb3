"""Invariances pass for a backend whose rows stand alone, and fail for each way not to (SPEC 18)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backends.reference import ReferenceBackend, ReferenceSession
from conformance.cases.checks import Caller
from conformance.cases.invariances import invariances
from conformance.operations import NotImplementedByBackendError, Sessions
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
        *("linear", "linear_int4", "rms_norm", "softmax", "gated_mlp", "attention", "forward"),
        *("route", "moe"),
    }


@pytest.mark.parametrize("name", [n for n in CHECKS if not n.startswith("forward/")])
def test_the_reference_passes(name: str) -> None:
    assert verdict(ReferenceBackend(), name) == Verdict("pass", 0.0)


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

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return self.off(ReferenceBackend.rms_norm(x, weight, eps), len(x))

    def softmax(self, x: Array) -> Array:
        return self.off(ReferenceBackend.softmax(x), len(x))

    def gated_mlp(self, x: Array, gate: Array, up: Array, down: Array, activation: str) -> Array:
        return self.off(super().gated_mlp(x, gate, up, down, activation), len(x))

    def route(self, logits: Array, **router: Any) -> tuple[Array, Array]:
        experts, gates = super().route(logits, **router)
        return experts, self.off(gates, len(logits))

    def moe(self, x: Array, **weights: Any) -> Array:
        return self.off(super().moe(x, **weights), len(x))

    def attention(self, q: Array, k: Array, v: Array, mode: str, **options: Any) -> Array:
        return self.off(super().attention(q, k, v, mode, **options), len(q))


def test_a_batch_that_is_not_its_rows() -> None:
    parts = ("linear", "rms", "soft", "gated", "route", "moe")
    failed = {n for p in parts for n in failing(Batched(), p)}
    assert failed == {
        *("linear/rows_alone", "linear_int4/rows_alone", "rms_norm/rows_alone"),
        *("softmax/rows_alone", "gated_mlp/rows_alone", "route/rows_alone", "moe/rows_alone"),
    }
    assert "attention/chunks_decode" in failing(Batched(), "attention/chunks")
    message = verdict(Batched(), "linear/rows_alone").message
    assert message.startswith("a row alone against the row in a batch: ")
    assert "%" in message


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
