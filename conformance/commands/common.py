"""What several commands share: exit codes, the progress bar, and a prompt from a file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reference.errors import RequestError

OK, FAILED, COULD_NOT_RUN = 0, 1, 2


def progress_bar(console: Console) -> Progress:
    """A bar with a description, a count and the time; nothing where no one looks."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def text_of(given: str, option: str) -> str:
    """The text that an option gives; `@FILE` reads a file. Raises RequestError."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option}: cannot read {given[1:]} as UTF-8 text ({error})") from error
