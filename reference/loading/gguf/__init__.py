"""GGUF files: a module each for header, configuration, tensors and tokenizer (SPEC 12.2)."""

from __future__ import annotations

from pathlib import Path

from reference.config import parse_config
from reference.loading.gguf.architectures import architecture_of, to_config, where_of
from reference.loading.gguf.file import open_gguf
from reference.loading.gguf.tensors import Blocks, find_tensors
from reference.loading.gguf.vocabulary import read_tokenizer, special_ids
from reference.loading.huggingface import Checkpoint

__all__ = ["load_gguf"]


def load_gguf(path: str | Path) -> Checkpoint:
    """Read and check a GGUF file (SPEC 12.2); its tensors are dequantized when they are asked for.

    Raises ConfigError, WeightsError or TokenizerError, in one line that names the file, the field
    or tensor, and the remedy.
    """
    file = open_gguf(Path(path))
    row = architecture_of(file)
    config = parse_config(to_config(file, row), where_of(file.path))
    eos, _ = special_ids(file, config.vocab_size)
    tensors = find_tensors(file, config, row)
    return Checkpoint(
        path=file.path,
        config=config,
        tensors=tensors,
        tokenizer=read_tokenizer(file, config.vocab_size),
        eos_token_ids=eos,
        blocks=Blocks(tensors),
    )
