"""Which backend a command opens: by name or file, or the program that `--process` starts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.backends import Opening


def opening_of(options: argparse.Namespace, timed: str = "--process") -> Opening:
    """How to open the backend that was asked for. Raises RequestError.

    timed: the options, in words, that `--timeout` goes with.
    """
    from conformance.backends import Opening

    if options.process is None:
        if options.timeout is not None:
            raise RequestError(f"--timeout: it is for {timed}")
        if options.backend is None:
            _demand_report(options.json)
        return Opening(options.backend or "numpy", options.device)
    if options.backend is not None or options.device is not None:
        raise RequestError("--process: it goes neither with a BACKEND nor with --device")
    return Opening(process=options.process, seconds=options.timeout)


def _demand_report(target: str | None) -> None:
    """Raise RequestError where what stands behind `--json` may be meant as the backend."""
    if target not in (None, "-") and not str(target).endswith(".json"):
        raise RequestError(
            f"--json: {target} is taken for the file to write; if it is the BACKEND, put it before "
            "--json, and else let the file's name end in .json"
        )
