"""Making all goldens, and checking that making them again gives the same bytes (SPEC 15)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conformance.cases import recipes
from conformance.golden import MANIFEST, digest, file_of, manifest_text, read_manifest


def make(folder: Path) -> Iterator[str]:
    """Compute every golden and write it, each file whole or not at all; yields ids as they come.

    Goldens that no recipe makes any more are removed at the end, when the manifest is written.
    """
    digests: dict[str, str] = {}
    for recipe in recipes():
        content = recipe.make().to_bytes()
        name = file_of(recipe.id)
        digests[name] = digest(content)
        _write(folder / name, content)
        yield recipe.id
    _write(folder / MANIFEST, manifest_text(digests).encode())
    for path in folder.rglob("*.safetensors"):
        if path.relative_to(folder).as_posix() not in digests:
            path.unlink()


def verify(folder: Path) -> Iterator[tuple[str, bool]]:
    """Compute every golden again; yields each id and whether its bytes are the manifest's."""
    listed = read_manifest(folder)
    for recipe in recipes():
        yield recipe.id, listed.get(file_of(recipe.id)) == digest(recipe.make().to_bytes())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
