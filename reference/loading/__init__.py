"""Models on disk, folders and GGUF files: everything is checked before it is used (SPEC 12)."""

from pathlib import Path

from reference.loading.gguf import load_gguf
from reference.loading.huggingface import Checkpoint, expected_tensors, load_folder

__all__ = ["Checkpoint", "expected_tensors", "load_checkpoint", "load_folder", "load_gguf"]


def load_checkpoint(path: Path, mapped: bool = False) -> Checkpoint:
    """Read a GGUF file, where the name ends in `.gguf`, or else a folder (SPEC 12).

    mapped: whether tensors are read only when they are asked for, as those of a GGUF file always
    are (SPEC 12.3). Raises ConfigError, WeightsError or TokenizerError.
    """
    return load_gguf(path) if path.suffix == ".gguf" else load_folder(path, mapped)
