"""How the suite calls a backend, and what it takes for an answer (SPEC 17)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.operations import (
    NotImplementedByBackendError,
    Sessions,
    WrongAnswerError,
    call,
    output_names,
)

Array = NDArray[Any]
X = np.zeros(3, np.float32)


class One:
    """A backend of one operation, which answers with whatever it was given."""

    def __init__(self, operation: str, answer: object) -> None:
        setattr(self, operation, lambda **arguments: answer)


def ask(backend: object, operation: str = "exp", **arguments: Any) -> dict[str, Array]:
    return call(backend, Sessions(backend), operation, arguments)


def test_names_of_results() -> None:
    assert output_names("exp") == ("y",)
    assert output_names("sample") == ("y",)
    assert output_names("quantize_int4") == ("packed", "scales")
    assert output_names("quantize_int8") == ("codes", "scale")
    assert output_names("rope_constants") == ("inv_freq", "factor")
    assert output_names("generate") == ("tokens", "logits")


def test_arguments_are_passed_by_name() -> None:
    seen: dict[str, Any] = {}

    class Backend:
        def linear(self, **arguments: Any) -> Array:
            seen.update(arguments)
            return X

    assert ask(Backend(), "linear", x=1, w=2).keys() == {"y"}
    assert seen == {"x": 1, "w": 2}


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (None, "NoneType"),
        ([0.0, 0.0, 0.0], "list"),
        (1.0, "float"),
        (np.float32(1), "float32"),
        ("text", "str"),
        ((X, X), "ndarray, ndarray"),
        ((), ""),
        ({"y": X}, "dict"),
    ],
)
def test_an_answer_that_is_no_array_is_wrong(answer: object, kinds: str) -> None:
    with pytest.raises(WrongAnswerError) as caught:
        ask(One("exp", answer), x=X)
    assert str(caught.value) == f"exp must return 1 numpy array(s), not ({kinds})"


@pytest.mark.parametrize("answer", [X, (X,), (X, X, X), (X, None), (X, 1.0)])
def test_two_results_are_two(answer: object) -> None:
    with pytest.raises(WrongAnswerError, match=r"quantize_int8 must return 2 numpy array\(s\)"):
        ask(One("quantize_int8", answer), "quantize_int8", x=X)
    assert list(ask(One("quantize_int8", (X, X)), "quantize_int8", x=X)) == ["codes", "scale"]


def test_a_tuple_of_one_is_one_result() -> None:
    assert ask(One("exp", (X,)), x=X)["y"].shape == (3,)


@pytest.mark.parametrize("owned", [None, 3, "exp"])
def test_what_cannot_be_called_is_not_implemented(owned: object) -> None:
    class Backend:
        exp = owned

    with pytest.raises(NotImplementedByBackendError, match=r"^exp$"):
        ask(Backend(), x=X)
    with pytest.raises(NotImplementedByBackendError, match=r"^log$"):
        ask(Backend(), "log", x=X)


def test_a_backend_may_answer_into_one_array_again_and_again() -> None:
    class Backend:
        out = np.zeros(3, np.float32)

        def exp(self, x: Array) -> Array:
            self.out[:] = x
            return self.out

    backend = Backend()
    first = ask(backend, x=X + 1)
    second = ask(backend, x=X + 2)
    assert first["y"].tolist() == [1, 1, 1]
    assert second["y"].tolist() == [2, 2, 2]


def test_a_mask_does_not_hide_anything() -> None:
    masked = np.ma.MaskedArray(X + 5, mask=True)
    answer = ask(One("exp", masked), x=X)["y"]
    assert type(answer) is np.ndarray
    assert answer.tolist() == [5, 5, 5]


class Session:
    """A session that counts, and answers into one array."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []
        self.resets = 0
        self.out = np.zeros((4, 2), np.float32)

    def reset(self) -> None:
        self.resets += 1
        self.fed = []

    def forward(self, tokens: Array, attention: str) -> Array:
        self.fed.append(tokens.tolist())
        self.out[: len(tokens)] = tokens[:, None]
        return self.out[: len(tokens)]

    def generate(self, prompt: Array, max_new_tokens: int, exact_prefill: bool) -> Any:
        return np.full(max_new_tokens, len(prompt)), np.zeros((max_new_tokens, 2), np.float32)


class Loading:
    """A backend that counts what it loads."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str]] = []
        self.session = Session()

    def load(self, model: str, weights: str) -> Session:
        self.loaded.append((model, weights))
        return self.session


FORWARD = {"model": "tiny-dense", "weights": "int4", "attention": "exact"}


def test_a_model_is_loaded_once_and_reset_before_each_use() -> None:
    backend = Loading()
    sessions = Sessions(backend)
    for _ in range(3):
        call(backend, sessions, "forward", {**FORWARD, "tokens": np.arange(3)})
    assert backend.session.resets == 3
    assert [(Path(model).name, weights) for model, weights in backend.loaded] == [
        ("tiny-dense", "int4")
    ]
    assert Path(backend.loaded[0][0]).is_dir()
    call(backend, sessions, "forward", {**FORWARD, "weights": "float32", "tokens": np.arange(3)})
    assert len(backend.loaded) == 2


def test_tokens_are_fed_in_chunks() -> None:
    backend = Loading()
    arguments = {**FORWARD, "tokens": np.arange(6), "chunks": [1, 3, 2], "last": 4}
    answer = ask(backend, "forward", **arguments)["y"]
    assert backend.session.fed == [[0], [1, 2, 3], [4, 5]]
    assert answer.tolist() == [[2, 2], [3, 3], [4, 4], [5, 5]]


def test_generate_goes_to_the_session() -> None:
    arguments = {"prompt": np.arange(5), "max_new_tokens": 2, "exact_prefill": True}
    answer = ask(Loading(), "generate", model="tiny-dense", weights="float32", **arguments)
    assert answer["tokens"].tolist() == [5, 5]
    assert answer["logits"].shape == (2, 2)


@pytest.mark.parametrize(
    ("session", "missing"),
    [
        (object(), "reset"),
        (type("S", (), {"reset": lambda self: None})(), "forward"),
        (None, "reset"),
    ],
)
def test_a_session_may_lack_methods(session: object, missing: str) -> None:
    with pytest.raises(NotImplementedByBackendError, match=missing):
        ask(One("load", session), "forward", **FORWARD, tokens=np.arange(3))
    with pytest.raises(NotImplementedByBackendError, match="load"):
        ask(object(), "forward", **FORWARD, tokens=np.arange(3))
