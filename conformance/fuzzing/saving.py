"""Keeping failing cases as goldens, which `check --goldens` and `goldens show` read (SPEC 15)."""

from __future__ import annotations

from pathlib import Path

from conformance.golden import (
    MANIFEST,
    Golden,
    digest,
    file_of,
    manifest_text,
    read_manifest,
    read_own,
    write_whole,
)
from reference.errors import RequestError


class Folder:
    """A folder of saved cases: a new one, or one of earlier saves, which are kept."""

    def __init__(self, path: Path) -> None:
        """Look at the folder. Raises RequestError where it holds anything else."""
        self.path = path
        self._digests: dict[str, str] = {}
        if (path / MANIFEST).exists():
            if read_own(path) is not None:
                raise RequestError(f"--save: {path} holds goldens of a model; give another folder")
            self._digests = dict(read_manifest(path))
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RequestError(f"--save: {path} holds something else; give a new folder")

    def add(self, golden: Golden) -> None:
        """Write a golden, and the manifest with it."""
        name, content = file_of(golden.id), golden.to_bytes()
        self._digests[name] = digest(content)
        write_whole(self.path / name, content)
        write_whole(self.path / MANIFEST, manifest_text(self._digests).encode())
