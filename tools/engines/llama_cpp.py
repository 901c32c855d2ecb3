"""llama.cpp through `xllamacpp`: logits of every position, and tensors on the way to them.

The package binds the server, which tells log-probabilities of the last token. The library inside it
exports llama.cpp's own C interface, and this module calls that. Structures that are passed by value
stay opaque: the package's `CommonParams` is turned into them by llama.cpp's own functions, and no
offset is assumed that is not checked.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from reference.arithmetic import F32

CONTEXT = 1024
"""Positions of a context, and tokens that one pass takes."""


class EngineError(Exception):
    """llama.cpp cannot be asked: it is not installed, or not as this module knows it."""


class _Parameters(ctypes.Structure):
    """Parameters of a model or a context: larger than any version's, read from the front."""

    _fields_ = (("words", c_uint64 * 256),)


class _Batch(ctypes.Structure):
    """`llama_batch`, and room behind it."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
        ("room", c_uint64 * 32),
    )


_EVALUATED = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "_Z28common_model_params_to_llamaR13common_params": (_Parameters, c_void_p),
    "_Z30common_context_params_to_llamaRK13common_params": (_Parameters, c_void_p),
    "ggml_get_data_f32": (POINTER(c_float), c_void_p),
    "ggml_get_name": (c_char_p, c_void_p),
    "ggml_nelements": (c_int64, c_void_p),
    "ggml_version": (c_char_p,),
    "llama_backend_init": (None,),
    "llama_batch_free": (None, _Batch),
    "llama_batch_init": (_Batch, c_int32, c_int32, c_int32),
    "llama_decode": (c_int32, c_void_p, _Batch),
    "llama_free": (None, c_void_p),
    "llama_get_logits": (POINTER(c_float), c_void_p),
    "llama_init_from_model": (c_void_p, c_void_p, _Parameters),
    "llama_log_set": (None, _LOG, c_void_p),
    "llama_model_free": (None, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_model_load_from_file": (c_void_p, c_char_p, _Parameters),
    "llama_n_ctx": (ctypes.c_uint32, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
}
_PYTHON_HEADER = 16
"""Bytes of a Python object before the structure that a `CommonParams` holds."""


@dataclass(frozen=True)
class Answer:
    """logits: (T, V) float32. seen: the tensors that were asked for, (T, n) float32 by name."""

    logits: F32
    seen: Mapping[str, F32]


class _Library:
    """The functions, by name."""

    def __init__(self) -> None:
        try:
            self.package: Any = importlib.import_module("xllamacpp")
        except ImportError as error:
            raise EngineError(f"xllamacpp is not installed ({error}); pip install it") from None
        library = ctypes.CDLL(self.package.xllamacpp.__file__)
        self._functions = {}
        for name, (result, *arguments) in _FUNCTIONS.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                version = self.package.__version__
                raise EngineError(f"xllamacpp {version} exports no {name}; try 2026.10") from None
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self.errors: list[str] = []
        self._log = _LOG(self._heard)
        self("llama_log_set", self._log, None)
        self("llama_backend_init")

    def __call__(self, name: str, *arguments: Any) -> Any:
        return self._functions[name](*arguments)

    def _heard(self, level: int, text: bytes, _: object) -> None:
        """Keep what llama.cpp says of errors (level 4), and nothing else."""
        if level == 4:
            self.errors.append(text.decode(errors="replace").strip())

    def parameters(self, common: Any) -> tuple[_Parameters, _Parameters]:
        """Of the model and of the context."""
        place = id(common) + _PYTHON_HEADER
        return (
            self("_Z28common_model_params_to_llamaR13common_params", place),
            self("_Z30common_context_params_to_llamaRK13common_params", place),
        )

    def common(self, half_cache: bool = False, flash: bool = False) -> Any:
        """One thread, one pass, no repacking; keys and values in float32 unless `half_cache`."""
        package, common = self.package, self.package.CommonParams()
        common.n_ctx = common.n_batch = common.n_ubatch = CONTEXT
        common.n_parallel, common.n_gpu_layers = 1, 0
        common.no_extra_bufts = common.swa_full = True
        common.warmup = False
        common.cpuparams.n_threads = common.cpuparams_batch.n_threads = 1
        kinds, attention = package.ggml_type, package.llama_flash_attn_type
        kind = kinds.GGML_TYPE_F16 if half_cache else kinds.GGML_TYPE_F32
        common.cache_type_k = common.cache_type_v = kind
        common.flash_attn_type = (
            attention.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash
            else attention.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        return common

    @cached_property
    def callback_word(self) -> int:
        """Where a context's parameters have the callback: two pointers before the type of keys.

        Raises EngineError where there is something else.
        """
        both = [self.parameters(self.common(half))[1].words for half in (False, True)]
        place = next(i for i in range(64) if both[0][i] != both[1][i]) - 2
        if any(both[0][place : place + 2]):
            raise EngineError(
                "a context's parameters are laid out unexpectedly; try xllamacpp 2026.10"
            )
        return place


@cache
def _library() -> _Library:
    return _Library()


def versions() -> Mapping[str, str]:
    """Of the package, and of ggml within it. Raises EngineError where it is not installed."""
    library = _library()
    return {
        "xllamacpp": library.package.__version__,
        "ggml": library("ggml_version").decode(),
    }


def system() -> str:
    """The instruction sets that it was built for."""
    return str(_library().package.get_system_info()).strip(" |")


def ask(
    file: Path,
    tokens: Sequence[int],
    watch: str | None = None,
    half_cache: bool = False,
    flash: bool = False,
) -> Answer:
    """Logits of all tokens in one pass, and the tensors whose names match `watch`.

    half_cache: keys and values in half precision; flash: flash attention; both are llama.cpp's
    defaults. Raises EngineError where llama.cpp refuses, or did not do what was asked.
    """
    library = _library()
    common = library.common(half_cache, flash)
    for_model, for_context = library.parameters(common)
    seen: dict[str, F32] = {}

    def evaluated(tensor: int, asked: bool, _: object) -> bool:
        name = library("ggml_get_name", tensor).decode()
        wanted = watch is not None and re.fullmatch(watch, name) is not None
        if wanted and not asked:
            shape = len(tokens), library("ggml_nelements", tensor) // len(tokens)
            found = np.ctypeslib.as_array(library("ggml_get_data_f32", tensor), shape)
            seen[name] = found.copy()
        return wanted or not asked

    callback = _EVALUATED(evaluated)
    if watch is not None:
        place = library.callback_word
        for_context.words[place] = ctypes.cast(callback, c_void_p).value or 0
    with _loaded(library, file, for_model) as model, _context(library, model, for_context) as made:
        vocabulary = library("llama_vocab_n_tokens", library("llama_model_get_vocab", model))
        with _batch(library, tokens) as batch:
            if library("llama_decode", made, batch) != 0:
                raise EngineError(f"{file}: llama.cpp could not decode; {library.errors[-1:]}")
        found = library("llama_get_logits", made)
        logits = np.ctypeslib.as_array(found, (len(tokens), vocabulary)).copy()
    if watch is not None and not seen:
        raise EngineError(f"{file}: no tensor is named {watch}")
    return Answer(logits, seen)


@contextmanager
def _loaded(library: _Library, file: Path, parameters: _Parameters) -> Iterator[int]:
    library.errors.clear()
    model = library("llama_model_load_from_file", str(file).encode(), parameters)
    if not model:
        raise EngineError(f"{file}: llama.cpp does not load it: {' '.join(library.errors)}")
    try:
        yield model
    finally:
        library("llama_model_free", model)


@contextmanager
def _context(library: _Library, model: int, parameters: _Parameters) -> Iterator[int]:
    made = library("llama_init_from_model", model, parameters)
    if not made or library("llama_n_ctx", made) != CONTEXT:
        raise EngineError("llama.cpp made no context of the size asked for; try xllamacpp 2026.10")
    try:
        yield made
    finally:
        library("llama_free", made)


@contextmanager
def _batch(library: _Library, tokens: Sequence[int]) -> Iterator[_Batch]:
    """All tokens of one sequence, from position 0, with the logits of each."""
    batch = library("llama_batch_init", len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for at, token in enumerate(tokens):
        batch.token[at], batch.pos[at], batch.logits[at] = int(token), at, 1
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    try:
        yield batch
    finally:
        library("llama_batch_free", batch)
