"""`--memory`: a limit, and a bar of layers where they are made one at a time (SPEC 12.3)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from conformance.commands.common import standard_error

if TYPE_CHECKING:
    from reference.model import Model

PASS = 512
"""Tokens of a prompt in one pass: enough that making the layers is the lesser part of it."""


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="stay in so much memory (as 512MiB or 4GiB), the cache apart: layers are made one at "
        "a time of the mapped file, and dropped",
    )


class LayerBar:
    """Layers entered and tokens computed so far, and the time left."""

    def __init__(self, progress: Progress, layers: int, passes: int) -> None:
        self._progress, self._layers, self._tokens = progress, layers, 0
        self._task = progress.add_task("", total=layers * passes, layer=0, tokens=0)

    def layer(self, index: int) -> None:
        """A layer is entered."""
        self._progress.update(self._task, advance=1, layer=f"{index + 1}/{self._layers}")

    def tokens(self, count: int) -> None:
        """Tokens are computed."""
        self._tokens += count
        self._progress.update(self._task, tokens=f"{self._tokens:,}")

    def stop(self) -> None:
        """Leave the terminal to others."""
        self._progress.stop()


@contextmanager
def layer_bar(model: Model, passes: int, console: Console | None = None) -> Iterator[LayerBar]:
    """A bar on standard error, of so many passes; none where all layers are in memory."""
    console = console or standard_error()
    with Progress(
        TextColumn("layer {task.fields[layer]}, tokens {task.fields[tokens]}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=model.memory is None or not console.is_terminal,
    ) as progress:
        bar = LayerBar(progress, model.config.layers, passes)
        if model.memory is not None:
            model.memory.on_layer = bar.layer
        yield bar
