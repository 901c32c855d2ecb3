"""The command line of `bitforbit`: which commands there are, and how they end."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from difflib import get_close_matches
from importlib.metadata import version
from typing import NoReturn

from conformance.commands import (
    calibrate,
    check,
    export,
    faults,
    fuzz,
    gate,
    generate,
    goldens,
    judge,
    new_backend,
    serve,
)
from conformance.commands.common import COULD_NOT_RUN
from conformance.commands.measure import (
    attention,
    bench,
    ceiling,
    diagnose,
    orders,
    perplexity,
    placement,
    prefix,
    profile,
    quantization,
    router,
    schedule,
    speedup,
)
from reference.errors import BitforbitError

COMMANDS = (
    check,
    fuzz,
    new_backend,
    export,
    judge,
    goldens,
    calibrate,
    faults,
    gate,
    generate,
    serve,
    schedule,
    prefix,
    bench,
    perplexity,
    profile,
    attention,
    speedup,
    orders,
    router,
    ceiling,
    placement,
    quantization,
    diagnose,
)

DESCRIPTION = """\
The executable specification of LLM inference, and the suite that holds a backend to it.

judge
  bitforbit check                        does this machine reproduce every golden, to the bit?
  bitforbit check my_backend.py          is my backend right?
  bitforbit fuzz my_backend.py           is it right on inputs that nobody knows beforehand?
  bitforbit new-backend my_backend       write one that runs at once, to begin with
  bitforbit export DIR                   inputs out, for a backend that lives elsewhere
  bitforbit judge DIR                    its answers back: are they right?
  bitforbit goldens make --model PATH    goldens of a model of mine
  bitforbit faults list                  which mistakes does the suite know?
  bitforbit calibrate                    what does it catch, and whom does it accuse?
  bitforbit gate                         what is "the first 64 tokens are equal" worth?

run
  bitforbit generate --model PATH --prompt TEXT
  bitforbit serve --model PATH           the engine behind HTTP

measure
  bitforbit bench                        how fast are prefill and decode, here or behind HTTP?
  bitforbit profile                      what does the time of a prefill go to?
  bitforbit ceiling                      how fast could a model be on a machine?
  bitforbit diagnose bench.jsonl         is prefill the problem, or decode?
  bitforbit attention                    what does fast attention gain, and change?
  bitforbit schedule                     what does a long prompt do to others?
  bitforbit prefix                       what does reuse save, and what do moved chunks cost?
  bitforbit speedup                      what do more threads or processes do to prefill?
  bitforbit placement                    what does it cost to leave experts with the CPU?
  bitforbit perplexity                   how well does a model predict, how far from its base?
  bitforbit quantization                 group scales, or sums without an order?
  bitforbit orders                       what does the order of sums do to a text?
  bitforbit router                       does rounding change which experts compute a token?

`bitforbit COMMAND --help` says more of each.
"""


class _Overview(argparse.RawDescriptionHelpFormatter):
    """Help in which the description lists the commands, and nothing lists them again."""

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, argparse._SubParsersAction):
            super().add_argument(action)


class Grammar(argparse.ArgumentParser):
    """A parser whose errors are one line, and say what was perhaps meant."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with exit code 2."""
        near = ""
        if wrong := re.fullmatch(
            r"argument \w+: invalid choice: '(.*)' \(choose from (.*)\)", message
        ):
            found = get_close_matches(wrong[1], re.findall("'([^']+)'", wrong[2]), 1)
            near = f"did you mean {found[0]}? " if found else ""
            message = f"{wrong[1]!r} is no command"
        self.exit(COULD_NOT_RUN, f"{self.prog}: {message}; {near}see `{self.prog} --help`\n")


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    raw = argparse.RawDescriptionHelpFormatter
    top = Grammar(prog="bitforbit", description=DESCRIPTION, formatter_class=_Overview)
    top.add_argument("--version", action="version", version=f"bitforbit {version('bitforbit')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands, {"formatter_class": raw})
    _own(top)
    return top


def _own(parser: argparse.ArgumentParser) -> None:
    """Let each grammar be known by its options, so that an error names the command it is of."""
    parser.set_defaults(owner=parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _own(inner)


def _prepare_streams() -> None:
    """Let any text be printed: what an encoding lacks is escaped, and a closed stream takes all."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 passed, 1 failed, 2 could not run."""
    words = sys.argv[1:] if arguments is None else arguments
    _prepare_streams()
    if not words:
        parser().print_help()
        return COULD_NOT_RUN
    options, unknown = parser().parse_known_args(words)
    if unknown:
        options.owner.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.words = words
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BitforbitError as error:
        print(f"bitforbit: {' '.join(str(error).split())}", file=sys.stderr)
        return COULD_NOT_RUN
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COULD_NOT_RUN
    except OSError as error:
        at = f"{error.filename}: " if error.filename else ""
        advice = "; check the path, and what may be done there" if at else ""
        reason = " ".join(str(error.strerror or error).split())
        print(f"bitforbit: {at}{reason}{advice}", file=sys.stderr)
        return COULD_NOT_RUN
    except MemoryError as error:
        reason = " ".join(str(error).split()) or "no more could be had"
        print(f"bitforbit: there is not enough memory ({reason})", file=sys.stderr)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        print("bitforbit: interrupted", file=sys.stderr)
        return COULD_NOT_RUN
    return code


if __name__ == "__main__":
    sys.exit(main())
