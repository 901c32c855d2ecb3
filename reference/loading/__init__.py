"""Models as they lie on disk: everything is checked before it is believed (SPEC 12)."""

from reference.loading.huggingface import Checkpoint, expected_tensors, load_folder

__all__ = ["Checkpoint", "expected_tensors", "load_folder"]
