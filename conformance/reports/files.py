"""Writing a report so that it is whole or not there at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from reference.errors import RequestError


def text_writer(target: str, option: str) -> Callable[[str], None]:
    """A writer of a file, checked before the work is done; `-` is standard output.

    Raises RequestError, here or when it writes, where that cannot be.
    """
    if target == "-":
        return lambda text: print(text, end="", flush=True)
    path = Path(target)
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(f"{option}: cannot write {target}; give a file in a folder that exists")

    def fails(error: OSError) -> RequestError:
        return RequestError(f"{option}: cannot write {target} ({error.strerror})")

    def write_to(place: Path, text: str) -> None:
        try:
            place.write_text(text, encoding="utf-8")
        except OSError as error:
            raise fails(error) from error

    if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
        return lambda text: write_to(path, text)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise fails(error) from error

    def write(text: str) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write_to(temporary, text)
            os.replace(temporary, path)
        except OSError as error:
            raise fails(error) from error
        finally:
            temporary.unlink(missing_ok=True)

    return write
