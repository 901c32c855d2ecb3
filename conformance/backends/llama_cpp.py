"""llama.cpp on `tiny-dense`, by its own server (extras `http` and `llama_cpp`; docs/doors.md).

    bitforbit check llama_cpp                        keys and values in float32
    bitforbit check llama_cpp --precision float16    as llama.cpp is by default

The model is written as a GGUF file of float32 and served by the llama.cpp in the package xllamacpp,
on one thread. This module run by itself serves it for others, or writes the file for a llama-server
of one's own:

    python -m conformance.backends.llama_cpp --port 8080 --defaults
    python -m conformance.backends.llama_cpp --write tiny-dense.gguf
    llama-server -m tiny-dense.gguf -ctk f32 -ctv f32 -fa off --port 8080
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from conformance.paths import model_folder

MODEL = "fixtures/tiny-dense"


def write(file: Path) -> Path:
    """Write the model, which is a Qwen3, as its converter would; all tensors are float32."""
    folder = model_folder(MODEL)
    raw = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, raw["num_hidden_layers"])
    out = gguf.GGUFWriter(file, "qwen3")
    out.add_name("tiny-dense")
    out.add_block_count(raw["num_hidden_layers"])
    out.add_context_length(raw["max_position_embeddings"])
    out.add_embedding_length(raw["hidden_size"])
    out.add_feed_forward_length(raw["intermediate_size"])
    out.add_head_count(raw["num_attention_heads"])
    out.add_head_count_kv(raw["num_key_value_heads"])
    out.add_key_length(raw["head_dim"])
    out.add_value_length(raw["head_dim"])
    out.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    out.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    _add_tokenizer(out, json.loads((folder / "tokenizer.json").read_text()), raw["eos_token_id"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        out.add_tensor(stored, tensor.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


def _add_tokenizer(out: gguf.GGUFWriter, described: dict[str, Any], end: int) -> None:
    """Add a byte-level BPE whose words are those of GPT-2."""
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    ids = {**described["model"]["vocab"], **added}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    merges = described["model"]["merges"]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types([kinds[token in added] for token in tokens])
    out.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    out.add_eos_token_id(end)
    out.add_add_bos_token(False)


@contextlib.contextmanager
def serving(port: int = 0, defaults: bool = False) -> Iterator[str]:
    """The address of llama.cpp's server on the fixture, in this process; port 0 is any free one.

    defaults: leave keys and values, and flash attention, as llama.cpp has them.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = serve(write(Path(folder) / "tiny-dense.gguf"), port, defaults)
        yield server.listening_address


def serve(file: Path, port: int, defaults: bool) -> Any:
    """llama.cpp's own server in this process."""
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.port, params.verbosity = str(file), 2048, port, -1
    params.cpuparams.n_threads = 1
    if not defaults:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = off
    return xllamacpp.Server(params)


def main() -> None:
    """Write, and serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--defaults", action="store_true", help="llama.cpp's cache and attention")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the file, serve nothing")
    given = parser.parse_args()
    if given.write is not None:
        print(write(given.write))
        return
    with serving(given.port, given.defaults) as address:
        print(address, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
