"""llama.cpp's own server, on the model as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from conformance.cases.server import CASES, Book
from conformance.paths import model_folder
from tests.conformance.cases.server.judging import CANNOT, MODEL, judge, outcomes
from tests.reference.loading import gguf_files


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a GGUF file of float32."""
    folder = model_folder(MODEL)
    raw = json.loads((folder / "config.json").read_text())
    tensors = {n: t.astype(np.float32) for n, t in load_file(folder / "model.safetensors").items()}
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    out = gguf_files.writer(raw, path)
    gguf_files.add_byte_level(out, folder / "tokenizer.json", "gpt-2")
    out.add_eos_token_id(raw["eos_token_id"])
    out.add_add_bos_token(False)
    gguf_files.finish(out, gguf_files.converted(raw, tensors), gguf.GGMLQuantizationType.F32)
    return path


def llama_cpp(file: Path, exact_cache: bool) -> Any:
    """llama.cpp's own server in this process; by default its cache holds float16."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.port, params.verbosity = str(file), 2048, 0, -1
    params.cpuparams.n_threads = 1
    if exact_cache:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = off
    return xllamacpp.Server(params)


@pytest.mark.parametrize("api", ["llama", "openai"])
def test_llama_cpp_in_float32_passes(file: Path, book: Book, api: str) -> None:
    server = llama_cpp(file, exact_cache=True)
    found = judge(server.listening_address, book, api=api)
    cannot = CANNOT[api]
    assert outcomes(found) == {
        "pass": {case.id for case in CASES} - cannot,
        "not implemented": cannot,
    }
    worst = max(r.worst or 0.0 for r in found.values() if r.rule == "noise")
    assert 0 < worst < 1


def test_llama_cpp_with_its_cache_of_float16(file: Path, book: Book) -> None:
    """It fails as float32, by the logprobs alone, and passes as the float16 that it is."""
    server = llama_cpp(file, exact_cache=False)
    as_float32 = outcomes(judge(server.listening_address, book))
    assert as_float32["fail"] == {case.id for case in CASES if case.rule == "noise"}
    as_float16 = judge(server.listening_address, book, precision="float16")
    assert "fail" not in outcomes(as_float16)
